"""Priority inversion and its repair: which runners of lower tiers keep a waiting request of a higher one out.

Source: ours; the higher tier's claim on occupied memory as in Llumnix (Sun et al., OSDI 2024), section 4.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from policies.scheduling.capabilities import GatesAdmission
from policies.types import Request, SchedulerContext

R = TypeVar("R", bound=Request)


def displaced(
    waiting: Sequence[R],
    running: Sequence[R],
    tier_of: Mapping[str, int],
    gate: GatesAdmission | None,
    ctx: SchedulerContext,
) -> list[R]:
    """Runners that must leave so that requests of higher tiers at the head of the queue can enter in this step.

    `tier_of` is the tier of each runner (by request id) as of its admission; a waiting request has its own tier,
    without aging, and displaces lower ones only. Wanted are a sequence slot, KV blocks for the whole prompt and the
    `gate`'s consent. Who leaves: none superfluous, lowest tier first, then fewest tokens to recompute; nobody where it
    would not suffice. `waiting` is in queue order; the first that cannot enter ends it, as do the step's tokens.
    Blocks that runners share by prefix caching are counted as if they were freed.
    """
    gone: list[R] = []
    batch, free, tokens = list(running), ctx.free_blocks, ctx.token_budget - len(running)
    for request in waiting:
        leaving = _make_way(request, batch, tier_of, gate, replace(ctx, free_blocks=free))
        if leaving is None:
            break
        gone += leaving
        batch = [*without(batch, leaving), request]
        free += blocks_of(leaving, ctx) - ctx.blocks(request.num_tokens)
        tokens -= request.num_tokens
        if tokens <= 0:
            break
    return gone


def in_the_way(head: Request, running: Sequence[R], tier_of: Mapping[str, int], ctx: SchedulerContext) -> list[R]:
    """Runners of lower tiers that are still in their prompts, if the head of the queue can enter in this step.

    Their chunks would come first: an engine gives a step's tokens to those that run already before it admits.
    """
    if len(running) >= ctx.max_num_seqs or ctx.blocks(head.num_tokens) > ctx.free_blocks:
        return []
    in_prompt = (runner for runner in running if runner.num_tokens - runner.num_computed_tokens > 1)
    return [runner for runner in in_prompt if tier_of.get(runner.request_id, -1) > head.priority]


def _make_way(
    request: R,
    batch: Sequence[R],
    tier_of: Mapping[str, int],
    gate: GatesAdmission | None,
    ctx: SchedulerContext,
) -> list[R] | None:
    """Who must leave the batch so that one request can enter; None if no lower tier's leaving would do."""

    def enters(leaving: Sequence[R]) -> bool:
        left, free = without(batch, leaving), ctx.free_blocks + blocks_of(leaving, ctx)
        if len(left) >= ctx.max_num_seqs or ctx.blocks(request.num_tokens) > free:
            return False
        return (
            not left or gate is None or gate.admit(request, left, replace(ctx, num_running=len(left), free_blocks=free))
        )

    if enters(()):
        return []
    lower = [runner for runner in batch if tier_of.get(runner.request_id, -1) > request.priority]
    if not lower or not enters(lower):
        return None
    lower.sort(key=lambda runner: (-tier_of[runner.request_id], runner.num_computed_tokens, runner.request_id))
    leaving: list[R] = []
    while not enters(leaving):
        leaving.append(lower[len(leaving)])
    for spared in leaving[-2::-1]:  # a larger one that came after it may have made it superfluous
        if enters(rest := without(leaving, (spared,))):
            leaving = rest
    return leaving


def without(requests: Sequence[R], leaving: Sequence[R]) -> list[R]:
    """The requests that are not leaving, in their order."""
    names = {request.request_id for request in leaving}
    return [request for request in requests if request.request_id not in names]


def blocks_of(requests: Sequence[Request], ctx: SchedulerContext) -> int:
    """KV blocks that running requests hold together."""
    return sum(ctx.blocks(request.num_computed_tokens) for request in requests)
