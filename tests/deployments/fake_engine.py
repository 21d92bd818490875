"""An engine that is nothing but blocks, slots and a clock, with what moves ask of it (as EngineKV).

A KV block holds the token ids of its positions, so that an adopted request whose blocks are not its own is noticed. The
token at index i of a sequence is a function of its rid and i, as with greedy sampling.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deployments.migration.engine_kv import Exported, Gone, KVRefused, NotRunning, ParkedRequest
from deployments.migration.sequence import request_id
from deployments.wire import Delta, Outcome, Submit
from policies.migration.victims import Candidate

BLOCK = 4  # tokens
STEP_S = 0.02
CALL_S = 0.004  # an order to the engine
OUTPUT_S = 0.006  # a token's way from the engine to its stream: an order's answer overtakes it
PREFILL_STEPS = 3


class EngineDead(Exception):
    """The EngineCore is gone."""


def token(rid: str, index: int) -> int:
    """The sequence's token at this index."""
    return (zlib.crc32(rid.encode()) + 31 * index) % 50_000


def blocks(tokens: int) -> int:
    """KV blocks of so many tokens."""
    return -(-tokens // BLOCK)


@dataclass
class Request:
    """One request: `computed` tokens of prompt and output are in its blocks."""

    submit: Submit
    length: int  # tokens of its whole answer
    output: list[int]
    queue: asyncio.Queue[Delta | None] = field(default_factory=asyncio.Queue)
    status: str = "waiting"  # prefill, running, parked
    held: int = 0
    kv: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    steps: int = 0  # of its prefill still to go
    was: str = ""  # before it was parked
    lease: float = math.inf

    @property
    def tokens(self) -> list[int]:
        return [*self.submit.prompt, *self.output]

    def store(self) -> None:
        """KV of all tokens but the newest: that one is computed in the next step."""
        known = self.tokens[:-1] if self.output else self.tokens
        self.kv = np.asarray(known, np.int64)


@dataclass
class Reservation:
    """Blocks held for a move, and what was written into them."""

    held: int
    lease: float
    kv: dict[int, np.ndarray] = field(default_factory=dict)  # by block


class FakeEngine:
    """Both halves of the engine. `length_of(submit)` is the number of tokens of an answer."""

    fingerprint = "fake"
    block_bytes = 8 * BLOCK

    def __init__(self, total: int, slots: int, length_of: Callable[[Submit], int]) -> None:
        self.total = self.free = total
        self.slots = slots
        self.length_of = length_of
        self.requests: dict[str, Request] = {}
        self.reservations: dict[str, Reservation] = {}
        self.dead = False
        self.recomputed = 0  # adopted without their KV
        self.adopted = 0
        self.output_s = OUTPUT_S
        self.slow_s = 0.0  # each order takes longer
        self.stuck = False  # no steps
        self.on: Callable[[str, str], None] = lambda moment, request: None  # park, parked, adopt
        self._loop = asyncio.get_running_loop()
        self._stepping = False

    # --- the stream's side

    async def generate(self, submit: Submit, entries: dict[str, Any], emit: Callable[[Delta], None]) -> Outcome:
        """As deployments.engine.generate."""
        name = request_id(submit)
        request = Request(submit, self.length_of(submit), list(submit.output))
        start = len(submit.output)
        if self.dead:
            return Outcome(start, fault="engine", message="engine_dead: it is")
        self.requests[name] = request
        if "adopt" in entries:
            self._adopt(request, entries["adopt"])
        self._wake()
        try:
            while True:
                delta = await request.queue.get()
                if delta is None:
                    return Outcome(start, fault="engine", message="engine_dead: it is")
                start += len(delta.token_ids)
                emit(delta)
                if delta.finish_reason is not None:
                    return Outcome(start, delta.finish_reason)
        finally:
            self._remove(name)

    def _adopt(self, request: Request, adopt: dict[str, Any]) -> None:
        reservation = self.reservations.pop(adopt["move"], None)
        if reservation is not None:
            self.free += reservation.held
        if not adopt["computed"]:
            return
        self.adopted += 1
        self.on("adopt", request_id(request.submit))
        if reservation is None:
            self.recomputed += 1
            return
        for index, block in enumerate(adopt["kv"]):
            reservation.kv[adopt["first"] + index] = block
        request.store()
        want = _cut(request.kv)
        assert len(want) <= reservation.held, "adopted with more blocks than were reserved"
        for index, block in enumerate(want):
            got = reservation.kv[index][: len(block)]
            assert (got == block).all(), f"{request.submit.rid}: block {index} is not its own"
        request.status, request.held = "running", max(len(want), blocks(len(request.tokens)))
        self.free -= request.held

    def _remove(self, name: str) -> None:
        request = self.requests.pop(name, None)
        if request is not None:
            self.free += request.held

    # --- steps

    def _wake(self) -> None:
        if not self._stepping and self.requests and not self.dead:
            self._stepping = True
            self._loop.call_later(STEP_S, self._step)

    def _step(self) -> None:
        self._stepping = False
        if self.dead:
            return
        self.expire()
        if not self.stuck:
            for name, request in list(self.requests.items()):
                self._advance(name, request)
        self._wake()

    def expire(self) -> None:
        """End leases that ran out."""
        now = self._loop.time()
        for move, reservation in list(self.reservations.items()):
            if now >= reservation.lease:
                self.free += reservation.held
                del self.reservations[move]
        for request in self.requests.values():
            if now >= request.lease:
                self._unpark(request)

    def _advance(self, name: str, request: Request) -> None:
        if request.status == "waiting":
            active = sum(other.status in ("prefill", "running") for other in self.requests.values())
            need = blocks(len(request.tokens) + 1)
            if active < self.slots and need <= self.free:
                request.status, request.held, request.steps = "prefill", need, PREFILL_STEPS
                self.free -= need
        elif request.status == "prefill":
            request.steps -= 1
            if not request.steps:
                request.status = "running"
                request.store()
        elif request.status == "running":
            self._decode(name, request)

    def _decode(self, name: str, request: Request) -> None:
        index = len(request.output)
        if blocks(len(request.tokens) + 1) > request.held:
            if not self.free:
                return self.preempt(name)
            request.held, self.free = request.held + 1, self.free - 1
        request.output.append(token(request.submit.rid, index))
        request.store()
        last = len(request.output) >= request.length
        submit = request.submit
        delta = Delta(submit.rid, submit.epoch, index, [request.output[-1]], "length" if last else None, hop=submit.hop)
        self._loop.call_later(self.output_s, request.queue.put_nowait, delta)
        if last:
            self._remove(name)

    def preempt(self, name: str) -> None:
        """Take a running request's blocks."""
        request = self.requests[name]
        self.free += request.held
        request.held, request.status = 0, "waiting"

    def die(self) -> None:
        """The EngineCore ends."""
        self.dead = True
        for request in self.requests.values():
            request.queue.put_nowait(None)

    # --- what moves ask (EngineKV)

    async def _order(self) -> None:
        await asyncio.sleep(CALL_S + self.slow_s)
        if self.dead:
            raise EngineDead
        self.expire()

    async def start(self) -> None:
        """Nothing to open."""

    async def candidates(self) -> list[Candidate]:
        await self._order()
        found, head = [], True
        for name, request in self.requests.items():
            left = request.length - len(request.output)
            match request.status:
                case "waiting":
                    need = blocks(len(request.tokens) + 1)
                    found.append(Candidate(name, 0, need, "head" if head else "waiting", left))
                    head = False
                case "prefill":
                    found.append(Candidate(name, 0, request.held, "prefill", left))
                case "running":
                    found.append(Candidate(name, 0, request.held, "decode", left))
        return found

    async def reserve(self, move: str, wanted: int, lease_s: float) -> int:
        await self._order()
        old = self.reservations.get(move)
        more = wanted - (old.held if old else 0)
        if more > self.free:
            raise KVRefused("no_blocks")
        self.free -= max(0, more)
        lease = self._loop.time() + lease_s
        if old is None:
            self.reservations[move] = Reservation(wanted, lease)
            return wanted
        old.held, old.lease = max(wanted, old.held), lease
        return old.held

    async def write(self, move: str, first: int, count: int, parts: Sequence[np.ndarray], lease_s: float) -> None:
        await self._order()
        reservation = self.reservations.get(move)
        if reservation is None:
            raise KVRefused("expired")
        (part,) = parts
        assert len(part) == count
        assert first + count <= reservation.held, "written beyond the reservation"
        reservation.kv |= {first + index: block for index, block in enumerate(part)}
        reservation.lease = self._loop.time() + lease_s

    async def release(self, move: str) -> None:
        await self._order()
        if (reservation := self.reservations.pop(move, None)) is not None:
            self.free += reservation.held

    def _running(self, name: str) -> Request:
        request = self.requests.get(name)
        if request is None:
            raise Gone(name)
        return request

    async def export(self, name: str, first: int, most: int) -> Exported:
        await self._order()
        request = self._running(name)
        if request.status != "running":
            raise NotRunning(name)
        full = len(request.kv) // BLOCK
        copied = max(0, min(most, full - first))
        return Exported(copied, max(0, full - first - copied), request.held, [_pack(request.kv, first, first + copied)])

    async def park(self, name: str, first: int, lease_s: float) -> ParkedRequest:
        self.on("park", name)
        await self._order()
        request = self._running(name)
        if request.status in ("parked", "prefill"):
            raise NotRunning(name)
        request.was, request.status = request.status, "parked"
        request.lease = self._loop.time() + lease_s
        self.on("parked", name)
        if not request.held:
            return ParkedRequest(0, 0, list(request.output), 0, 0, [])
        end = blocks(len(request.kv))
        copied = max(0, end - first)
        part = [_pack(request.kv, first, end)] if copied else []
        return ParkedRequest(request.held, len(request.kv), list(request.output), first, copied, part)

    async def unpark(self, name: str) -> None:
        await self._order()
        if (request := self.requests.get(name)) is not None:
            self._unpark(request)

    def _unpark(self, request: Request) -> None:
        request.lease = math.inf
        if request.status == "parked":
            request.status = request.was

    def adoption(self, move: str, computed: int, first: int, count: int, parts: Sequence[np.ndarray]) -> dict[str, Any]:
        kv = [block for part in parts for block in part]
        assert len(kv) == count
        return {"adopt": {"move": move, "computed": computed, "first": first, "kv": kv}}


def _cut(kv: np.ndarray) -> list[np.ndarray]:
    return [kv[at : at + BLOCK] for at in range(0, len(kv), BLOCK)]


def _pack(kv: np.ndarray, first: int, end: int) -> np.ndarray:
    """Blocks as rows, the last one filled up with -1."""
    part = kv[first * BLOCK : end * BLOCK]
    return np.pad(part, (0, (end - first) * BLOCK - len(part)), constant_values=-1).reshape(-1, BLOCK)
