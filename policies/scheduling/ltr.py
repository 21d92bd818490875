"""Shortest predicted answer first, and nobody waits for ever.

Source: Fu et al., "Efficient LLM Scheduling by Learning to Rank" (NeurIPS 2024), section 4.3 and algorithm 1, and its
code (hao-ai-lab/vllm-ltr). The ranker is `predictor: learned`.
"""

from __future__ import annotations

import math
from collections import deque

from policies.predictors import Predicts
from policies.registry import whole
from policies.types import Request, SchedulerContext


class LTR(Predicts):
    """Ascending predicted length; a request that was passed over in `starvation_steps` steps goes first, and keeps its
    privilege for `period` steps of service.

    Steps count from arrival or the last preemption; they are looked at every `period` steps. The source orders starved
    requests by length too, so that under lasting overload, when all are starved, the longest still never run. Here
    they queue by the time since when they have been idle: a starved request waits only for those idle longer than
    it. It takes the first place in the queue, not that of a running request: nothing is preempted by choice. When
    blocks run out, the running request with the longest prediction goes first.

    starvation_steps: steps without service, >= 1.
    period: steps, >= 1.
    predictor, predictor_path: see policies/predictors.py.
    """

    name = "ltr"
    reorders = True

    def __init__(
        self,
        *,
        starvation_steps: int = 200,
        period: int = 10,
        predictor: str = "max_tokens",
        predictor_path: str | None = None,
    ) -> None:
        super().__init__(predictor, predictor_path)
        remedy = "It counts steps of the engine; 200 is the default."
        self.starvation_steps = whole("starvation_steps", starvation_steps, remedy, low=1)
        self.period = whole("period", period, "It counts steps of the engine; 10 is the default.", low=1)
        self._steps: deque[float] = deque(maxlen=self.starvation_steps + 1)  # when they began
        self._count = 0
        self._horizon = -math.inf  # who has been idle since then or longer is starved
        self._idle_since: dict[str, float] = {}  # of preempted requests; of all others it is the arrival
        self._privilege: dict[str, int] = {}  # steps of privileged service left to requests that were served

    def waiting_key(self, request: Request, ctx: SchedulerContext) -> tuple[float, float, float, str]:
        name, arrival = request.request_id, request.arrival_time
        idle = self._idle_since.get(name, arrival)
        if idle <= self._horizon or self._privilege.get(name):
            return 0.0, idle, arrival, name
        return 1.0, self.predicted_length(request), arrival, name

    def running_key(self, request: Request, ctx: SchedulerContext) -> tuple[float, float, float, str]:
        name = request.request_id
        privileged = 0.0 if self._privilege.get(name) else 1.0
        return privileged, self.predicted_length(request), request.arrival_time, name

    def order_epoch(self, ctx: SchedulerContext) -> float:
        return self._horizon

    def on_step(self, ctx: SchedulerContext) -> None:
        self._steps.append(ctx.now)
        self._count += 1
        if self._count % self.period == 0 and len(self._steps) > self.starvation_steps:
            self._horizon = self._steps[0]

    def on_scheduled(self, request: Request, tokens: int, ctx: SchedulerContext) -> None:
        name = request.request_id
        left = self._privilege.get(name)
        if left is None:  # its first service since it waited
            left = self.period if self._idle_since.get(name, request.arrival_time) <= self._horizon else 0
        self._privilege[name] = max(left - 1, 0)

    def on_preempted(self, request: Request, ctx: SchedulerContext) -> None:
        self._idle_since[request.request_id] = ctx.now
        if not self._privilege.get(request.request_id):
            self._privilege.pop(request.request_id, None)

    def on_finished(self, request: Request) -> None:
        self._idle_since.pop(request.request_id, None)
        self._privilege.pop(request.request_id, None)
