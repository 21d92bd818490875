"""Reserve for the longest answer that may come, so that nobody is ever preempted.

Source: Orca (Yu et al., OSDI 2022), algorithm 1: a request is admitted only if `max_tokens` slots can be reserved.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.scheduling.fcfs import FCFS
from policies.types import Request, SchedulerContext


class NoPreempt(FCFS):
    """First come, first served; r is admitted only if blocks(min(max_model_len, prompt + max_tokens)), summed over
    the running requests and r, is at most the replica's KV blocks.

    What runs never needs a block that is not there: no preemption, by choice or by lack of memory. The price is a
    small batch: an answer that could be long holds its reservation although most answers are short. Requests that an
    earlier policy admitted without a reservation may still be preempted until they have ended. A request that could
    fill more than the whole cache runs alone.
    """

    name = "no_preempt"

    def reservation(self, request: Request, ctx: SchedulerContext) -> int:
        """KV blocks that the request may come to hold."""
        longest = min(ctx.max_model_len, request.num_prompt_tokens + request.max_tokens)
        return min(-(-longest // ctx.block_size), ctx.total_blocks)

    def admit(self, request: Request, running: Sequence[Request], ctx: SchedulerContext) -> bool:
        """Whether the reservation can be made beside those of all that run."""
        left = ctx.total_blocks - self.reservation(request, ctx)
        for other in running:
            left -= self.reservation(other, ctx)
            if left < 0:
                return False
        return True
