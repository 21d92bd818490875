"""Priority tiers around any scheduling policy: order by tier, then by the policy; tiers age; lower ones make way.

Source: ours; strict tiers within an engine as in Llumnix (Sun et al., OSDI 2024), section 4.3, without its migration.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from policies.predictors import LengthPredictor
from policies.scheduling import SchedulingPolicy
from policies.scheduling.capabilities import Follows, GatesAdmission, OrdersRunning, Preempts
from policies.scheduling.inversion import blocks_of, displaced, in_the_way, without
from policies.tiers import Tiers
from policies.types import Request, SchedulerContext

TICKS = 16  # looks at the clock in the shortest aging time: the queue notices a lift that much late, at most
_PASSED_THROUGH = ("admit", "step_budget", "admits_now")


@dataclass(frozen=True, slots=True)
class Stay:
    """A request's time in the batch: its effective tier when admitted, its place among all admissions, since when."""

    tier: int
    number: int
    since: float


class Tiered:
    """A waiting request counts for one tier higher after each `aging_s` of waiting; within a tier the policy decides.

    Time spent running is not waiting. A request of tier p counts for the highest tier once it has waited
    p * aging_s[p] (noticed min(aging_s) / 16 later at most). The policy's own preemptions happen within the tier at
    the head of the queue only; across tiers runners make way as inversion.py says, compared by the tier that they
    counted for when admitted: what was lifted to a tier is safe from it, and nothing is lifted by running. The policy's
    gate, budget and prefill-first are passed through.
    """

    reorders = True

    def __init__(self, policy: SchedulingPolicy, tiers: Tiers) -> None:
        self.policy, self.tiers, self.name = policy, tiers, policy.name
        self._stays: dict[str, Stay] = {}
        self._ran_s: dict[str, float] = {}  # seconds in the batch, in stays that are over
        self._admissions = 0
        self._tick_s = min(tiers.aging_s) / TICKS
        self._orders = policy if isinstance(policy, OrdersRunning) else None
        self._preempts = policy if isinstance(policy, Preempts) else None
        self._follows = policy if isinstance(policy, Follows) else None
        self._gate = policy if isinstance(policy, GatesAdmission) else None
        for name in _PASSED_THROUGH:
            if hasattr(policy, name):
                setattr(self, name, getattr(policy, name))

    @property
    def predictor(self) -> LengthPredictor | None:
        return getattr(self.policy, "predictor", None)

    def take_over(self, before: Tiered) -> None:
        """Know what the tiers around the policy before knew of the requests."""
        self._stays, self._ran_s, self._admissions = before._stays, before._ran_s, before._admissions

    def effective(self, request: Request, ctx: SchedulerContext) -> int:
        """Tier that a waiting request counts for now."""
        waited = ctx.now - request.arrival_time - self._ran_s.get(request.request_id, 0.0)
        return self.tiers.effective(request.priority, max(waited, 0.0))

    def waiting_key(self, request: Request, ctx: SchedulerContext) -> tuple[float | str, ...]:
        key = self.policy.waiting_key(request, ctx)
        if not self.policy.reorders:  # then the engine's own queue would put preempted requests first
            key = (request.num_preemptions == 0, *key)
        return self.effective(request, ctx), *key

    def order_epoch(self, ctx: SchedulerContext) -> Hashable:
        return self.policy.order_epoch(ctx), math.floor(ctx.now / self._tick_s)

    def on_step(self, ctx: SchedulerContext) -> None:
        self.policy.on_step(ctx)

    def running_key(self, request: Request, ctx: SchedulerContext) -> tuple[float | str, ...]:
        stay = self._stays.get(request.request_id) or self._admit(request, ctx)
        if self._orders:
            return stay.tier, *self._orders.running_key(request, ctx)
        return stay.tier, stay.number

    def on_scheduled(self, request: Request, tokens: int, ctx: SchedulerContext) -> None:
        if request.request_id not in self._stays:
            self._admit(request, ctx)
        if self._follows:
            self._follows.on_scheduled(request, tokens, ctx)

    def on_preempted(self, request: Request, ctx: SchedulerContext) -> None:
        if stay := self._stays.pop(request.request_id, None):
            self._ran_s[request.request_id] = self._ran_s.get(request.request_id, 0.0) + ctx.now - stay.since
        if self._follows:
            self._follows.on_preempted(request, ctx)

    def on_finished(self, request: Request) -> None:
        self._stays.pop(request.request_id, None)
        self._ran_s.pop(request.request_id, None)
        if self._follows:
            self._follows.on_finished(request)

    def select_preemptions(
        self, waiting: Sequence[Request], running: Sequence[Request], ctx: SchedulerContext
    ) -> Sequence[Request]:
        own = self._within_tier(self._preempts, waiting, running, ctx) if self._preempts else ()
        left = without(running, own)
        ctx = replace(ctx, num_running=len(left), free_blocks=ctx.free_blocks + blocks_of(own, ctx))
        return [*own, *self.displaced(waiting, left, ctx)]

    def displaced(
        self, waiting: Sequence[Request], running: Sequence[Request], ctx: SchedulerContext
    ) -> Sequence[Request]:
        """Runners of lower tiers that keep requests at the head of the queue out, once its grace is over."""
        if ctx.grace_s and ctx.now - waiting[0].arrival_time < ctx.grace_s:
            return ()
        return displaced(waiting, running, self._tier_of(), self._gate, ctx)

    def held_back(self, head: Request, running: Sequence[Request], ctx: SchedulerContext) -> Sequence[Request]:
        return in_the_way(head, running, self._tier_of(), ctx)

    def _tier_of(self) -> dict[str, int]:
        return {name: stay.tier for name, stay in self._stays.items()}

    def _within_tier(
        self, policy: Preempts, waiting: Sequence[Request], running: Sequence[Request], ctx: SchedulerContext
    ) -> Sequence[Request]:
        """The policy's victims, shown the tier at the head of the queue as if it had the rest of the replica alone."""
        tier = self.effective(waiting[0], ctx)
        waiters = list(takewhile(lambda r: self.effective(r, ctx) == tier, waiting))
        runners = [r for r in running if (self._stays.get(r.request_id) or self._admit(r, ctx)).tier == tier]
        others = without(running, runners)
        if not runners:
            return ()
        view = replace(
            ctx,
            num_waiting=len(waiters),
            num_running=len(runners),
            max_num_seqs=ctx.max_num_seqs - len(others),
            total_blocks=ctx.total_blocks - blocks_of(others, ctx),
        )
        return policy.select_preemptions(waiters, runners, view)

    def _admit(self, request: Request, ctx: SchedulerContext) -> Stay:
        self._admissions += 1
        stay = self._stays[request.request_id] = Stay(self.effective(request, ctx), self._admissions, ctx.now)
        return stay
