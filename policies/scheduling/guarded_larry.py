"""Guarded LARRY: LARRY without a unit to tune and with a bound on starvation that is a plain time.

Source: ours; it is LARRY (Kossmann et al.) with alpha := Q * max_memory / guard_s.
"""

from __future__ import annotations

import math

from policies.registry import flag, number, whole
from policies.types import Request, SchedulerContext

LEVELS = 8  # steps of the adaptive guard: few, so that keys stay valid while the queue breathes


class GuardedLarry:
    """Ascending arrival + guard_s * memory / max_memory: the smallest request gains guard_s seconds on the largest.

    Memory is tokens, max_memory the model's maximum length. Nobody is overtaken by a request that arrives guard_s
    seconds after it or later; r is overtaken by s only if s arrives less than
    guard_s * (memory(r) - memory(s)) / max_memory later.

    guard_s: seconds, >= 0; 0 is FCFS.
    adaptive: let the guard grow with the queue, from 0 (FCFS) when calm to guard_s when `busy_queue` requests wait.
    busy_queue: waiting requests from which the full guard applies, >= 1; read only if adaptive.
    preempted_first: resume preempted requests before all others, as vLLM does.
    """

    name = "guarded_larry"
    reorders = True

    def __init__(
        self,
        *,
        guard_s: float = 30.0,
        adaptive: bool = False,
        busy_queue: int = 16,
        preempted_first: bool = True,
    ) -> None:
        self.guard_s = number("guard_s", guard_s, "It is a time in seconds; 30 is the default, 0 is FCFS.", low=0)
        self.adaptive = flag("adaptive", adaptive, "false, the default, keeps the guard at guard_s.")
        self.busy_queue = whole("busy_queue", busy_queue, "It counts waiting requests; 16 is the default.", low=1)
        self.preempted_first = flag("preempted_first", preempted_first, "true is the default, as vLLM does it.")

    def guard(self, ctx: SchedulerContext) -> float:
        """Seconds that the smallest request gains on the largest now, 0 <= guard <= guard_s."""
        if not self.adaptive:
            return self.guard_s
        return self.guard_s * (min(ctx.num_waiting, self.busy_queue) * LEVELS // self.busy_queue) / LEVELS

    def waiting_key(self, request: Request, ctx: SchedulerContext) -> tuple[float, float, float, str]:
        arrival, longest = request.arrival_time, ctx.max_model_len
        rank = arrival + self.guard(ctx) * min(request.num_tokens, longest) / longest
        first = self.preempted_first and request.num_preemptions > 0
        return -math.inf if first else rank, rank, arrival, request.request_id

    def order_epoch(self, ctx: SchedulerContext) -> float:
        return self.guard(ctx)

    def on_step(self, ctx: SchedulerContext) -> None:
        pass
