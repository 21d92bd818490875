"""Stall-free batching: decodes first, and of prompts only what the token budget leaves.

Source: Sarathi-Serve (Agrawal et al., OSDI 2024), section 4.2, algorithm 3.
"""

from __future__ import annotations

from policies.registry import whole
from policies.scheduling.fcfs import FCFS
from policies.types import Request, SchedulerContext


class Sarathi(FCFS):
    """First come, first served; of a step's `token_budget` tokens decodes get theirs first, then prompts that were
    begun, then new ones.

    vLLM v1 batches much the same way, but with its own, larger budget and running requests in the order of their
    admission. A smaller budget bounds the time per output token and makes prompts take more steps. When blocks run
    out, the request that came last is preempted, one in its prompt before any that decodes.

    token_budget: tokens of a step, >= 1 (512 strict, 2048 relaxed in the source); the engine's own budget
        (`max_num_batched_tokens`) bounds it. Choose it well above `max_num_seqs`: prompts get what decodes leave.
    """

    name = "sarathi"

    def __init__(self, *, token_budget: int = 512) -> None:
        remedy = "It is the number of tokens per step; 512 is the default."
        self.token_budget = whole("token_budget", token_budget, remedy, low=1)

    def running_key(self, request: Request, ctx: SchedulerContext) -> tuple[float, float, str]:
        prompt_left = request.num_tokens - request.num_computed_tokens > 1
        return float(prompt_left), request.arrival_time, request.request_id

    def step_budget(self, ctx: SchedulerContext) -> int:
        return self.token_budget
