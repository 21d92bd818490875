"""The sequences that run on this replica, or ran a moment ago: what moves, `attach` and the drain know them by."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from deployments.migration.sequence import Emit, End, Key, Sequence
from deployments.wire import Delta, Outcome, Submit

KEPT_S = 60.0  # an outcome, for an ingress that attaches late
UNATTACHED_S = 10.0  # a sequence that came here, without an ingress that follows it
IDLE_LINK_S = 60.0

Generate = Callable[[Submit, dict[str, Any], Emit], Coroutine[Any, Any, Outcome]]


class Sequences:
    """All sequences of a replica, by (rid, epoch, hop); those that ended stay for `KEPT_S` seconds.

    `generate` runs one on the engine, `send(reply_to, delta)` is the link to the ingresses, `idle(reply_to)` is called
    when one has had no sequence here for `IDLE_LINK_S` seconds.
    """

    def __init__(
        self, generate: Generate, send: Callable[[str, Delta], None], idle: Callable[[str], None], replica: str
    ) -> None:
        self._generate = generate
        self._send = send
        self._idle = idle
        self._replica = replica
        self._by_key: dict[Key, Sequence] = {}
        self._running: dict[str, Sequence] = {}  # by request id
        self._idle_links: dict[str, asyncio.TimerHandle] = {}
        self._loop = asyncio.get_running_loop()

    @property
    def running(self) -> list[Sequence]:
        """Those that the engine has and that have not been given away."""
        return [sequence for sequence in self._running.values() if not sequence.gone]

    def by_request(self, request_id: str) -> Sequence | None:
        """The running one that the engine calls so."""
        sequence = self._running.get(request_id)
        return None if sequence is None or sequence.gone else sequence

    async def run(self, submit: Submit) -> Outcome:
        """Run a submission to its end here, or until it has moved; cancelling aborts it."""
        sequence = Sequence(submit, self._link(submit))
        self._start(sequence, {})
        return await self._follow(sequence)

    def adopt(
        self,
        submit: Submit,
        parent: int,
        entries: dict[str, Any],
        on_first: Callable[[], None],
        on_end: Callable[[End], None],
    ) -> Sequence:
        """Run a hop that goes on from the hop `parent`, its deltas held back; `entries` are for the engine."""
        sequence = Sequence(submit, self._link(submit), self._replica, parent)
        sequence.on_first = on_first
        sequence.listeners.append(on_end)
        self._start(sequence, entries)
        return sequence

    def adopted(self, sequence: Sequence) -> None:
        """It is this replica's own now: an ingress has to follow it soon."""
        sequence.busy = False
        sequence.pass_on()
        self._loop.call_later(UNATTACHED_S, self._end_unattached, sequence)

    async def attach(self, key: Key) -> Outcome:
        """How the sequence ends or moves on; cancelling aborts it, an unknown one is the engine's fault."""
        sequence = self._by_key.get(key)
        if sequence is None:
            return Outcome(0, fault="engine", message="this replica does not have the sequence")
        sequence.attached = True
        return await self._follow(sequence)

    def fate(self, submit: Submit) -> Outcome | None:
        """What its ingress was told of a submission; None: nothing yet."""
        sequence = self._by_key.get((submit.rid, submit.epoch, submit.hop))
        return sequence.outcome.result() if sequence is not None and sequence.outcome.done() else None

    def abort_of(self, reply_to: str) -> int:
        """Abort the sequences of an ingress that is gone; returns how many."""
        lost = self._of(reply_to)
        for sequence in lost:
            sequence.cancel()
        return len(lost)

    def hand_back(self, sequence: Sequence, message: str) -> None:
        """End a sequence here so that its ingress goes on with it elsewhere."""
        sequence.shut(Outcome(sequence.tokens, fault="engine", message=message))
        sequence.cancel()

    def _link(self, submit: Submit) -> Emit:
        def send(delta: Delta) -> None:
            self._send(submit.reply_to, delta)

        return send

    def _start(self, sequence: Sequence, entries: dict[str, Any]) -> None:
        self._by_key[sequence.key] = self._running[sequence.request_id] = sequence
        if (timer := self._idle_links.pop(sequence.submit.reply_to, None)) is not None:
            timer.cancel()
        sequence.task = self._loop.create_task(self._generate(sequence.submit, entries, sequence.emit))
        sequence.task.add_done_callback(partial(self._end, sequence))

    def _end(self, sequence: Sequence, task: asyncio.Task[Outcome]) -> None:
        sequence.over = True
        if task.cancelled():
            end, outcome = End.ABORTED, Outcome(sequence.tokens, fault="engine", message="aborted")
        elif (error := task.exception()) is not None:
            end, outcome = End.FAILED, Outcome(sequence.tokens, fault="engine", message=repr(error))
        else:
            outcome = task.result()
            end = End.FINISHED if outcome.fault is None else End.FAILED
        for listener in sequence.listeners:
            listener(end)
        sequence.settle(outcome)
        if self._running.get(sequence.request_id) is sequence:
            del self._running[sequence.request_id]
        self._loop.call_later(KEPT_S, self._forget, sequence)
        reply_to = sequence.submit.reply_to
        if reply_to not in self._idle_links and not self._of(reply_to):
            self._idle_links[reply_to] = self._loop.call_later(IDLE_LINK_S, self._forget_link, reply_to)

    def _of(self, reply_to: str) -> list[Sequence]:
        return [sequence for sequence in self._running.values() if sequence.submit.reply_to == reply_to]

    async def _follow(self, sequence: Sequence) -> Outcome:
        try:
            return await asyncio.shield(sequence.outcome)
        except asyncio.CancelledError:
            sequence.cancel()
            if sequence.task is not None:
                await asyncio.wait([sequence.task])
            raise

    def _end_unattached(self, sequence: Sequence) -> None:
        if not (sequence.attached or sequence.gone):
            sequence.cancel()

    def _forget(self, sequence: Sequence) -> None:
        if self._by_key.get(sequence.key) is sequence:
            del self._by_key[sequence.key]

    def _forget_link(self, reply_to: str) -> None:
        del self._idle_links[reply_to]
        self._idle(reply_to)
