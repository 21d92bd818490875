"""SLO budget: who has the least time to spare runs first, and who has the most makes way first.

Source: ours, after the idea of Cascade (2026, known to us by its abstract): budget = SLO - predicted remaining service
time, and the same budget decides what keeps its KV cache. The equations are ours.
"""

from __future__ import annotations

import math

from policies.predictors import Predicts
from policies.registry import number
from policies.types import Request, SchedulerContext

SMOOTHING = 0.05  # weight of the newest step in the mean step time
GRID = 8  # the mean moves in eighths of an octave (9 %), so that keys stay valid while it breathes
PRIOR_STEP_S = 0.05
IDLE_S = 10.0  # a longer gap between steps with work is no step: the engine was paused


class SloBudget(Predicts):
    """Ascending budget = deadline - now - service, seconds; negative: the promise can no longer be kept.

    deadline = arrival + ttft_slo + (length - 1) * tpot_slo, service = step_s * (prefill steps + tokens left), where
    prefill steps = uncomputed tokens / token budget, rounded up, and tokens left = length - generated, at least 1.
    Between two requests `now` cancels, so the order changes only with step_s. s passes r only if it comes less than
    slack(r) - slack(s) seconds after r, where slack = deadline - arrival - service: bounded as lengths and SLOs are.

    ttft_slo_s, tpot_slo_s: seconds, > 0, for requests whose tier promises none.
    step_s: seconds that one iteration takes, > 0; None: follow the engine (a running mean).
    predictor, predictor_path: see policies/predictors.py.
    """

    name = "slo_budget"
    reorders = True

    def __init__(
        self,
        *,
        ttft_slo_s: float = 2.0,
        tpot_slo_s: float = 0.2,
        step_s: float | None = None,
        predictor: str = "max_tokens",
        predictor_path: str | None = None,
    ) -> None:
        super().__init__(predictor, predictor_path)
        self.ttft_slo_s = number("ttft_slo_s", ttft_slo_s, "Seconds to the first token; 2 is the default.", above=0)
        self.tpot_slo_s = number("tpot_slo_s", tpot_slo_s, "Seconds per further token; 0.2 is the default.", above=0)
        self.follows_engine = step_s is None
        remedy = "Seconds per iteration of the engine; leave it out to follow the engine."
        self.step_s = PRIOR_STEP_S if step_s is None else number("step_s", step_s, remedy, above=0)
        self._mean_s = self.step_s
        self._busy_since: float | None = None

    def deadline(self, request: Request) -> float:
        """Wall-clock seconds at which the answer is complete if every promise is just kept."""
        hints = request.hints
        ttft = self.ttft_slo_s if hints.ttft_slo_s is None else hints.ttft_slo_s
        tpot = self.tpot_slo_s if hints.tpot_slo_s is None else hints.tpot_slo_s
        return request.arrival_time + ttft + (self._length(request) - 1) * tpot

    def service(self, request: Request, ctx: SchedulerContext) -> float:
        """Seconds of work left: prefill in whole steps, then one step per token."""
        prefill = math.ceil((request.num_tokens - request.num_computed_tokens) / ctx.token_budget)
        return self.step_s * (prefill + self._length(request) - request.num_output_tokens)

    def budget(self, request: Request, ctx: SchedulerContext) -> float:
        """Seconds that the request can still spend waiting."""
        return self.deadline(request) - ctx.now - self.service(request, ctx)

    def waiting_key(self, request: Request, ctx: SchedulerContext) -> tuple[float, float, str]:
        return self.deadline(request) - self.service(request, ctx), request.arrival_time, request.request_id

    def running_key(self, request: Request, ctx: SchedulerContext) -> tuple[float, float, str]:
        return self.waiting_key(request, ctx)

    def order_epoch(self, ctx: SchedulerContext) -> tuple[float, int]:
        return self.step_s, ctx.token_budget

    def on_step(self, ctx: SchedulerContext) -> None:
        if not self.follows_engine:
            return
        if self._busy_since is not None and 0 < (took := ctx.now - self._busy_since) < IDLE_S:
            self._mean_s += SMOOTHING * (took - self._mean_s)
            self.step_s = 2.0 ** (round(GRID * math.log2(self._mean_s)) / GRID)
        self._busy_since = ctx.now if ctx.num_running else None

    def _length(self, request: Request) -> float:
        """Tokens of the whole answer: as predicted, but more than there are already."""
        return max(self.predicted_length(request), request.num_output_tokens + 1)
