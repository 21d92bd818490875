"""Carries out one move on the replica that gives the request away: its engine, its stream, its messages to B."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any, Protocol

import msgspec
import numpy as np

from deployments.migration.driver import Driver, Step
from deployments.migration.engine_kv import Exported, Gone, KVRefused, NotRunning, ParkedRequest
from deployments.migration.messages import Answer, Message, Moved, message
from deployments.migration.sequence import End, Sequence
from deployments.wire import Outcome
from policies.migration import destination as d
from policies.migration import events as e
from policies.migration import handshake as h

logger = logging.getLogger(f"ray.serve.{__name__}")

_messages: set[asyncio.Task[None]] = set()  # under way, also of moves that have ended: the loop keeps no task alive
_LAST_TOKENS_S = 2.0  # for A's last tokens from its engine, which B's first has overtaken


class DestinationDead(Exception):
    """B has ended: it will send nothing more."""


class Unreachable(Exception):
    """The message was not sent: B cannot be found."""


class SourceKV(Protocol):
    """What a move asks of A's engine (deployments/migration/engine_kv.py)."""

    @property
    def fingerprint(self) -> str: ...
    async def export(self, request_id: str, first: int, blocks: int) -> Exported: ...
    async def park(self, request_id: str, first: int, lease_s: float) -> ParkedRequest: ...
    async def unpark(self, request_id: str) -> None: ...


#: Sends a message, with its KV, to a replica; returns the answer. Raises DestinationDead or Unreachable.
Call = Callable[[str, Message, Many[np.ndarray]], Any]


class SourceMove:
    """One move of a sequence of this replica to `destination`; `errored` says whether A's engine is dead."""

    def __init__(
        self,
        move: str,
        sequence: Sequence,
        plan: h.Plan,
        destination: str,
        kv: SourceKV,
        call: Call,
        limits: e.Limits,
        errored: Callable[[], bool],
    ) -> None:
        self.move = move
        self.sequence = sequence
        self.destination = destination
        self.machine = h.SourceSide(plan, limits)
        self.park_s: float | None = None  # from Park to B's first token, if it came to that
        self._kv = kv
        self._call = call
        self._errored = errored
        self._driver = Driver(self.machine, self._perform, self._failed)
        self._loop = asyncio.get_running_loop()
        self._exported: dict[int, Exported] = {}
        self._parked: ParkedRequest | None = None
        self._parked_at = math.nan
        self._hop = self._tokens = -1
        self._blocks = self._bytes = 0  # sent
        self._result: asyncio.Future[Moved] = self._loop.create_future()

    async def run(self) -> Moved:
        """Make the move; returns how it ended. Cancelling leaves the rest to the leases."""
        sequence = self.sequence
        sequence.busy, sequence.moved_at = True, self._loop.time()
        sequence.listeners.append(self._ended)
        try:
            self._driver.carry_out(self.machine.start(self._driver.now))
            if sequence.over:
                self._ended(End.FINISHED)
            return await self._result
        finally:
            self._driver.close()
            sequence.listeners.remove(self._ended)
            sequence.busy = False
            sequence.pass_on()

    def _ended(self, end: End) -> None:
        """The sequence left A's engine."""
        if end is End.FAILED and self._errored():
            self._driver.feed(e.SourceLost())
        else:
            self._driver.feed(e.AbortedByClient() if end is End.ABORTED else e.Finished())

    def _perform(self, action: e.SourceAction) -> Step | None:
        match action:
            case e.ExportStage(stage, first, blocks):
                return self._export(stage, first, blocks)
            case e.Park(lease_s):
                return self._park(lease_s)
            case e.Write(stage, first):
                self._send_stage(action, stage, first)
            case e.Commit():
                self._commit(action)
            case e.Reserve():
                self._send(message(self.move, action, fingerprint=self._kv.fingerprint))
            case e.Query() | e.ReleaseOnDestination():
                self._send(message(self.move, action))
            case e.Unpark():
                return self._kv.unpark(self.sequence.request_id)
            case e.AnnounceMoved():
                return self._announce()
            case e.FreeOnSource():
                self.sequence.cancel()
            case e.Count(outcome, reason):
                self._result.set_result(
                    Moved(
                        self.sequence.submit.rid,
                        outcome,
                        reason,
                        self._hop,
                        self._tokens,
                        self.destination,
                        self._blocks,
                        self._bytes,
                    )
                )
        return None

    def _failed(self, error: Exception) -> None:
        """An action on A's engine raised."""
        match error:
            case Gone():  # its end may still be under way from the engine
                self._driver.feed(e.Finished())
            case NotRunning():
                self._driver.feed(e.Preempted())
            case KVRefused():
                self._driver.feed(e.Refused(error.reason))
            case _ if self._errored():
                self._driver.feed(e.SourceLost())
            case _:
                logger.error("move %s: the source's engine failed an order", self.move, exc_info=error)
                self._driver.feed(e.Refused("failed"))

    async def _export(self, stage: int, first: int, blocks: int) -> None:
        self._exported[stage] = await self._kv.export(self.sequence.request_id, first, blocks)

    def _send_stage(self, write: e.Write, stage: int, first: int) -> None:
        exported = self._exported.get(stage)
        if exported is None:
            return  # the machine has heard why
        if exported.copied:
            self._send(message(self.move, write, first=first, blocks=exported.copied), exported.parts)
        else:
            self._hear(d.Stored(stage))

    async def _park(self, lease_s: float) -> None:
        # No stage is under way when the machine parks: what it counts as copied is what the last blocks follow on.
        self._parked_at = self._loop.time()
        parked = await self._kv.park(self.sequence.request_id, self.machine.copied, lease_s)
        self._tokens = len(parked.output)
        if self.sequence.tokens > self._tokens or (self.machine.plan.held and not parked.held):
            self._driver.feed(e.Preempted())  # it ran on, as its lease is over, or its blocks are gone
            return
        self._parked = parked
        self.sequence.hold(self._tokens)
        self._driver.feed(e.Parked(parked.held))

    def _commit(self, commit: e.Commit) -> None:
        parked = self._parked
        assert parked is not None
        self._hop = self.sequence.next_hop()
        submit = msgspec.structs.replace(
            self.sequence.submit,
            output=parked.output,
            hop=self._hop,
            reasoning_ended=None if parked.output else self.sequence.submit.reasoning_ended,  # B finds out
        )
        self._send(
            message(
                self.move,
                commit,
                first=parked.first,
                blocks=parked.copied,
                computed=parked.computed,
                submit=submit,
                parent=self.sequence.made(self._tokens),
            ),
            parked.parts,
        )

    async def _announce(self) -> None:
        """The ingress hears where the sequence is, after A's last token is on its way."""
        self.park_s = self._loop.time() - self._parked_at
        await self.sequence.reach(self._tokens, _LAST_TOKENS_S)
        self.sequence.shut(Outcome(self._tokens, moved_to=self.destination, hop=self._hop))

    def _send(self, sent: Message, parts: Many[np.ndarray] = ()) -> None:
        # Serve ties a call to the request in whose context it is made; a move belongs to none.
        task = self._loop.create_task(self._ask(sent, parts), context=contextvars.Context())
        _messages.add(task)
        task.add_done_callback(_messages.discard)

    async def _ask(self, sent: Message, parts: Many[np.ndarray]) -> None:
        self._blocks += sent.blocks
        self._bytes += sum(part.nbytes for part in parts)
        try:
            answer = await self._call(self.destination, sent, parts)
        except DestinationDead:
            self._driver.feed(e.DestinationLost())
        except Unreachable:  # the commit is asked for once: what was not sent B never takes
            self._driver.feed(e.CommitRefused("unreachable") if sent.ask == "Commit" else e.Refused("unreachable"))
        except Exception:
            logger.exception("move %s: %s to %s failed", self.move, sent.ask, self.destination)
        else:
            self._hear(answer)

    def _hear(self, answer: Answer | None) -> None:
        if isinstance(answer, d.Stored):
            exported = self._exported.pop(answer.stage, None)
            if exported is not None:
                self._driver.feed(e.StageWritten(answer.stage, exported.copied, exported.left, exported.held))
        elif answer is not None:
            self._driver.feed(answer)
