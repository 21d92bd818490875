"""Least predicted remaining work first, with preemption only while a request is young.

Source: TRAIL (Shahout et al., "Don't Stop Me Now: Embedding Based Scheduling for LLMs", ICLR 2025), limited preemption.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.predictors import Predicts
from policies.registry import number
from policies.scheduling.preemption import make_room
from policies.types import Request, SchedulerContext


class SRPT(Predicts):
    """Ascending predicted remaining output; a running request makes way for a shorter one only while it has generated
    fewer than c * predicted tokens.

    From then on it is pinned: no policy's choice preempts it, and it is the last to go when blocks run out. c = 0 never
    preempts by choice: that is TRAIL+ of the LARRY paper, with predictor `oracle`. c = 1 is SRPT. TRAIL predicts anew
    with each token from the model's inner state; here the length is predicted once, and a request that outlives its
    prediction counts as about to end.

    A preempted request computes its tokens again: c > 0 pays only where that is cheap or predictions are good.
    Long requests may starve: there is no bound. Use it to see what knowing the length is worth, or behind a tier.

    c: share of the predicted length, 0 <= c <= 1.
    predictor, predictor_path: see policies/predictors.py.
    """

    name = "srpt"
    reorders = True

    def __init__(self, *, c: float = 0.8, predictor: str = "max_tokens", predictor_path: str | None = None) -> None:
        super().__init__(predictor, predictor_path)
        self.c = number("c", c, "0.8 is the default; 0 never preempts by choice, 1 is SRPT.", low=0, high=1)

    def remaining(self, request: Request) -> float:
        """Tokens that the request is believed to generate yet, >= 0."""
        return max(0.0, self.predicted_length(request) - request.num_output_tokens)

    def pinned(self, request: Request) -> bool:
        """Whether the request is too far on to be preempted by choice."""
        return request.num_output_tokens >= self.c * self.predicted_length(request)

    def waiting_key(self, request: Request, ctx: SchedulerContext) -> tuple[float, float, str]:
        return self.remaining(request), request.arrival_time, request.request_id

    def running_key(self, request: Request, ctx: SchedulerContext) -> tuple[float, float, float, str]:
        return 0.0 if self.pinned(request) else 1.0, *self.waiting_key(request, ctx)

    def order_epoch(self, ctx: SchedulerContext) -> None:
        return None

    def on_step(self, ctx: SchedulerContext) -> None:
        pass

    def select_preemptions(
        self, waiting: Sequence[Request], running: Sequence[Request], ctx: SchedulerContext
    ) -> Sequence[Request]:
        """Of those not pinned the longest remaining first, each for a request with less remaining."""
        if self.c == 0:
            return []
        young = [request for request in running if not self.pinned(request)]
        young.sort(key=lambda request: (request.priority, *self.waiting_key(request, ctx)))
        return make_room(waiting, running, young, ctx, lambda s, r: self.remaining(s) < self.remaining(r))
