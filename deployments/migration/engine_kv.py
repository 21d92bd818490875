"""What a move asks of this replica's engine: candidates, blocks out, blocks in, park and unpark.

The engine's half is deployments/migration/kv_scheduler.py (reached by one utility method of the EngineCore, which runs
between two steps) and deployments/worker.py; KV blocks pass through shared memory (segments.py). This module imports no
vLLM, so that a replica can import it before it has set vLLM's environment.

Names of AsyncLLM used, contract-tested: `engine_core.call_utility_async`, `.collective_rpc`, `.errored`, `.dead_error`,
`.output_processor.external_req_ids` and `.request_states[...].parent_req`, `.vllm_config`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from deployments.migration.segments import Segments, SegmentsFull
from policies.migration.victims import Candidate

logger = logging.getLogger(f"ray.serve.{__name__}")

T = TypeVar("T")

_ALIVE_S = 0.1  # an answer that is under way is checked for the engine's death so often
_POKE_S = 0.25  # an idle engine makes no steps: while leases run it is asked so often
_AT_ONCE = 16  # of the longest requests that can be on their way out of, or into, one engine
LONG_COPY = 4 << 20  # bytes; a longer copy leaves the event loop


class Gone(Exception):
    """The request is not in the engine: it finished or was aborted."""


class NotRunning(Exception):
    """The request holds no KV that could be exported now: it waits, was preempted, or is parked already."""


class KVRefused(Exception):
    """The engine does not do it; `reason` is counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Exported:
    """Full blocks copied out of a running request: `copied` of them, `left` further ones, `held` blocks in all.

    `parts`: one uint8 array per rank, [layer, block, byte]; they belong to the caller.
    """

    copied: int
    left: int
    held: int
    parts: list[np.ndarray]


@dataclass(frozen=True, slots=True)
class ParkedRequest:
    """A request that is not scheduled any more: `held` blocks with the KV of its first `computed` tokens.

    `output`: all that it generated, in this submission and before. The stream may not have delivered the last of them
    yet: this answer overtakes tokens on their way through AsyncLLM. Copied out are the blocks `first` to
    `first + copied`, the last one partly filled; `parts` as in `Exported`. `held` == 0: it waited, there is no KV.
    """

    held: int
    computed: int
    output: list[int]
    first: int
    copied: int
    parts: list[np.ndarray]


class EngineKV:
    """The KV cache of one AsyncLLM, for moves; request ids are those that the replica gave to `generate`.

    Every await ends with EngineDeadError if the engine dies. A call that is cancelled is carried out all the same (what
    it reserved or parked ends with its lease).
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.fingerprint = f"none-{uuid.uuid4().hex}"  # like no other's, until `start` has found out
        self.block_bytes = 0
        self._ready = False
        self._longest = 0  # blocks that one request can hold
        self._landing: dict[str, int] = {}  # move -> region whose blocks its adopted request takes in
        self._tasks: set[asyncio.Task[Any]] = set()
        self._poking: asyncio.Task[None] | None = None
        self._leased = False  # something was reserved, parked or landed since the leases were last asked for

    async def start(self) -> None:
        """Open the segments, once the engine is up; an engine that cannot be copied from or to refuses every move."""
        try:
            if self._engine.vllm_config.parallel_config.data_parallel_size > 1:
                raise ValueError("data parallelism inside one engine: a request may be in any of its cores")
            await self._open()
        except (OSError, ValueError) as error:
            logger.warning("requests of this replica cannot move: %s", error)
            return
        self._ready = True

    async def candidates(self) -> list[Candidate]:
        """All unfinished requests that are not parked; `moved_s` is the caller's to know."""
        processor = self._engine.output_processor
        requests, found = (await self._call("candidates"))["requests"], []
        names = {own: name for name, all_ in processor.external_req_ids.items() for own in all_}
        for own, tier, blocks, place, tokens_left, refused in requests:
            if own not in names:
                continue
            if not self._ready:
                refused = "unlike_engine"
            elif processor.request_states[own].parent_req is not None:
                refused = "parallel_sampling"
            found.append(Candidate(names[own], tier, blocks, place, tokens_left, refused=refused))
        return found

    async def reserve(self, move: str, blocks: int, lease_s: float) -> int:
        """Hold so many blocks in all and a sequence slot, 0: a place in the queue only; returns the blocks held.

        KVRefused: no_slot, no_blocks (what was held before stays), or a name of policies/migration/refusals.py.
        """
        self._check_ready()
        answer = await self._call("reserve", move=move, blocks=blocks, lease_s=lease_s)
        self._poke()
        return answer["held"]

    async def write(self, move: str, first: int, blocks: int, parts: Sequence[np.ndarray], lease_s: float) -> None:
        """Fill the reserved blocks `first` to `first + blocks`; KVRefused: expired, no_blocks, no_memory."""
        self._check_ready()
        await self._carried_out(self._write(move, first, blocks, parts, lease_s))

    async def release(self, move: str) -> None:
        """Give the reservation back; of an unknown move there is none."""
        await self._call("release", move=move)

    async def export(self, request_id: str, first: int, blocks: int) -> Exported:
        """Copy out up to `blocks` full blocks from `first` on, while the request decodes.

        Gone, NotRunning, KVRefused.
        """
        self._check_ready()
        work = self._copy_out(blocks, "export", request_id, first=first, blocks=blocks)
        answer, parts = await self._carried_out(work)
        return Exported(answer["copied"], answer["left"], answer["held"], parts)

    async def park(self, request_id: str, first: int, lease_s: float) -> ParkedRequest:
        """Stop scheduling the request, or take it out of the queue, and copy out its blocks from `first` on.

        Gone, NotRunning (parked already), KVRefused: then it goes on as before. After `lease_s` it does so by itself.
        """
        self._check_ready()
        work = self._copy_out(max(1, self._longest - first), "park", request_id, first=first, lease_s=lease_s)
        answer, parts = await self._carried_out(work)
        self._poke()
        return ParkedRequest(
            answer["held"], answer["computed"], answer["output"], answer["first"], answer["copied"], parts
        )

    async def unpark(self, request_id: str) -> None:
        """Schedule the request again; nothing happens if it is gone or not parked."""
        try:
            await self._call("unpark", request=self._own(request_id))
        except Gone:
            pass

    def adoption(
        self, move: str, computed: int, first: int, blocks: int, parts: Sequence[np.ndarray]
    ) -> dict[str, Any]:
        """Entries for `extra_args["tidegate"]` of the request that takes over the reservation, next to its `output`.

        `computed`: tokens whose KV is in the blocks, those of this last write included. The write is done as the
        request is added, so that no step lies between. What the reservation has not got is computed anew.
        """
        entry: dict[str, Any] = {"move": move, "computed": computed}
        if blocks and self._ready:
            try:
                entry |= {"first": first, "blocks": blocks, "at": self._land(move, blocks, parts)}
            except (SegmentsFull, ValueError) as error:
                logger.warning("move %s: last blocks not written, they are computed anew: %s", move, error)
        return {"adopt": entry}

    def _land(self, move: str, blocks: int, parts: Sequence[np.ndarray]) -> int:
        at = self._incoming.take(blocks)
        try:
            self._incoming.write(at, blocks, parts)
        except (SegmentsFull, ValueError):
            self._incoming.give_back(at)
            raise
        self._landing[move] = at
        self._poke()
        return at

    async def _open(self) -> None:
        infos = await self._workers("migration_info")
        infos.sort(key=lambda info: info["rank"])
        block_bytes, name = [info["block_bytes"] for info in infos], f"tidegate-kv-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        config, blocks = self._engine.vllm_config, infos[0]["blocks"]
        self._longest = min(-(-config.model_config.max_model_len // config.cache_config.block_size), blocks)
        # How long a request will be that is parked is not known before: its region is for the longest.
        size = blocks + _AT_ONCE * self._longest
        self._outgoing = Segments(f"{name}-out", block_bytes, size)
        try:
            self._incoming = Segments(f"{name}-in", block_bytes, size)
            try:
                await self._workers("migration_open", self._outgoing.names, self._incoming.names)
            finally:
                self._incoming.unlink()
        finally:
            self._outgoing.unlink()
        self.block_bytes = sum(block_bytes)
        self.fingerprint = _fingerprint(config, [info["format"] for info in infos])

    async def _workers(self, method: str, *args: Any) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = await self._alive(self._engine.collective_rpc(method, args=args))
        for answer in answers:
            if "err" in answer:
                raise ValueError(answer["err"])
        return answers

    async def _write(self, move: str, first: int, blocks: int, parts: Sequence[np.ndarray], lease_s: float) -> None:
        at = self._region(self._incoming, blocks)
        try:
            if blocks:
                await _copied(lambda: self._incoming.write(at, blocks, parts), blocks * self.block_bytes)
            await self._call("write", move=move, first=first, blocks=blocks, at=at, lease_s=lease_s)
        except SegmentsFull as error:
            logger.warning("move %s: %s", move, error)
            raise KVRefused("no_memory") from None
        except ValueError:
            raise KVRefused("unlike_engine") from None
        finally:
            self._incoming.give_back(at)

    def _region(self, segments: Segments, blocks: int) -> int:
        try:
            return segments.take(blocks)
        except SegmentsFull as error:
            logger.warning("%s", error)
            raise KVRefused("no_memory") from None

    async def _copy_out(
        self, most: int, op: str, request_id: str, **payload: Any
    ) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Let the engine copy up to `most` blocks into a region, and take them out of it."""
        own, at = self._own(request_id), self._region(self._outgoing, most)
        try:
            answer = await self._call(op, request=own, at=at, **payload)
            copied = answer["copied"]
            if not copied:
                return answer, []
            return answer, await _copied(lambda: self._outgoing.read(at, copied), copied * self.block_bytes)
        finally:
            self._outgoing.give_back(at)

    def _own(self, request_id: str) -> str:
        """The engine's own name of a request, to which vLLM adds random characters."""
        own = self._engine.output_processor.external_req_ids.get(request_id)
        if not own:
            raise Gone(request_id)
        return own[0]

    def _check_ready(self) -> None:
        if not self._ready:
            raise KVRefused("unlike_engine")

    async def _call(self, op: str, **payload: Any) -> dict[str, Any]:
        answer = await self._alive(self._engine.engine_core.call_utility_async("tidegate_kv", op, payload))
        match answer.get("error"):
            case None:
                return answer
            case "gone":
                raise Gone(answer["reason"])
            case "not_running":
                raise NotRunning(answer["reason"])
            case _:
                raise KVRefused(answer["reason"])

    async def _alive(self, answer: Awaitable[T]) -> T:
        """The answer, or EngineDeadError: vLLM forgets what it was asked when its EngineCore dies."""
        call = asyncio.ensure_future(answer)
        try:
            while not call.done():
                if self._engine.errored:
                    raise self._engine.dead_error
                await asyncio.wait({call}, timeout=_ALIVE_S)
            return call.result()
        finally:
            call.cancel()

    async def _carried_out(self, work: Coroutine[Any, Any, T]) -> T:
        """Work that goes on when the caller is cancelled: until it ends its part of a segment is in use."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # looked at: nobody may be waiting any more

    def _poke(self) -> None:
        self._leased = True
        if self._poking is None or self._poking.done():
            self._poking = asyncio.get_running_loop().create_task(self._watch_leases())
            self._poking.add_done_callback(self._ended)

    async def _watch_leases(self) -> None:
        """End leases in an engine that makes no steps, and free the regions whose blocks have landed."""
        while True:
            await asyncio.sleep(_POKE_S)
            self._leased = False
            leases = await self._call("leases")
            for move in [move for move in self._landing if move not in leases["reserved"]]:
                self._incoming.give_back(self._landing.pop(move))
            if not (leases["reserved"] or leases["parked"] or self._landing or self._leased):
                return


async def _copied(copy: Callable[[], T], size: int) -> T:
    return await asyncio.to_thread(copy) if size > LONG_COPY else copy()


def _fingerprint(config: Any, formats: list[list[Any]]) -> str:
    """Digest of all that gives the bytes of a block their meaning."""
    from vllm import __version__

    model, cache = config.model_config, config.cache_config
    facts = {
        "vllm": __version__,
        "model": [model.model, model.revision, str(model.dtype), model.quantization],
        "config": model.hf_config.to_json_string(),
        "cache": [str(cache.cache_dtype), cache.block_size],
        "tensor_parallel": config.parallel_config.tensor_parallel_size,
        "format": formats,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
