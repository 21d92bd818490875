"""What a policy with capabilities does to one step of vLLM's scheduler (policies/scheduling/capabilities.py).

All of it works by what vLLM reads while it schedules: the order of `Scheduler.running`, its limits for one step, and
the answer of `kv_cache_manager.allocate_slots`, where None means "does not fit" and ends the admissions of the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request, RequestStatus

from policies.scheduling import SchedulingPolicy
from policies.scheduling.capabilities import (
    BudgetsTokens,
    Follows,
    GatesAdmission,
    HoldsBack,
    OrdersRunning,
    Preempts,
    PrefillsFirst,
)
from policies.types import SchedulerContext

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_CAPABILITIES = (OrdersRunning, GatesAdmission, Preempts, HoldsBack, Follows, BudgetsTokens, PrefillsFirst)
_ADMISSIBLE = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def has_capabilities(policy: SchedulingPolicy) -> bool:
    """Whether the policy does more than order the queue."""
    return any(isinstance(policy, capability) for capability in _CAPABILITIES)


class StepControl:
    """One policy's hold on one scheduler, from its construction until `release`."""

    def __init__(self, scheduler: Any, policy: SchedulingPolicy, context: SchedulerContext) -> None:
        self._scheduler = scheduler
        self._context = context
        self._orders = policy if isinstance(policy, OrdersRunning) else None
        self._gates = policy if isinstance(policy, GatesAdmission) else None
        self._preempts = policy if isinstance(policy, Preempts) else None
        self._holds = policy if isinstance(policy, HoldsBack) else None
        self._follows = policy if isinstance(policy, Follows) else None
        self._budgets = policy if isinstance(policy, BudgetsTokens) else None
        self._prefills = policy if isinstance(policy, PrefillsFirst) else None
        self._barred: set[str] = set()  # preempted by choice in this step: not to be resumed in it
        self._aside: list[Request] = []  # running, but out of vLLM's sight in this step
        self._whole = False  # only whole prompts may enter
        self._begun = False  # something got its blocks in this step
        self._fruitless = False  # the last step was to be one of prompts, and none could go
        manager = scheduler.kv_cache_manager
        self._inner: Callable[..., Any] | None = None
        if self._gates or self._preempts or self._prefills:
            self._inner = manager.allocate_slots
            manager.allocate_slots = self._allocate_slots

    def release(self) -> None:
        """Let go of the scheduler: another policy takes over."""
        if self._inner is not None:
            self._scheduler.kv_cache_manager.allocate_slots = self._inner

    def run(self, schedule: Callable[[], SchedulerOutput], context: SchedulerContext) -> SchedulerOutput:
        """One step: `schedule` is vLLM's, `context` the step's; what it gives is vLLM's answer."""
        scheduler = self._scheduler
        self._context = context
        self._barred.clear()
        if self._orders and len(scheduler.running) > 1:
            key = self._orders.running_key
            scheduler.running.sort(key=lambda request: key(request, context))
        if self._preempts and scheduler.waiting and scheduler.pause_state == PauseState.UNPAUSED:
            self._preempt(self._preempts)
        budget = scheduler.max_num_scheduled_tokens
        if self._budgets:
            scheduler.max_num_scheduled_tokens = max(1, min(budget, self._budgets.step_budget(self._context)))
        try:
            if self._prefills:
                output = self._apart(self._prefills, schedule)
            elif held := self._held_back():
                output = self._without(held, schedule)
            else:
                output = schedule()
        finally:
            scheduler.max_num_scheduled_tokens = budget
        if self._follows:
            for name, tokens in output.num_scheduled_tokens.items():
                self._follows.on_scheduled(scheduler.requests[name], tokens, self._context)
        return output

    def preempted(self, request: Request) -> None:
        """Pass on that vLLM, or the policy's own choice, preempted a request."""
        if self._follows:
            self._follows.on_preempted(request, self._context)

    def finished(self, request: Request) -> None:
        """Pass on that a request ended."""
        if self._follows:
            self._follows.on_finished(request)

    def _preempt(self, policy: Preempts) -> None:
        """Send the policy's victims back to the queue, as vLLM's reset_prefix_cache does: last admitted first."""
        scheduler = self._scheduler
        victims = set(policy.select_preemptions(list(scheduler.waiting), list(scheduler.running), self._context))
        if not victims:
            return
        if not victims.issubset(scheduler.running):
            raise RuntimeError(f"{type(policy).__name__} wants to preempt requests that do not run")
        # What a KV connector still writes to is not freed at once: it would make no room.
        leaving = [r for r in scheduler.running if r in victims and scheduler._request_blocks_can_be_freed(r)]
        scheduler.running = [r for r in scheduler.running if r not in victims or r not in leaving]
        for request in reversed(leaving):
            scheduler._preempt_request(request, time.monotonic(), drop_stale_output=scheduler.requires_kv_delivery)
            self._barred.add(request.request_id)
        self._context = replace(
            self._context,
            num_waiting=len(scheduler.waiting),
            num_running=len(scheduler.running),
            free_blocks=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        )
        scheduler.waiting.begin_step(self._context)

    def _held_back(self) -> set[Request]:
        scheduler = self._scheduler
        if self._holds is None or not scheduler.waiting or scheduler.pause_state != PauseState.UNPAUSED:
            return set()
        return set(self._holds.held_back(scheduler.waiting.peek_request(), scheduler.running, self._context))

    def _without(self, held: set[Request], schedule: Callable[[], SchedulerOutput]) -> SchedulerOutput:
        """A step that some runners sit out; their seats stay theirs."""
        scheduler = self._scheduler
        seats = scheduler.max_num_active_reqs
        self._aside = [request for request in scheduler.running if request in held]
        scheduler.running = [request for request in scheduler.running if request not in held]
        scheduler.max_num_active_reqs = seats - len(self._aside)
        try:
            return schedule()
        finally:
            scheduler.max_num_active_reqs = seats
            scheduler.running += self._aside
            self._aside = []

    def _apart(self, policy: PrefillsFirst, schedule: Callable[[], SchedulerOutput]) -> SchedulerOutput:
        """A step of prompts or one without admissions. Source: vLLM v0's `Scheduler._schedule_default`.

        Whether a prompt fits is vLLM's to say. If none does after all, the step stays empty (vLLM's engines pass over
        such a step, the ids of finished requests go out with it as usual) and the next one goes to the decodes.
        """
        scheduler = self._scheduler
        seats, running = scheduler.max_num_active_reqs, scheduler.running
        partly = [request for request in running if request.is_prefill_chunk]
        prompts = not running or (not self._fruitless and (bool(partly) or self._due(policy)))
        if prompts:
            self._aside = [request for request in running if not request.is_prefill_chunk]
            scheduler.running = partly
            scheduler.max_num_active_reqs = seats - len(self._aside)
        else:
            # Moved here with its KV, a request is a decode like the others.
            moved = sum(request.status in _ADMISSIBLE for request in scheduler.kv_holding_waiting)
            scheduler.max_num_active_reqs = min(seats, len(running) + moved) if moved else 0
        self._whole, self._begun = prompts, False
        try:
            output = schedule()
        finally:
            scheduler.max_num_active_reqs = seats
            scheduler.running = self._aside + scheduler.running
            self._aside, self._whole = [], False
        self._fruitless = prompts and not output.total_num_scheduled_tokens
        return output

    def _due(self, policy: PrefillsFirst) -> bool:
        scheduler = self._scheduler
        if len(scheduler.running) >= scheduler.max_num_active_reqs or scheduler.pause_state != PauseState.UNPAUSED:
            return False
        # Asking vLLM also notices that a grammar or remote blocks have arrived. Stale output must drain first.
        ready = (
            request
            for queue in (scheduler.kv_holding_waiting, scheduler.waiting)
            for request in queue
            if scheduler._handle_blocked_waiting_request(request)
            and not request.num_computed_tokens
            and (not request.num_stale_output_tokens or request.drop_stale_output)
        )
        return (head := next(ready, None)) is not None and policy.admits_now(head, self._context)

    def _allocate_slots(self, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        assert self._inner is not None
        if request.status in _ADMISSIBLE and not request.num_computed_tokens:  # what brings its KV is let in
            if request.request_id in self._barred:
                return None
            if self._whole and self._begun:
                known = kwargs.get("num_new_computed_tokens", 0) + kwargs.get("num_external_computed_tokens", 0)
                if request.num_computed_tokens + known + num_new_tokens < request.num_tokens:
                    return None  # a prompt longer than the budget begins a step of its own
            if self._gates:
                running = self._aside + self._scheduler.running if self._aside else self._scheduler.running
                # Obeyed only while something runs: else nothing could ever change the answer.
                if not self._gates.admit(request, running, self._context) and running:
                    return None
        blocks = self._inner(request, num_new_tokens, *args, **kwargs)
        if blocks is not None:
            self._begun = True
        return blocks
