"""Carries out moves on the replica that takes requests: reservations, stages, adopted sequences, answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any, Protocol

import numpy as np

from deployments.migration.driver import Driver, Step
from deployments.migration.engine_kv import KVRefused
from deployments.migration.messages import Answer, Message, decode_message, encode_answer
from deployments.migration.sequence import End, Sequence
from deployments.migration.sequences import Sequences
from policies.migration import destination as d
from policies.migration import events as e

logger = logging.getLogger(f"ray.serve.{__name__}")


class DestinationKV(Protocol):
    """What a move asks of B's engine (deployments/migration/engine_kv.py)."""

    @property
    def fingerprint(self) -> str: ...
    async def reserve(self, move: str, blocks: int, lease_s: float) -> int: ...
    async def write(self, move: str, first: int, blocks: int, parts: Many[np.ndarray], lease_s: float) -> None: ...
    async def release(self, move: str) -> None: ...
    def adoption(
        self, move: str, computed: int, first: int, blocks: int, parts: Many[np.ndarray]
    ) -> dict[str, Any]: ...


class Destination:
    """The moves to this replica by name; `refusal` says why none is taken now, None if they are.

    `counted(outcome, reason)` is told of moves that ended here without a word from A.
    """

    def __init__(
        self,
        kv: DestinationKV,
        sequences: Sequences,
        limits: e.Limits,
        refusal: Callable[[], str | None],
        counted: Callable[[str, str], None],
    ) -> None:
        self.kv = kv
        self.sequences = sequences
        self.limits = limits
        self.refusal = refusal
        self.counted = counted
        self._moves: dict[str, DestinationMove] = {}

    @property
    def names(self) -> list[str]:
        """The moves that are under way or remembered."""
        return list(self._moves)

    async def hear(self, frame: bytes, parts: Many[np.ndarray]) -> bytes:
        """Take one message of a source; returns the answer once there is one."""
        sent = decode_message(frame)
        move = self._moves.get(sent.move)
        if move is None:
            move = self._moves[sent.move] = DestinationMove(sent.move, self)
        return encode_answer(await move.hear(sent, parts))

    def forget(self, move: str) -> None:
        """A move that no message can name any more."""
        self._moves.pop(move, None)

    def close(self) -> None:
        """Stop all moves; what they hold is left to the leases."""
        for move in list(self._moves.values()):
            move.close()
        self._moves.clear()


class DestinationMove:
    """One move on B."""

    def __init__(self, name: str, place: Destination) -> None:
        self.machine = d.DestinationSide(place.limits)
        self._name = name
        self._place = place
        self._driver = Driver(self, self._perform, self._failed)
        self._lease_s = 0.0
        self._fingerprint = ""
        self._stages: dict[int, tuple[Message, Many[np.ndarray]]] = {}
        self._committed: tuple[Message, Many[np.ndarray]] | None = None
        self._sequence: Sequence | None = None
        self._waiting: list[tuple[e.ToDestination, asyncio.Future[Answer]]] = []

    def handle(self, event: Any, now: float) -> tuple[d.Action, ...]:
        """The machine's turn; the driver's timer also ends a move that may be forgotten."""
        actions = self.machine.handle(event, now)
        if self.machine.state in (d.ADOPTED, d.RELEASED):
            self._stages.clear()
            self._committed = None
            if self.machine.forgettable(now):
                self._place.forget(self._name)
                self.close()
        return actions

    def deadline(self) -> float:
        """The machine's."""
        return self.machine.deadline()

    def close(self) -> None:
        """Stop the move where it is."""
        self._driver.close()
        for _, answered in self._waiting:
            answered.cancel()

    async def hear(self, sent: Message, parts: Many[np.ndarray]) -> Answer | None:
        """Feed a message and wait for its answer, but no longer than a lease: None."""
        event = sent.event
        match event:
            case e.Reserve(_, lease_s):
                self._fingerprint, self._lease_s = sent.fingerprint, lease_s
            case e.Write(stage, _, lease_s):
                self._stages[stage], self._lease_s = (sent, parts), lease_s
            case e.Commit() if self.machine.state is d.RESERVED:
                self._committed = sent, parts
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        waiting = (event, answered)
        if not isinstance(event, e.ReleaseOnDestination):
            self._waiting.append(waiting)
        self._driver.feed(event)
        if isinstance(event, e.ReleaseOnDestination):
            return None
        try:
            async with asyncio.timeout(self._place.limits.lease_s):
                return await answered
        except TimeoutError:
            return None
        finally:
            self._waiting.remove(waiting)

    def _perform(self, action: d.Action) -> Step | None:
        match action:
            case d.TakeBlocks(blocks):
                return self._take(blocks)
            case d.WriteStage(stage, first):
                return self._write(stage, first)
            case d.Adopt():
                self._adopt(action.with_kv)
            case d.PassTokens():
                assert self._sequence is not None
                self._place.sequences.adopted(self._sequence)
            case d.FreeBlocks():
                return self._place.kv.release(self._name)
            case d.DropRequest():
                if self._sequence is not None:
                    self._place.sequences.hand_back(self._sequence, "the move was called off")
                return self._place.kv.release(self._name)  # the engine may not have heard of the request yet
            case d.Tell(answer):
                self._tell(answer)
            case e.Count(outcome, reason):
                self._place.counted(outcome, reason)
        return None

    def _failed(self, error: Exception) -> None:
        """An order to B's engine raised."""
        if not isinstance(error, KVRefused):
            logger.error("move %s: the destination's engine failed an order", self._name, exc_info=error)
        reason = error.reason if isinstance(error, KVRefused) else "failed"
        self._driver.feed(d.Failed(reason) if self.machine.state is d.ADOPTING else d.NotTaken(reason))

    async def _take(self, blocks: int) -> None:
        place = self._place
        refusal = place.refusal()
        if self._fingerprint != place.kv.fingerprint:
            refusal = "unlike_engine"
        if refusal is not None:
            raise KVRefused(refusal)
        self._driver.feed(d.Taken(await place.kv.reserve(self._name, blocks, self._lease_s)))

    async def _write(self, stage: int, first: int) -> None:
        sent, parts = self._stages.pop(stage, (None, ()))
        if sent is not None:
            await self._place.kv.write(self._name, first, sent.blocks, parts, self._lease_s)
        self._driver.feed(d.Written(stage))

    def _adopt(self, with_kv: bool) -> None:
        if self._committed is None:
            return  # called off while it waited for the engine
        sent, parts = self._committed
        assert sent.submit is not None
        place = self._place
        entries = place.kv.adoption(self._name, sent.computed, sent.first, sent.blocks, parts)
        self._sequence = place.sequences.adopt(sent.submit, sent.parent, entries, self._begun, self._ended)
        if not with_kv:
            self._driver.feed(d.Begun())

    def _begun(self) -> None:
        self._driver.feed(d.Begun())

    def _ended(self, end: End) -> None:
        """The adopted sequence left the engine; once it is B's own this means nothing here."""
        if end is End.ABORTED:
            self._driver.feed(e.AbortedByClient())
        elif self.machine.state is d.ADOPTING:
            self._driver.carry_out((d.FreeBlocks(),))  # as above
            self._driver.feed(d.Failed("adoption_failed"))

    def _tell(self, answer: Answer) -> None:
        for asked, answered in self._waiting:
            if not answered.done() and _answers(asked, answer):
                answered.set_result(answer)


def _answers(asked: e.ToDestination, answer: Answer) -> bool:
    match asked, answer:
        case e.Reserve(blocks), e.Reserved(held):
            return held >= blocks
        case e.Write(stage), d.Stored(stored):
            return stage == stored
        case e.Reserve() | e.Write(), e.Refused():
            return True
        case e.Commit() | e.Query(), e.Committed() | e.CommitRefused():
            return True
    return False
