"""Steps in which a replica only decodes, without its scheduler: each costs the same whatever the batch.

While nobody can be admitted and every running request needs exactly its next token, vLLM's scheduler has no choice:
all of them go on, and all that changes is arithmetic: one token more each, a KV block where one is full, an end where a
limit is reached. This module does that arithmetic in O(1) per step and O(1) per end, until something happens that needs
a decision (the head of the queue fits, blocks run out), and then brings the scheduler's state up to date.

Blocks leave the pool in the step that needs them, in vLLM's order, so that a prefix cache loses the same content; whose
they are is settled later.

Private names of vLLM 0.32: those of loadgen/simulator/lean.py, and `Scheduler.scheduler_reserve_full_isl`,
`KVCacheManager.watermark_blocks`, `.get_computed_blocks`, `BlockPool.get_new_blocks`, `.free_block_queue` with
`.fake_free_list_head`, `KVCacheBlock.next_free_block`, `.ref_cnt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vllm.v1.request import RequestStatus

from deployments.step_content import Step
from loadgen.simulator.lean import TOKEN, Ended

#: Policies that have nothing to do, and nothing to note, in a step before which nothing waits. Those of them that only
#: order the queue have nothing to do either while its head does not fit.
COASTING = frozenset({"fcfs", "larry", "guarded_larry", "no_preempt", "prefill_first"})


def may_coast(scheduler: Any) -> bool:
    """Whether steps without a queue may be spared this scheduler; tiers around the policy change nothing then."""
    return scheduler.queue_policy.name in COASTING


def may_wait(scheduler: Any) -> bool:
    """Whether steps with a queue that cannot move may be spared it as well."""
    return may_coast(scheduler) and scheduler._control is None and scheduler.scheduler_reserve_full_isl


class Coast:
    """One stretch of decode steps, numbered from 1: the first that is not complete when it begins.

    `running`: requests that have not got their last token. `decides`: the next step is the scheduler's to make.
    """

    def __init__(self, scheduler: Any, depth: int, requests: list[tuple[int, int, Any, int]]) -> None:
        self._scheduler = scheduler
        self._ahead = depth - 1  # steps that are scheduled before the running one has ended
        self._size = scheduler.block_size
        self._requests = requests  # (steps left, place in the batch, request, tokens computed), the first to end first
        self._scheduled = self._ahead
        self._done = self._ended = self._dropped = 0
        self._context = sum(computed + self._ahead for _, _, _, computed in requests)
        self._opens = [0] * self._size  # requests that need a block in step s, at s modulo the block size
        for _, _, _, computed in requests:
            self._opens[(1 - computed) % self._size] += 1
        manager = scheduler.kv_cache_manager
        self._manager, self._pool = manager, manager.block_pool
        self._held = manager.coordinator.single_type_managers[0].req_to_blocks
        self._taken: list[Any] = []  # blocks out of the pool that are nobody's yet
        self.decides = False

    @classmethod
    def begin(cls, scheduler: Any, depth: int) -> Coast | None:
        """A stretch from here on; None if the scheduler has anything to decide."""
        running, ahead = scheduler.running, depth - 1
        if scheduler.kv_holding_waiting or scheduler._inflight_prefills or scheduler._stale or not running:
            return None
        if scheduler.waiting and not may_wait(scheduler):
            return None
        if len(running) > scheduler.max_num_scheduled_tokens:
            return None
        manager, size = scheduler.kv_cache_manager, scheduler.block_size
        cached = manager.coordinator.single_type_managers[0].num_cached_block if manager.enable_caching else None
        requests = []
        for place, request in enumerate(running):
            computed = request.num_computed_tokens - request.num_in_flight_tokens
            if request.num_in_flight_tokens != ahead or computed + 1 != request.num_tokens:
                return None
            if cached is not None and computed // size > cached.get(request.request_id, 0):
                return None  # it has moved here, and its blocks are not known yet
            left = min(request.max_tokens - request.num_output_tokens, scheduler.max_model_len - request.num_tokens)
            requests.append((left, place, request, computed))
        requests.sort(key=lambda entry: entry[:2])
        return cls(scheduler, depth, requests)

    @property
    def running(self) -> int:
        return len(self._requests) - self._ended

    def schedule(self) -> Step | None:
        """The next step; None if nobody is left for one, or if the scheduler `decides`."""
        number, requests, opens, size = self._scheduled + 1, self._requests, self._opens, self._size
        while self._dropped < len(requests) and requests[self._dropped][0] < number:
            left, _, _, computed = requests[self._dropped]
            opens[(1 - computed) % size] -= 1
            self._context -= computed + left
            self._dropped += 1
        decodes = len(requests) - self._dropped
        waiting = bool(self._scheduler.waiting)
        if not decodes:
            self.decides = waiting
            return None
        wanted, free = opens[number % size], self._pool.get_num_free_blocks()
        if wanted > free or (waiting and not self._full(free, wanted, decodes)):
            self.decides = True
            return None
        if wanted:
            self._taken += self._pool.get_new_blocks(wanted)
        self._context += decodes
        self._scheduled = number
        return Step(decodes=decodes, context_tokens=self._context)

    def _full(self, free: int, wanted: int, decodes: int) -> bool:
        """Whether the waiting loop of vLLM's `schedule` would admit nobody once the decodes have what they want."""
        scheduler = self._scheduler
        if not may_wait(scheduler) or decodes >= scheduler.max_num_scheduled_tokens:
            return False
        if len(scheduler.running) >= scheduler.max_num_active_reqs:
            return True
        if scheduler.queue_policy.reorders:
            scheduler.waiting.begin_step(scheduler._context())
        head = scheduler.waiting.peek_request()
        lacking: int = -(-min(head.num_tokens, scheduler.max_model_len) // self._size) + self._manager.watermark_blocks
        if lacking > free - wanted and self._manager.enable_caching:
            found = self._manager.get_computed_blocks(head)[0].blocks[0]
            if self._leaves(wanted, found):
                return False
            lacking -= sum(block.ref_cnt > 0 for block in found)
        return lacking > free - wanted

    def _leaves(self, count: int, found: Sequence[Any]) -> bool:
        """Whether one of the blocks `found` is among the next ones to leave the pool."""
        mine = {block.block_id for block in found if not block.ref_cnt}
        block = self._pool.free_block_queue.fake_free_list_head
        for _ in range(count if mine else 0):
            block = block.next_free_block
            if block.block_id in mine:
                return True
        return False

    def end_step(self) -> Ended:
        """The running step ends: requests that reach their limit leave."""
        self._done += 1
        ended = Ended([], [])
        requests, scheduler = self._requests, self._scheduler
        while self._ended < len(requests) and requests[self._ended][0] == self._done:
            left, _, request, computed = requests[self._ended]
            self._ended += 1
            self._catch_up(request, computed, left)
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            scheduler.running.remove(request)
            scheduler._free_request(request)
            ended.last.append(request.request_id)
        return ended

    def _catch_up(self, request: Any, computed: int, left: int) -> None:
        """Bring one request up to date: its tokens, its blocks, what is under way."""
        done = self._done
        ahead = min(self._scheduled, left) - done
        held = self._held[request.request_id]
        for _ in range(-(-(computed + done + ahead) // self._size) - len(held)):
            held.append(self._taken.pop())
        request.num_computed_tokens = computed + done + ahead
        request.num_in_flight_tokens = ahead
        if self._ahead:
            request.num_output_placeholders = ahead
        request._output_token_ids.extend([TOKEN] * done)
        request._all_token_ids.extend([TOKEN] * done)
        if self._manager.enable_caching:
            request.update_block_hashes()
            # Those that the last scheduled step knew to be full.
            self._manager.cache_blocks(request, computed + done + max(0, ahead - self._ahead))

    def settle(self) -> list[tuple[Any, list[bool]]]:
        """Bring the scheduler's requests and blocks up to date; the steps under way as vLLM's output and samplers.

        Raises RuntimeError if the requests need other blocks than those that were taken from the pool.
        """
        scheduler = self._scheduler
        left_of = {}
        try:
            for left, _, request, computed in self._requests[self._ended :]:
                left_of[request.request_id] = left
                self._catch_up(request, computed, left)
        except IndexError:
            raise RuntimeError("the requests need more blocks than were counted") from None
        if self._taken:
            raise RuntimeError(f"{len(self._taken)} blocks were taken that no request needs")
        steps = []
        for number in range(self._done + 1, self._scheduled + 1):
            names = [request.request_id for request in scheduler.running if left_of[request.request_id] >= number]
            steps.append((SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1)), [True] * len(names)))
        return steps
