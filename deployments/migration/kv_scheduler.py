"""Scheduler's half of a move: blocks reserved and filled for requests to come, requests parked and copied out.

Importing this module gives vLLM's EngineCore one utility method, which runs between two steps and so meets no request
in motion. An adopted request enters vLLM's queue of requests that hold KV, which is drained before all others, and
leaves it by the branch made for KV that a connector has received: to the worker it is a new request with computed
tokens. A parked request stays RUNNING, but out of `running`, as one that a step had no budget for.

Private names, contract-tested: `EngineCore.scheduler`, `.model_executor.collective_rpc`, and that utility calls find
methods by name and take Futures; `Scheduler.kv_holding_waiting`, `.waiting`, `.deferred_waiting`, `.running`,
`.requests`, `._holds_kv_blocks`, `._is_blocked_waiting_status`, `._inflight_prefills`, `._free_request`,
`.max_num_active_reqs`, `.connector`, `.kv_cache_config`, `.dcp_world_size`, `.num_spec_tokens`;
`KVCacheManager.get_block_ids`, `.cache_blocks`, `.free`, `.coordinator.single_type_managers[0]` (`req_to_blocks`,
`num_cached_block`), `.block_pool` (`get_new_blocks`, `free_blocks`, `get_num_free_blocks`); `Request.status`,
`.num_computed_tokens`, `.num_in_flight_tokens`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request, RequestStatus

from deployments.hints import extra_argument
from deployments.load_page import Figures
from deployments.migration.engine_kv import Gone, KVRefused, NotRunning
from policies.migration.refusals import Traits, refusal

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput

logger = init_logger(f"vllm.{__name__}")

_QUEUED = (RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR)


def tidegate_kv(core: Any, op: str, payload: dict[str, Any]) -> Any:
    """Utility method of the EngineCore: one operation of deployments/migration/engine_kv.py."""
    return core.scheduler.on_kv_call(core.model_executor, op, payload)


EngineCore.tidegate_kv = tidegate_kv


@dataclass(slots=True)
class Reservation:
    """Blocks for a request to come, until `until` (monotonic seconds); the first `written` ones have their content."""

    until: float
    blocks: list[KVCacheBlock] = field(default_factory=list)
    written: int = 0


@dataclass(slots=True)
class Parked:
    """A request out of the queues until `until`; `answer`: it waits for output in flight, to be copied from `first`.

    `at`: where in the outgoing segment.
    """

    until: float
    first: int
    at: int
    answer: Future[dict[str, Any]] | None = None


class MigrationMixin(Scheduler):
    """Comes before the policy's mixin in the bases, after the one that appends the tokens of continued requests.

    `lease_clock` (monotonic seconds) may be replaced on the instance.
    """

    lease_clock: Callable[[], float] = staticmethod(time.monotonic)
    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._reservations: dict[str, Reservation] = {}  # by move
        self._parked: dict[str, Parked] = {}  # by request
        self._kept_seats = 0  # out of vLLM's sight in the step under way
        self._executor: Any = None
        super().__init__(*args, **kwargs)
        groups = self.kv_cache_config.kv_cache_groups
        plain = len(groups) == 1 and type(groups[0].kv_cache_spec) is FullAttentionSpec
        parallel = self.vllm_config.parallel_config
        self._engine_traits = {
            "other_attention": not plain or self.dcp_world_size * self.pcp_world_size > 1,
            "pipeline_parallel": parallel.pipeline_parallel_size > 1,
            "speculative": self.num_spec_tokens > 0 or self.use_eagle,
            "kv_connector": self.connector is not None or self.ec_connector is not None,
        }

    def on_kv_call(self, executor: Any, op: str, payload: dict[str, Any]) -> Any:
        """Carry out one operation; answers a dict, with `error` and `reason` if it was not done, or its Future."""
        self._executor = executor
        self._end_leases()
        answer = self._answer(lambda: getattr(self, f"_kv_{op}")(**payload))
        self._publish_changes()
        return answer

    def figures(self) -> Figures:
        """Load now; a parked request that holds KV counts as running, one that holds none as waiting."""
        figures: Figures = super().figures()
        if self._kept_seats:
            figures = figures._replace(max_num_seqs=figures.max_num_seqs + self._kept_seats)
        if not self._parked:
            return figures
        waiting_by_tier, running_by_tier = list(figures.waiting_by_tier), list(figures.running_by_tier)
        waiting = 0
        for request in self._idle():
            waiting += 1
            waiting_by_tier[request.priority] += 1
            running_by_tier[request.priority] -= 1  # it counts unfinished ones less the queue's
        return figures._replace(
            running=figures.running + len(self._parked) - waiting,
            waiting=figures.waiting + waiting,
            running_by_tier=tuple(running_by_tier),
            waiting_by_tier=tuple(waiting_by_tier),
        )

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """One step, in which the seats of parked requests and of those to come stay free."""
        self._end_leases()
        seats: int = self.max_num_active_reqs
        self._kept_seats = self._seats_kept()
        self.max_num_active_reqs = seats - self._kept_seats
        try:
            return super().schedule(throttle_prefills)
        finally:
            self.max_num_active_reqs, self._kept_seats = seats, 0

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take in a step's tokens; requests to be parked whose last output this was are copied out and answered."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for name, parked in list(self._parked.items()):
            if parked.answer is not None and not (request := self.requests[name]).num_in_flight_tokens:
                answer, parked.answer = parked.answer, None
                answer.set_result(self._answer(partial(self._parked_whole, request)))
        return outputs

    def add_request(self, request: Request) -> None:
        """Queue a request, on the blocks of its reservation if it has one."""
        adopt = extra_argument(request, "adopt")
        if isinstance(adopt, dict) and request.request_id not in self.requests:
            self._adopt(request, adopt)
        super().add_request(request)

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        parked = self._parked.pop(request.request_id, None)
        if parked is not None and parked.answer is not None:
            parked.answer.set_result({"error": "gone", "reason": request.request_id})
        return super()._free_request(request, delay_free_blocks)

    # --- operations

    def _kv_leases(self) -> dict[str, Any]:
        return {"reserved": list(self._reservations), "parked": list(self._parked)}

    def _kv_candidates(self) -> dict[str, Any]:
        found: list[tuple[str, int, int, str, int, str | None]] = []
        for request in chain(self.running, self.kv_holding_waiting):
            known = request.num_computed_tokens - request.num_in_flight_tokens
            prefill = request.status != RequestStatus.RUNNING or known < request.num_prompt_tokens
            found.append(self._candidate(request, len(self._blocks(request)), "prefill" if prefill else "decode"))
        for i, request in enumerate(self.waiting):
            blocks = -(-request.num_tokens // self.block_size)
            found.append(self._candidate(request, blocks, "waiting" if i else "head"))
        return {"requests": found}

    def _kv_reserve(self, move: str, blocks: int, lease_s: float) -> dict[str, Any]:
        if refused := refusal(Traits(**self._engine_traits)):
            raise KVRefused(refused)
        reservation = self._reservations.get(move) or Reservation(0.0)
        if blocks and not reservation.blocks and self._seats_left() < 1:
            raise KVRefused("no_slot")
        more, pool = blocks - len(reservation.blocks), self.kv_cache_manager.block_pool
        if more > 0:
            # Each running request may open a block in the next step: a move must not make them preempt each other.
            if more + len(self.running) > pool.get_num_free_blocks():
                raise KVRefused("no_blocks")
            reservation.blocks += pool.get_new_blocks(more)
        reservation.until = self.lease_clock() + lease_s
        self._reservations[move] = reservation
        return {"held": len(reservation.blocks)}

    def _kv_write(self, move: str, first: int, blocks: int, at: int, lease_s: float) -> dict[str, Any]:
        reservation = self._reservations.get(move)
        if reservation is None:
            raise KVRefused("expired")
        self._fill(reservation, first, blocks, at)
        reservation.until = self.lease_clock() + lease_s
        return {}

    def _kv_release(self, move: str) -> dict[str, Any]:
        if (reservation := self._reservations.pop(move, None)) is not None:
            self.kv_cache_manager.block_pool.free_blocks(reversed(reservation.blocks))
        return {}

    def _kv_export(self, request: str, first: int, blocks: int, at: int) -> dict[str, Any]:
        found = self._movable(request)
        if found.status != RequestStatus.RUNNING or request in self._parked:
            raise NotRunning(request)
        full = max(0, found.num_computed_tokens - found.num_in_flight_tokens) // self.block_size
        copied = self._copy_out(found, first, min(full, first + blocks), at)
        return {"copied": copied, "left": max(0, full - first - copied), "held": len(self._blocks(found))}

    def _kv_park(self, request: str, first: int, at: int, lease_s: float) -> Any:
        found = self._movable(request)
        if request in self._parked or found.status not in (RequestStatus.RUNNING, *_QUEUED):
            raise NotRunning(request)
        if found.status == RequestStatus.RUNNING:
            self.running.remove(found)
            self._inflight_prefills.discard(found)
        else:
            self._queue_of(found).remove_request(found)
            self.deferred_waiting.discard(found)
        parked = self._parked[request] = Parked(self.lease_clock() + lease_s, first, at)
        if found.num_in_flight_tokens:
            parked.answer = Future()
            return parked.answer
        return self._parked_whole(found)

    def _kv_unpark(self, request: str) -> dict[str, Any]:
        parked = self._parked.pop(request, None)
        if parked is None:
            return {}
        if parked.answer is not None:
            parked.answer.set_result({"error": "not_running", "reason": request})
        found = self.requests[request]
        if found.status == RequestStatus.RUNNING:
            self.running.insert(0, found)  # it has waited: the others make way, should blocks run short
            return {}
        self._queue_of(found).prepend_request(found)
        if self._is_blocked_waiting_status(found.status):
            self.deferred_waiting.add(found)
        return {}

    # --- parts of operations

    def _answer(self, operation: Callable[[], Any]) -> Any:
        try:
            return operation()
        except (Gone, NotRunning) as error:
            return {"error": "gone" if isinstance(error, Gone) else "not_running", "reason": str(error)}
        except KVRefused as error:
            return {"error": "refused", "reason": error.reason}

    def _end_leases(self) -> None:
        if not (self._reservations or self._parked):
            return
        now = self.lease_clock()
        for move in [move for move, reservation in self._reservations.items() if reservation.until <= now]:
            self._kv_release(move)
        for name in [name for name, parked in self._parked.items() if parked.until <= now]:
            self._kv_unpark(name)

    def _idle(self) -> Iterator[Request]:
        """Parked requests that hold no KV."""
        for name in self._parked:
            if not (request := self.requests[name]).num_computed_tokens:
                yield request

    def _seats_kept(self) -> int:
        to_come = sum(bool(reservation.blocks) for reservation in self._reservations.values())
        return to_come + len(self._parked) - sum(1 for _ in self._idle())

    def _seats_left(self) -> int:
        taken = len(self.running) + self.num_waiting_for_streaming_input + len(self.kv_holding_waiting)
        return self.max_num_active_reqs - taken - self._seats_kept()

    def _queue_of(self, request: Request) -> Any:
        return self.kv_holding_waiting if self._holds_kv_blocks(request) else self.waiting

    def _blocks(self, request: Request) -> list[int]:
        return self.kv_cache_manager.get_block_ids(request.request_id)[0]

    def _refused(self, request: Request) -> str | None:
        params = request.sampling_params
        return refusal(
            Traits(
                multimodal=bool(request.mm_features),
                prompt_embeds=request.prompt_token_ids is None or request.prompt_is_token_ids is not None,
                pooling=params is None,
                lora=request.lora_request is not None,
                prompt_logprobs=params is not None
                and params.prompt_logprobs is not None
                and not request.num_output_tokens,
                **self._engine_traits,
            )
        )

    def _candidate(self, request: Request, blocks: int, place: str) -> tuple[str, int, int, str, int, str | None]:
        left = min(request.max_tokens - request.num_output_tokens, self.max_model_len - request.num_tokens)
        return request.request_id, request.priority, blocks, place, left, self._refused(request)

    def _movable(self, name: str) -> Request:
        request = self.requests.get(name)
        if request is None or request.is_finished():
            raise Gone(name)
        if refused := self._refused(request):
            raise KVRefused(refused)
        return request

    def _on_workers(self, method: str, *args: Any) -> None:
        errors = [answer["err"] for answer in self._executor.collective_rpc(method, args=args) if "err" in answer]
        if errors:
            logger.error("%s: %s", method, errors)
            raise KVRefused("copy_failed")

    def _copy_out(self, request: Request, first: int, end: int, at: int) -> int:
        blocks = self._blocks(request)[first:end]
        if blocks:
            self._on_workers("migration_export", blocks, at)
        return len(blocks)

    def _fill(self, reservation: Reservation, first: int, blocks: int, at: int) -> None:
        end = first + blocks
        if end > len(reservation.blocks):
            raise KVRefused("no_blocks")
        if blocks:
            self._on_workers("migration_import", [block.block_id for block in reservation.blocks[first:end]], at)
        if first <= reservation.written:
            reservation.written = max(reservation.written, end)

    def _parked_whole(self, request: Request) -> dict[str, Any]:
        """Copy out and describe a parked request that has no output in flight; unparks it if that fails."""
        computed = request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        end = -(-computed // self.block_size)
        parked = self._parked[request.request_id]
        first = min(parked.first, end)
        try:
            copied = self._copy_out(request, first, end, parked.at)
        except KVRefused:
            self._kv_unpark(request.request_id)
            raise
        return {
            "held": len(self._blocks(request)),
            "computed": computed,
            "output": list(request.output_token_ids),
            "first": first,
            "copied": copied,
        }

    def _adopt(self, request: Request, adopt: dict[str, Any]) -> None:
        """Give the request the blocks of its reservation; those that were not written are computed anew."""
        reservation = self._reservations.pop(adopt["move"], None)
        if reservation is None:
            return
        try:
            if adopt.get("blocks"):
                with suppress(KVRefused):
                    self._fill(reservation, adopt["first"], adopt["blocks"], adopt["at"])
            written = reservation.written * self.block_size
            if computed := min(adopt["computed"], request.num_tokens - 1, written):
                self._take_over(request, reservation, computed)
        except Exception:  # raised on, it would end the engine
            logger.exception("move %s: blocks not taken over, the request computes them anew", adopt["move"])
            request.num_computed_tokens = 0
            self.kv_cache_manager.free(request)
        finally:
            self.kv_cache_manager.block_pool.free_blocks(reversed(reservation.blocks))

    def _take_over(self, request: Request, reservation: Reservation, computed: int) -> None:
        """Make the reserved blocks those of the request, with the one that the next token goes to: no step lacks it."""
        keep = computed // self.block_size + 1
        manager = self.kv_cache_manager.coordinator.single_type_managers[0]
        manager.req_to_blocks[request.request_id] = reservation.blocks[:keep]
        manager.num_cached_block[request.request_id] = 0
        del reservation.blocks[:keep]
        request.num_computed_tokens = computed
        self.kv_cache_manager.cache_blocks(request, computed)

    def _publish_changes(self) -> None:
        if self._page is not None and self._state() != self._published:
            self._publish()
