"""LARRY that also preempts: an experiment.

Source: Kossmann et al., "Is the GPU half-empty or half-full? Practical scheduling techniques for LLMs", which leaves
preemption to future work; the limits are ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.registry import number, whole
from policies.scheduling.larry import Larry
from policies.scheduling.preemption import make_room
from policies.types import Request, SchedulerContext


class LarryPreemptive(Larry):
    """LARRY's order of the queue; running requests are scored by -progress, their computed tokens: the one that has
    least to lose is the first to make way.

    s, waiting, makes r, running, way if LARRY prefers s clearly:
    score(s) - score(r) > hysteresis * Q * memory(r), and only while r has generated at most max_age_tokens; at most
    max_victims in a step. So no two can displace each other in turn at one Q. Victims queue by their score: a LARRY
    that resumed them first would undo the choice.

    It thrashes: victims compute their tokens again. Our prototype (victims by LARRY's score) lost throughput against
    `larry` even with limits, and without them took 3.8 times as long. Prefer `larry`; for tiers, moving requests away.

    alpha, memory_unit, kv_bytes_per_token: as in Larry.
    max_age_tokens: generated tokens up to which a request may be preempted, >= 0.
    max_victims: per step, >= 1.
    hysteresis: share of the victim's memory, 0 <= h <= 1; 1 leaves only what a longer wait justifies.
    """

    name = "larry_preemptive"

    def __init__(
        self,
        *,
        alpha: float = 1.0,
        memory_unit: str = "blocks",
        kv_bytes_per_token: float | None = None,
        max_age_tokens: int = 32,
        max_victims: int = 2,
        hysteresis: float = 0.5,
    ) -> None:
        super().__init__(
            alpha=alpha, memory_unit=memory_unit, kv_bytes_per_token=kv_bytes_per_token, preempted_first=False
        )
        remedy = "It counts generated tokens; 32 is the default, larger values thrash more."
        self.max_age_tokens = whole("max_age_tokens", max_age_tokens, remedy, low=0)
        self.max_victims = whole("max_victims", max_victims, "It counts preemptions per step; 2 is the default.", low=1)
        remedy = "It is a share of the victim's memory; 0.5 is the default."
        self.hysteresis = number("hysteresis", hysteresis, remedy, low=0, high=1)

    def running_key(self, request: Request, ctx: SchedulerContext) -> tuple[float, float, str]:
        return -request.num_computed_tokens, request.arrival_time, request.request_id

    def select_preemptions(
        self, waiting: Sequence[Request], running: Sequence[Request], ctx: SchedulerContext
    ) -> Sequence[Request]:
        """Young requests with least progress, for requests that LARRY clearly prefers."""
        young = [request for request in running if request.num_output_tokens <= self.max_age_tokens]
        young.sort(key=lambda request: (request.priority, *self.running_key(request, ctx)))

        def displaces(s: Request, r: Request) -> bool:
            held = self.memory(r.num_tokens, ctx)
            gain = self.alpha * (r.arrival_time - s.arrival_time) + ctx.num_waiting * (
                held - self.memory(s.num_tokens, ctx)
            )
            return gain > self.hysteresis * ctx.num_waiting * held

        return make_room(waiting, running, young, ctx, displaces, self.max_victims)
