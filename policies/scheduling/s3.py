"""S3: reserve KV cache for the predicted length, pack the batch with it, evict whoever outgrows the reservation.

Source: Jin et al., "S3: Increasing GPU Utilization during Generative Inference for Higher Throughput" (NeurIPS 2023).
The number of buckets and the doubling after an overrun are ours: the paper's own figures were not at hand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from policies.predictors import Predicts
from policies.registry import whole
from policies.types import Request, SchedulerContext


class S3(Predicts):
    """Decreasing first-fit: the largest reservation that fits beside those of the running requests enters next.

    A reservation is the KV blocks of the prompt and of an answer as long as the predicted length's bucket allows; the
    buckets split the model's maximum length evenly. A request that fills its bucket while others wait is evicted and
    comes back with twice the answer reserved, so it is evicted at most log2(buckets) times, rounded up. Reservations,
    or what running requests really hold where that is more, never exceed the cache together. As in the paper nothing
    bounds the wait of a large request while small ones keep coming.

    buckets: >= 1; 1 reserves for the longest possible answer.
    predictor, predictor_path: see policies/predictors.py.
    """

    name = "s3"
    reorders = True

    def __init__(self, *, buckets: int = 10, predictor: str = "max_tokens", predictor_path: str | None = None) -> None:
        super().__init__(predictor, predictor_path)
        self.buckets = whole("buckets", buckets, "10 is the default; more reserve closer to the prediction.", low=1)
        self._reserved: dict[str, int] = {}  # running request -> KV blocks
        self._total = 0  # of self._reserved
        self._overruns: dict[str, int] = {}

    def allowance(self, request: Request, ctx: SchedulerContext) -> int:
        """Tokens of answer that are reserved, at most max_tokens: the bucket's upper end, doubled per overrun."""
        width = math.ceil(ctx.max_model_len / self.buckets)
        bucket = max(1, math.ceil(self.predicted_length(request) / width))
        return min(request.max_tokens, bucket * width << self._overruns.get(request.request_id, 0))

    def reservation(self, request: Request, ctx: SchedulerContext) -> int:
        """KV blocks set aside for the request, at most all there are; never less than its tokens need."""
        tokens = request.num_prompt_tokens + self.allowance(request, ctx)
        return min(ctx.blocks(max(request.num_tokens, min(tokens, ctx.max_model_len))), ctx.total_blocks)

    def waiting_key(self, request: Request, ctx: SchedulerContext) -> tuple[float, float, float, str]:
        need = self.reservation(request, ctx)
        return float(self._total + need > ctx.total_blocks), -need, request.arrival_time, request.request_id

    def order_epoch(self, ctx: SchedulerContext) -> int:
        return self._total

    def on_step(self, ctx: SchedulerContext) -> None:
        pass

    def admit(self, request: Request, running: Sequence[Request], ctx: SchedulerContext) -> bool:
        reserved = sum(self.reservation(other, ctx) for other in running)
        return reserved + self.reservation(request, ctx) <= ctx.total_blocks

    def select_preemptions(
        self, waiting: Sequence[Request], running: Sequence[Request], ctx: SchedulerContext
    ) -> list[Request]:
        """Running requests that filled their reserved answer and are not at their limit."""
        outgrown = [r for r in running if self.allowance(r, ctx) <= r.num_output_tokens < r.max_tokens]
        for request in outgrown:
            self._overruns[request.request_id] = self._overruns.get(request.request_id, 0) + 1
        return outgrown

    def on_scheduled(self, request: Request, tokens: int, ctx: SchedulerContext) -> None:
        if request.request_id not in self._reserved:
            self._reserved[request.request_id] = blocks = self.reservation(request, ctx)
            self._total += blocks

    def on_preempted(self, request: Request, ctx: SchedulerContext) -> None:
        self._release(request)

    def on_finished(self, request: Request) -> None:
        self._release(request)
        self._overruns.pop(request.request_id, None)

    def _release(self, request: Request) -> None:
        self._total -= self._reserved.pop(request.request_id, 0)
