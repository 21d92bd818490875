"""Short cuts through vLLM's scheduler that no decision of it can notice: a simulated step costs a third.

What is left out is bookkeeping for a model runner and for clients that are not there. Queues, order, admission,
preemption and the block pool stay vLLM's; tests/loadgen/test_simulator_fast.py compares with vLLM untouched.

Private names of vLLM 0.32, held by that test: `Scheduler.update_from_output`, `._make_cached_request_data`,
`._free_request`, `.running`, `.waiting`; `KVCacheManager.coordinator.single_type_managers[0].req_to_blocks`,
`.num_cached_block`, `.enable_caching`, `.empty_kv_cache_blocks`, `.allocate_slots`, `.cache_blocks`;
`Request.update_block_hashes`, `._output_token_ids`, `._all_token_ids`, `.num_output_placeholders`,
`.num_in_flight_tokens`, `.num_stale_output_tokens`, `.drop_stale_output`; `CachedRequestData.make_empty`.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

TOKEN = 7  # every answer consists of it, and every prompt where nobody asks for its content


class Ended(NamedTuple):
    """What a step gave: request ids in the order of the batch."""

    first: list[str]  # got their first token
    last: list[str]  # got their last one


class Lean(Scheduler):  # type: ignore[misc]  # vLLM is read as Any
    """Comes right before the vLLM class in the bases, so that the product's own mixins are around it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        manager = self.kv_cache_manager
        (blocks,) = manager.coordinator.single_type_managers
        if self.num_lookahead_tokens or self.connector is not None:
            raise ValueError("the fast path knows no speculative decoding or KV connector")
        self._caches = manager.enable_caching
        held, size, cached = blocks.req_to_blocks, blocks.block_size, blocks.num_cached_block
        nothing, inner = manager.empty_kv_cache_blocks, manager.allocate_slots

        def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
            """Nothing to allocate for tokens that fit into the last block of a running request."""
            if request.status is RequestStatus.RUNNING:
                mine, tokens = held.get(request.request_id), request.num_computed_tokens + num_new_tokens
                if mine and tokens <= len(mine) * size:
                    return nothing
            return inner(request, num_new_tokens, *args, **kwargs)

        def allocate_and_cache(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
            """And no block that has become full, which the prefix cache would have to learn."""
            if request.status is RequestStatus.RUNNING:
                name, tokens = request.request_id, request.num_computed_tokens + num_new_tokens
                if tokens <= len(held.get(name, ())) * size and min(tokens, request.num_tokens) // size <= cached.get(
                    name, 0
                ):
                    return nothing
            return inner(request, num_new_tokens, *args, **kwargs)

        manager.allocate_slots = allocate_and_cache if self._caches else allocate_slots

    def _make_cached_request_data(self, *args: Any, **kwargs: Any) -> Any:
        return CachedRequestData.make_empty()

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take in one step; `model_runner_output` is the list of those who got a token, in the order of the batch."""
        ended = Ended([], [])
        stopped, runs_async, requests = [], self.runs_async, self.requests
        caches, size = self._caches, self.block_size
        for (name, tokens), sampled in zip(
            scheduler_output.num_scheduled_tokens.items(), model_runner_output, strict=True
        ):
            request = requests.get(name)
            if request is None:  # aborted while it ran
                continue
            request.num_in_flight_tokens -= tokens
            stale = request.num_stale_output_tokens > 0
            if stale:
                request.num_stale_output_tokens -= tokens
                if request.drop_stale_output:
                    continue
            if not sampled:
                continue
            output = request._output_token_ids
            output.append(TOKEN)
            request._all_token_ids.append(TOKEN)
            if runs_async and not stale:
                request.num_output_placeholders -= 1
            if caches:
                if not len(request._all_token_ids) % size:
                    request.update_block_hashes()
                if runs_async and request.status is RequestStatus.RUNNING:
                    computed = request.num_computed_tokens - request.num_output_placeholders
                    if not computed % size:  # another block is full
                        self.kv_cache_manager.cache_blocks(request, computed)
            generated = len(output)
            if generated == 1:
                ended.first.append(name)
            if generated >= request.max_tokens or len(request._all_token_ids) >= self.max_model_len:
                stopped.append(request)
                ended.last.append(name)
        if stopped:
            self._stop(stopped)
        return ended

    def _stop(self, stopped: list[Any]) -> None:
        ran = {request for request in stopped if request.status is RequestStatus.RUNNING}
        for request in stopped:
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            self._free_request(request)
        self.running: list[Any] = [request for request in self.running if request not in ran]
        self.waiting.remove_requests(request for request in stopped if request not in ran)


@cache
def lean(product: type) -> type:
    """The product's scheduler class with the short cuts between its mixins and vLLM's class."""
    *mixins, engine = product.__bases__
    return type(f"Lean{product.__name__}", (*mixins, Lean, engine), {"runs_async": product.__dict__["runs_async"]})
