"""First come, first served: vLLM's v1 scheduler as it is."""

from __future__ import annotations

from policies.types import Request, SchedulerContext


class FCFS:
    """Earliest arrival first, in the engine's own queue (which puts preempted requests back at its head).

    Source: Orca (Yu et al., OSDI 2022), section 3; vLLM v1 `Scheduler`.
    """

    name = "fcfs"
    reorders = False

    def waiting_key(self, request: Request, ctx: SchedulerContext) -> tuple[float, str]:
        return request.arrival_time, request.request_id

    def order_epoch(self, ctx: SchedulerContext) -> None:
        return None

    def on_step(self, ctx: SchedulerContext) -> None:
        pass
