"""The moves away from this replica: who goes, several at once, and a line in the log for each."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from deployments import metrics, tracing
from deployments.migration.messages import Give, Given, How, Moved
from deployments.migration.sequence import Sequence
from deployments.migration.sequences import Sequences
from deployments.migration.source import Call, SourceKV, SourceMove
from deployments.settings import MigrationSettings
from deployments.wire import trace_id
from policies.migration.handshake import Plan, State
from policies.migration.pairing import REASONS, Move, Reason
from policies.migration.victims import Candidate
from policies.tiers import MAX_TIERS

logger = logging.getLogger(f"ray.serve.{__name__}")

_ALL_AT_ONCE = 1 << 30  # blocks left for the pause: no stage before it
_LARGEST = 1 << 40  # blocks


class GivingKV(SourceKV, Protocol):
    """What is asked of this replica's engine (deployments/migration/engine_kv.py)."""

    async def candidates(self) -> list[Candidate]: ...


class Departures:
    """Chooses and moves sequences of this replica. `ready(destination)` waits until calls reach it."""

    def __init__(
        self,
        replica: str,
        kv: GivingKV,
        sequences: Sequences,
        call: Call,
        ready: Callable[[str], Awaitable[None]],
        settings: MigrationSettings,
        errored: Callable[[], bool],
    ) -> None:
        self._replica = replica
        self._kv = kv
        self._sequences = sequences
        self._call = call
        self._ready = ready
        self._settings = settings
        self._errored = errored
        self.under_way: dict[str, SourceMove] = {}  # by request id
        self._tasks: set[asyncio.Task[Moved]] = set()
        self._line = asyncio.Semaphore(settings.pairing.drain_out)

    async def candidates(self) -> list[Candidate]:
        """The requests that the engine has and that are this replica's to give."""
        now = asyncio.get_running_loop().time()
        known = [(c, self._sequences.by_request(c.request_id)) for c in await self._kv.candidates()]
        return [replace(c, moved_s=now - sequence.moved_at) for c, sequence in known if sequence is not None]

    async def give(self, order: Give) -> Given:
        """Carry out an order; returns when its moves have ended."""
        if order.destination == self._replica:
            raise ValueError(f"replica {self._replica} has its requests already: name another destination")
        candidates = await self.candidates()
        if order.rid is not None:
            outcomes = [await self._named(order, order.rid, candidates)]
        else:
            moves = [
                self.depart(*choice, order.destination, order.reason, order.how)
                for choice in self._choose(order, candidates)
            ]
            outcomes = list(await asyncio.gather(*map(asyncio.shield, moves)))
        return Given(sum(moved.outcome in (State.DONE.value, "recompute") for moved in outcomes), outcomes)

    def _choose(self, order: Give, candidates: list[Candidate]) -> list[tuple[Candidate, Sequence]]:
        victims = self._settings.victims.choose_all(self._move(order), candidates, self.busy())
        known = ((victim, self._sequences.by_request(victim.request_id)) for victim in victims)
        return [(victim, sequence) for victim, sequence in known if sequence is not None]

    def busy(self) -> set[str]:
        """Request ids that no move may take now."""
        return {sequence.request_id for sequence in self._sequences.running if sequence.busy}

    def _move(self, order: Give) -> Move:
        reason: Reason = next((known for known in REASONS if known == order.reason), "hand")
        room = tuple((least, most) for least, most in order.room) or ((0, _LARGEST),) * MAX_TIERS
        return Move(self._replica, order.destination, reason, room, order.waiting_tier, order.count)

    async def _named(self, order: Give, rid: str, candidates: list[Candidate]) -> Moved:
        for candidate in candidates:
            sequence = self._sequences.by_request(candidate.request_id)
            if sequence is None or rid not in (sequence.submit.rid, sequence.submit.rid.rpartition("-")[0]):
                continue
            if sequence.busy:
                return Moved(rid, State.ABORTED.value, "busy")
            if candidate.place == "prefill":
                return Moved(rid, State.ABORTED.value, "prefill")
            return await asyncio.shield(self.depart(candidate, sequence, order.destination, order.reason, order.how))
        return Moved(rid, State.ABORTED.value, "unknown")

    def depart(
        self, candidate: Candidate, sequence: Sequence, destination: str, reason: str, how: How = "live"
    ) -> asyncio.Task[Moved]:
        """Begin to move one sequence; it counts as busy at once."""
        sequence.busy = True
        task = asyncio.get_running_loop().create_task(self._depart(candidate, sequence, destination, reason, how))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _depart(self, candidate: Candidate, sequence: Sequence, destination: str, reason: str, how: How) -> Moved:
        began = time.monotonic()
        if how == "recompute":
            moved = Moved(sequence.submit.rid, how, "handed_back", tokens=sequence.tokens)
            self._sequences.hand_back(sequence, "draining")
            self._note(sequence, reason, moved, began, 0, None)
            return moved
        limits = self._settings.limits
        if how == "stop_and_copy":
            limits = replace(limits, last_stage_blocks=_ALL_AT_ONCE)
        held = candidate.blocks if candidate.place == "decode" else 0
        plan = Plan(held, must=reason == "drain", refused=candidate.refused)
        name = f"{sequence.request_id}>{uuid.uuid4().hex[:12]}"
        try:
            await self._ready(destination)
            async with self._line:  # the engine copies out one after the other: who waits here is not parked yet
                move = SourceMove(name, sequence, plan, destination, self._kv, self._call, limits, self._errored)
                self.under_way[sequence.request_id] = move
                moved = await move.run()
        finally:
            self.under_way.pop(sequence.request_id, None)
            sequence.busy = False
        self._note(sequence, reason, moved, began, move.machine.stages, move.park_s)
        return moved

    def _note(
        self, sequence: Sequence, reason: str, moved: Moved, began: float, stages: int, park_s: float | None
    ) -> None:
        """The move's line in the log, its figures and its span."""
        logger.info(
            "migration request=%s trace=%s reason=%s source=%s destination=%s hop=%d stages=%d blocks=%d bytes=%d "
            "park_ms=%s outcome=%s why=%s",
            *(moved.rid, trace_id(sequence.submit.trace), reason, self._replica, moved.destination or "-", moved.hop),
            *(stages, moved.blocks, moved.bytes, "-" if park_s is None else f"{1000 * park_s:.1f}"),
            *(moved.outcome, moved.reason),
        )
        metrics.moved(
            reason,
            moved.outcome,
            moved.reason,
            stages=stages,
            blocks=moved.blocks,
            bytes=moved.bytes,
            park_s=park_s,
        )
        if sequence.submit.trace is not None and (spans := tracing.current()) is not None:
            attributes = {
                "tidegate.sequence_id": moved.rid,
                "tidegate.reason": reason,
                "tidegate.replica": self._replica,
                "tidegate.destination": moved.destination or None,
                "tidegate.epoch": sequence.submit.epoch,
                "tidegate.hop": moved.hop if moved.hop >= 0 else None,
                "tidegate.stages": stages,
                "tidegate.kv_blocks": moved.blocks,
                "tidegate.kv_bytes": moved.bytes,
                "tidegate.pause_s": park_s,
                "tidegate.generated_tokens": moved.tokens if moved.tokens >= 0 else None,
                "tidegate.outcome": moved.outcome,
                "tidegate.why": moved.reason,
            }
            spans.record(tracing.MIGRATE, sequence.submit.trace, began, time.monotonic(), attributes)

    def close(self) -> None:
        """Stop the moves where they are."""
        for task in list(self._tasks):
            task.cancel()
