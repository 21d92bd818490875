"""Serve's side of autoscaling: what a replica records for it, and the policy object that Serve's controller asks.

Serve calls each replica's `record_autoscaling_stats` every `metrics_interval_s` seconds and hands what it returned to
the policy class that `autoscaling_config.policy.policy_function` names. It applies the bounds and the windows
(`min_replicas`, `max_replicas`, `upscale_delay_s`, `downscale_delay_s`) itself, afterwards. Names of Serve that this
rests on (contract-tested): `AutoscalingContext`, and that a class is made once, with `policy_kwargs`.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from deployments import metrics
from deployments.wire import Delta, Outcome, Submit
from policies.autoscaling.decision import Decision
from policies.autoscaling.demand import Fleet, Load
from policies.autoscaling.freeness import FreenessScaling
from policies.autoscaling.windows import Trough

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

    from deployments.load_page import Figures

logger = logging.getLogger(f"ray.serve.{__name__}")

POLICY = "deployments.autoscaling:FreenessPolicy"
REMEMBERED_S = 30.0  # first tokens
ARRIVALS_S = 10.0  # the arrivals of so long make the rate of prompt tokens

_FIGURES = tuple(field.name for field in fields(Load) if field.name != "age_s")

Emit = Callable[[Delta], None]
Generate = Callable[[Submit, dict[str, Any], Emit], Coroutine[Any, Any, Outcome]]


class FreenessPolicy:
    """`policies.autoscaling` as Serve calls it; `policy_kwargs` are those of `FreenessScaling`."""

    def __init__(self, **parameters: float) -> None:
        self._policy, self._trough = FreenessScaling(**parameters), Trough()
        self._told: dict[Any, tuple[float, float]] = {}  # replica -> its own time of its last figures, when they came
        self._last: Decision | None = None

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas wanted, and for those who look at Serve's state, why."""
        decision = self._trough.apply(self._policy.decide(self._fleet(ctx)), ctx.target_num_replicas)
        self._tell(ctx, decision)
        self._last = decision
        return decision.replicas, {"reason": decision.reason}

    def _fleet(self, ctx: AutoscalingContext) -> Fleet:
        series: Mapping[str, Mapping[Any, Sequence[Any]]] = ctx.raw_metrics or {}
        now = ctx.current_time or 0.0
        loads = [self._load(series, replica, now) for replica in ctx.running_replicas]
        self._told = {replica: self._told[replica] for replica in ctx.running_replicas}
        return Fleet(
            loads,
            ctx.target_num_replicas,
            ctx.capacity_adjusted_min_replicas,
            ctx.capacity_adjusted_max_replicas,
            ctx.total_queued_requests or 0.0,
        )

    def _load(self, series: Mapping[str, Mapping[Any, Sequence[Any]]], replica: Any, now: float) -> Load:
        """The last figures. Their age counts from when they came: the clocks of two nodes may differ."""
        points = {name: series.get(name, {}).get(replica) for name in _FIGURES}
        size = points["total_blocks"]
        at = size[-1].timestamp if size else -math.inf
        known = self._told.get(replica)
        if known is None or at > known[0]:
            self._told[replica] = known = (at, now)
        figures = {name: float(values[-1].value) for name, values in points.items() if values}
        draining = bool(figures.pop("draining", 0.0))
        fell_silent = not size and known[0] > -math.inf  # Serve forgets figures older than look_back_period_s
        return Load(age_s=math.inf if fell_silent else max(0.0, now - known[1]), draining=draining, **figures)

    def _tell(self, ctx: AutoscalingContext, decision: Decision) -> None:
        metrics.WANTED.at().set(decision.replicas)
        metrics.TARGET.at().set(ctx.target_num_replicas)
        metrics.ACTUAL.at().set(ctx.current_num_replicas)
        if decision.freeness < math.inf:
            metrics.FLEET_FREENESS.at().set(decision.freeness)
        metrics.FLEET_UTILIZATION.at().set(decision.utilization)
        before = (self._last.replicas, self._last.reason) if self._last is not None else None
        if before == (decision.replicas, decision.reason):
            return
        logger.info(
            "autoscaling deployment=%s wanted=%d target=%d running=%d reason=%s freeness=%.0f utilization=%.2f",
            *(ctx.deployment_name, decision.replicas, ctx.target_num_replicas, ctx.current_num_replicas),
            *(decision.reason, decision.freeness, decision.utilization),
        )
        way = decision.replicas - ctx.target_num_replicas
        metrics.scaling_wanted("up" if way > 0 else "down" if way < 0 else "hold", decision.reason)


class FirstTokens:
    """How long requests of a replica wait for their first token, against what their tiers promise.

    `slo_s[tier]` in seconds, None where a tier promises nothing. Where some tier promises something, only requests of
    such tiers are looked at: what may wait calls for no replica.
    """

    def __init__(self, slo_s: Sequence[float | None], clock: Callable[[], float] = time.time) -> None:
        self._slo_s = slo_s
        self._clock = clock
        self._waiting: dict[int, Submit] = {}
        self._came: deque[tuple[float, bool]] = deque()  # when, and whether too late
        self._arrived: deque[tuple[float, int]] = deque()  # when, and prompt tokens

    def watching(self, generate: Generate) -> Generate:
        """The same `generate`, whose first tokens are noticed."""

        async def watched(submit: Submit, entries: dict[str, Any], emit: Emit) -> Outcome:
            if submit.output or not self._counts(submit.priority):
                return await generate(submit, entries, emit)
            if submit.hop == 0:  # what moves here has arrived before
                now = self._clock()
                self._forget(now)
                self._arrived.append((now, len(submit.prompt)))
            key = id(submit)

            def noticed(delta: Delta) -> None:
                if delta.token_ids and self._waiting.pop(key, None) is not None:
                    self._first(submit)
                emit(delta)

            self._waiting[key] = submit
            try:
                return await generate(submit, entries, noticed)
            finally:
                self._waiting.pop(key, None)

        return watched

    def record(self) -> dict[str, float]:
        """`wait_s` of the oldest request without a token, `first_tokens` of the last 30 s, and those of them `late`.

        A request that waits for longer than promised is late already. `due_tokens`: prompt tokens of those without a
        token, `prompt_rate`: prompt tokens/s that arrived in the last 10 s.
        """
        now = self._clock()
        self._forget(now)
        overdue = sum(self._late(submit, now) for submit in self._waiting.values())
        return {
            "wait_s": max((now - submit.arrival for submit in self._waiting.values()), default=0.0),
            "first_tokens": float(len(self._came) + overdue),
            "late": float(sum(late for _, late in self._came) + overdue),
            "due_tokens": float(sum(len(submit.prompt) for submit in self._waiting.values())),
            "prompt_rate": sum(tokens for _, tokens in self._arrived) / ARRIVALS_S,
        }

    def _first(self, submit: Submit) -> None:
        now = self._clock()
        self._forget(now)
        self._came.append((now, self._late(submit, now)))

    def _forget(self, now: float) -> None:
        while self._came and self._came[0][0] < now - REMEMBERED_S:
            self._came.popleft()
        while self._arrived and self._arrived[0][0] < now - ARRIVALS_S:
            self._arrived.popleft()

    def _promise(self, tier: int) -> float | None:
        return self._slo_s[min(tier, len(self._slo_s) - 1)] if self._slo_s else None

    def _counts(self, tier: int) -> bool:
        return self._promise(tier) is not None or all(promise is None for promise in self._slo_s)

    def _late(self, submit: Submit, now: float) -> bool:
        promise = self._promise(submit.priority)
        return promise is not None and now - submit.arrival > promise


def stats(figures: Figures | None, first_tokens: FirstTokens, draining: bool) -> dict[str, float]:
    """What a replica records for the policy: the fields of `Load`; nothing before the first step.

    Serve takes plain numbers only, and each name becomes a series of its own.
    """
    if figures is None:
        return {}
    told = {**figures._asdict(), **first_tokens.record(), "draining": draining}
    return {name: float(told[name]) for name in _FIGURES}
