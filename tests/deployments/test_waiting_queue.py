"""The waiting queue against a plain list that is sorted anew at every look."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.hints import tiers_of
from deployments.scheduler import make_policy
from deployments.waiting_queue import PolicyRequestQueue
from policies.types import SchedulerContext

TIERS = {"headroom": [0.1, 0.0, 0.0], "aging_s": [5.0, 5.0, 5.0]}
START = SchedulerContext(
    now=100.0,
    num_waiting=0,
    num_running=1,
    total_blocks=100,
    free_blocks=50,
    block_size=16,
    max_model_len=2048,
    max_num_seqs=8,
    token_budget=512,
)


@dataclass(eq=False)
class Waiting:
    """As much of a vLLM request as queue and policies read."""

    request_id: str
    arrival_time: float
    num_tokens: int
    priority: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_output_tokens: int = 0
    max_tokens: int = 64

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_tokens - self.num_output_tokens


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
    context, number = START, 0
    inside: list[Waiting] = []
    for op, what in ops:
        if op == "add":
            for ago, tokens, tier, preempted in what:
                request = Waiting(f"{number:04}", context.now - ago, tokens, tier % tiers, num_preemptions=preempted)
                number += 1
                (queue.prepend_request if preempted else queue.add_request)(request)
                inside.insert(0 if preempted else len(inside), request)
        elif op == "step":
            context = replace(context, now=context.now + what, num_waiting=len(inside))
            queue.begin_step(context)
        elif inside and op == "pop":
            inside.remove(queue.pop_request())
        elif inside and op == "remove":
            request = inside.pop(what % len(inside))
            queue.remove_request(request)
        elif inside and op == "refresh":
            request = inside[what % len(inside)]
            request.num_tokens += 5
            queue.refresh(request)
        else:
            if ordering.reorders:
                wanted = sorted(inside, key=lambda r: ordering.waiting_key(r, queue._context))
            else:
                wanted = inside
            assert [r.request_id for r in queue] == [r.request_id for r in wanted]
        assert len(queue) == len(inside)
        assert queue.tokens == sum(r.num_tokens for r in inside)
