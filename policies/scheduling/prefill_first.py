"""Whole prompts first, decodes when no prompt can be taken in: vLLM before its v1 engine.

Source: vLLM V0 `Scheduler._schedule` and `BlockSpaceManager.can_allocate` (Kwon et al., SOSP 2023, section 4.5).
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.registry import number
from policies.scheduling.fcfs import FCFS
from policies.types import Request, SchedulerContext


class PrefillFirst(FCFS):
    """First come, first served; a step is one of whole prompts if the head of the queue can be taken in, else one of
    decodes.

    Taken in are prompts, in order, while they leave `watermark` of the KV blocks free and fit the step's token budget
    together; one that is longer than the budget is taken in alone, in chunks. Good for throughput and for the first
    token; every arrival halts all running answers for the length of a prefill, which shows in the tail of the time
    per output token. V0 refuses a request that cannot keep the watermark; here it runs when the replica is empty.

    watermark: share of the KV blocks that admissions leave to the growth of the running requests, 0 <= w < 1.
    """

    name = "prefill_first"

    def __init__(self, *, watermark: float = 0.01) -> None:
        remedy = "It is a share of the KV cache; 0.01 is the default."
        self.watermark = number("watermark", watermark, remedy, low=0, high=0.99)

    def admits_now(self, head: Request, ctx: SchedulerContext) -> bool:
        """Whether the head of the queue can be taken in."""
        if ctx.num_running == 0:
            return True
        left = ctx.free_blocks - ctx.blocks(head.num_tokens)
        return ctx.num_running < ctx.max_num_seqs and left >= self.watermark * ctx.total_blocks

    def admit(self, request: Request, running: Sequence[Request], ctx: SchedulerContext) -> bool:
        """Whether the prompt keeps the watermark and fits the token budget, beside those of this step."""
        if not running:
            return True
        left, tokens = ctx.free_blocks - ctx.blocks(request.num_tokens), 0
        for other in running:
            todo = other.num_tokens - other.num_computed_tokens
            if todo > 1:  # a prompt of this step: a decode computes one token
                tokens += todo
                left -= ctx.blocks(other.num_tokens) - ctx.blocks(other.num_computed_tokens)
        return left >= self.watermark * ctx.total_blocks and (
            tokens == 0 or tokens + request.num_tokens <= ctx.token_budget
        )
