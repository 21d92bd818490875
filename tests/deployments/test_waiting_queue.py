"""The waiting queue against a plain list that is sorted anew at every look."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.hints import tiers_of
from deployments.scheduler import make_policy
from deployments.waiting_queue import PolicyRequestQueue
from tests.policies.scheduling_rig import Asked, context

TIERS = {"headroom": [0.1, 0.0, 0.0], "aging_s": [5.0, 5.0, 5.0]}
START = context(0)

SHAPES = st.tuples(st.floats(0, 30), st.integers(1, 900), st.integers(0, 2), st.booleans())
OPS = st.one_of(
    st.tuples(st.just("add"), st.lists(SHAPES, min_size=1, max_size=40)),
    st.tuples(st.just("step"), st.floats(0, 3)),
    st.tuples(st.sampled_from(["pop", "remove", "refresh", "look"]), st.integers(0, 1000)),
)


@pytest.mark.parametrize("tiers", [1, 3])
@pytest.mark.parametrize("policy", ["fcfs", "larry", "guarded_larry"])
@given(ops=st.lists(OPS, max_size=30))
def test_order_is_that_of_a_sort(policy: str, tiers: int, ops: list[tuple[str, Any]]) -> None:
    """Newcomers, removals and changed lengths leave the order that sorting all by the policy's key would give."""
    ordering: Any = make_policy({"name": policy}, tiers_of(TIERS if tiers == 3 else None))
    queue: Any = PolicyRequestQueue(ordering, START)
    ctx, number = START, 0
    inside: list[Asked] = []
    for op, what in ops:
        if op == "add":
            for ago, tokens, tier, preempted in what:
                request = Asked(f"{number:04}", ctx.now - ago, tokens, num_preemptions=preempted, priority=tier % tiers)
                number += 1
                (queue.prepend_request if preempted else queue.add_request)(request)
                inside.insert(0 if preempted else len(inside), request)
        elif op == "step":
            ctx = replace(ctx, now=ctx.now + what, num_waiting=len(inside))
            queue.begin_step(ctx)
        elif inside and op == "pop":
            inside.remove(queue.pop_request())
        elif inside and op == "remove":
            request = inside.pop(what % len(inside))
            queue.remove_request(request)
        elif inside and op == "refresh":
            request = inside[what % len(inside)]
            request.num_output_tokens += 5
            queue.refresh(request)
        else:
            if ordering.reorders:
                wanted = sorted(inside, key=lambda r: ordering.waiting_key(r, queue._context))
            else:
                wanted = inside
            assert [r.request_id for r in queue] == [r.request_id for r in wanted]
        assert len(queue) == len(inside)
        assert queue.tokens == sum(r.num_tokens for r in inside)
