"""Which running requests make way: the greedy choice that every preempting policy shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from policies.types import Request, SchedulerContext


def make_room(
    waiting: Sequence[Request],
    running: Sequence[Request],
    candidates: Sequence[Request],
    ctx: SchedulerContext,
    outranks: Callable[[Request, Request], bool],
    limit: float = math.inf,
) -> list[Request]:
    """Victims that let requests of the queue's front run now, taken from the end of `candidates`; at most `limit`.

    `candidates` are running requests in ascending tier number. One makes way only for a request that outranks it
    (waiting, running) and is not of a lower tier: raising a tier above another is not a policy's business. Nobody makes
    way in vain: if the next request would not fit even so, or if the step has no token left for it, nobody does.

    Fitting is vLLM's rule: all of the request's tokens in free KV blocks, and a free sequence slot. What running
    requests still need for the tokens they have is not free. Blocks shared through prefix caching count as if each
    request had its own. Costs O(running + admitted) beyond the sorting that the caller did.
    """
    free, tokens = ctx.free_blocks, ctx.token_budget
    for request in running:
        computed = request.num_computed_tokens
        free -= max(0, ctx.blocks(request.num_tokens) - ctx.blocks(computed))
        tokens -= max(1, request.num_tokens - computed)
    slots, left = ctx.max_num_seqs - len(running), list(candidates)
    victims: list[Request] = []
    for head in waiting:
        if tokens <= 0:
            break
        need = ctx.blocks(head.num_tokens)
        chosen: list[Request] = []
        while (free < need or slots < 1) and left and len(victims) + len(chosen) < limit:
            victim = left.pop()
            if victim.priority < head.priority:
                break  # and so are all that are left
            if outranks(head, victim):
                chosen.append(victim)
                free += ctx.blocks(victim.num_tokens)
                slots += 1
                tokens += max(1, victim.num_tokens - victim.num_computed_tokens)
        if free < need or slots < 1:
            break
        victims += chosen
        free -= need
        slots -= 1
        tokens -= head.num_tokens
    return victims
