"""Queue order inside one replica: definitions, bounds on starvation, and what may be kept between steps."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.registry import PolicyError
from policies.scheduling import SCHEDULING, GuardedLarry, Larry
from policies.scheduling.capabilities import OrdersRunning
from policies.types import Hints
from tests.policies.scheduling_rig import MAX_LEN, Asked, context, order


def drawn(name: str, row: tuple[float, int, int, int, int, int | None, int]) -> Asked:
    """A request from drawn numbers; the last two are the answer's true length, None if unknown, and the tier."""
    arrival, prompt, output, preemptions, limit, length, tier = row
    return Asked(name, arrival, prompt, output, preemptions, limit, 0, tier, Hints(output_tokens=length))


# Arrivals in eighths of a second, so that sums with whole memory units are exact and ties do happen.
ARRIVALS = st.integers(0, 800).map(lambda eighths: 1_000_000 + eighths / 8)
REQUESTS = st.lists(
    st.tuples(
        *(ARRIVALS, st.integers(1, 2000), st.integers(0, 2000), st.integers(0, 2), st.integers(1, 600)),
        *(st.none() | st.integers(1, 600), st.integers(0, 2)),
    ),
    min_size=2,
    max_size=30,
).map(lambda rows: [drawn(f"r{i:02}", row) for i, row in enumerate(rows)])
FRESH = REQUESTS.map(lambda requests: [replace(request, num_preemptions=0) for request in requests])
QUEUES = st.integers(0, 5000)
CHOICES: list[tuple[str, dict[str, Any]]] = [
    ("fcfs", {}),
    ("larry", {}),
    ("larry", {"alpha": 500}),
    ("larry", {"memory_unit": "tokens"}),
    ("larry", {"memory_unit": "fraction", "preempted_first": False}),
    ("larry", {"memory_unit": "mib", "kv_bytes_per_token": 131072}),
    ("guarded_larry", {}),
    ("guarded_larry", {"adaptive": True, "preempted_first": False}),
    ("larry_preemptive", {}),
    ("no_preempt", {}),
    ("prefill_first", {}),
    ("sarathi", {}),
    ("srpt", {}),
    ("srpt", {"predictor": "oracle", "c": 0}),
    ("ltr", {"predictor": "oracle"}),
]
TIMED: list[tuple[str, dict[str, Any]]] = [("mlfq", {})]  # their order changes with time
POLICIES = st.sampled_from(CHOICES).map(lambda choice: SCHEDULING.make(choice[0], **choice[1]))
ALL = st.sampled_from(CHOICES + TIMED).map(lambda choice: SCHEDULING.make(choice[0], **choice[1]))


@given(ALL, REQUESTS, QUEUES, st.randoms())
def test_order_is_total(policy: Any, requests: list[Asked], q: int, random: Any) -> None:
    """Keys never tie and compare with each other, so the order does not depend on how the queue was filled."""
    ctx = context(q)
    shuffled = requests.copy()
    random.shuffle(shuffled)
    assert order(policy, shuffled, ctx) == order(policy, requests, ctx)
    assert len({policy.waiting_key(request, ctx) for request in requests}) == len(requests)


@given(ALL.filter(lambda policy: isinstance(policy, OrdersRunning)), REQUESTS, QUEUES, st.data())
def test_running_order_is_total(policy: Any, requests: list[Asked], q: int, data: Any) -> None:
    """Neither do the keys of running requests, whatever part of them is computed."""
    for request in requests:
        request.num_computed_tokens = data.draw(st.integers(0, request.num_tokens))
        policy.waiting_key(request, context(q))
    keys = [policy.running_key(request, context(q)) for request in requests]
    assert sorted(keys) == sorted(set(keys))


@given(FRESH, QUEUES, st.sampled_from([1, 4, 512]), st.sampled_from([1, 16, 32, 128]))
def test_larry_is_its_score(requests: list[Asked], q: int, alpha: int, block_size: int) -> None:
    """LARRY takes the highest alpha * wait - Q * memory first, memory being whole KV blocks in units of 16 tokens."""
    ctx = context(q, block_size)

    def score(request: Asked) -> Fraction:
        held = -(-request.num_tokens // block_size) * block_size
        return Fraction(alpha) * Fraction(ctx.now - request.arrival_time) - q * Fraction(held, 16)

    by_score = sorted(requests, key=lambda r: (-score(r), r.arrival_time, r.request_id))
    assert order(Larry(alpha=alpha), requests, ctx) == by_score


@given(FRESH)
def test_without_a_queue_larry_is_fcfs(requests: list[Asked]) -> None:
    """LARRY with Q = 0 orders as FCFS does, and so does guarded LARRY without a guard or, if adaptive, when calm."""
    fcfs = order(SCHEDULING.make("fcfs"), requests, context(0))
    assert order(Larry(), requests, context(0)) == fcfs
    assert order(GuardedLarry(guard_s=0), requests, context(5000)) == fcfs
    assert order(GuardedLarry(adaptive=True), requests, context(1)) == fcfs


@pytest.mark.parametrize(
    ("parameters", "block_size", "memory"),
    [
        ({"memory_unit": "blocks"}, 16, 63),
        ({"memory_unit": "blocks"}, 32, 64),  # 32 blocks of 32 tokens are 64 of 16
        ({"memory_unit": "tokens"}, 32, 1000),
        ({"memory_unit": "mib", "kv_bytes_per_token": 2**20}, 32, 1024),
        ({"memory_unit": "fraction"}, 32, 32 / 2048),
    ],
)
def test_larry_memory_units(parameters: dict[str, Any], block_size: int, memory: float) -> None:
    """1,000 tokens in each unit: generated tokens count, because a preempted request must recompute them."""
    request = Asked("r", 1_000_000.0, 600, num_output_tokens=400)
    policy = Larry(**parameters)
    assert policy.memory(request.num_tokens, context(10, block_size)) == pytest.approx(memory)


@given(FRESH, QUEUES, st.sampled_from([1.0, 500.0]))
def test_larry_starvation_bound(requests: list[Asked], q: int, alpha: float) -> None:
    """With Q waiting, r is overtaken only by requests that came at most Q * (mem(r) - mem(s)) / alpha after it."""
    policy, ctx = Larry(alpha=alpha), context(q)
    queue = order(policy, requests, ctx)
    for place, late in enumerate(queue):
        for early in queue[place + 1 :]:
            gain = q * (policy.memory(early.num_tokens, ctx) - policy.memory(late.num_tokens, ctx)) / alpha
            assert late.arrival_time - early.arrival_time <= max(0.0, gain) + 1e-6


@given(FRESH, QUEUES, st.integers(0, 60), st.booleans())
def test_guarded_larry_starvation_bound(requests: list[Asked], q: int, guard_s: int, adaptive: bool) -> None:
    """In no queue does a request stand before one that arrived more than guard_s seconds earlier."""
    queue = order(GuardedLarry(guard_s=guard_s, adaptive=adaptive), requests, context(q))
    for place, late in enumerate(queue):
        for early in queue[place + 1 :]:
            assert late.arrival_time - early.arrival_time <= guard_s


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["arrive", "arrive", "admit", "preempt"]), st.integers(0, 20), st.integers(1, MAX_LEN)
        ),
        max_size=80,
    ),
    st.integers(0, 40),
    st.booleans(),
)
def test_guarded_larry_bound_holds_over_time(ops: list[tuple[str, int, int]], guard_s: int, adaptive: bool) -> None:
    """Whatever arrives, is admitted or preempted: who was never admitted is not overtaken by who came guard_s later."""
    policy = GuardedLarry(guard_s=guard_s, adaptive=adaptive)
    waiting: list[Asked] = []
    running: list[Asked] = []
    now = 0.0
    for i, (op, seconds, tokens) in enumerate(ops):
        now += seconds
        if op == "arrive":
            waiting.append(Asked(f"r{i}", now, tokens))
        elif op == "admit" and waiting:
            first = order(policy, waiting, context(len(waiting)))[0]
            for other in waiting:
                if other.num_preemptions == 0:
                    assert first.arrival_time - other.arrival_time <= guard_s
            waiting.remove(first)
            running.append(first)
        elif op == "preempt" and running:
            victim = running.pop(tokens % len(running))
            grown = min(MAX_LEN - victim.num_prompt_tokens, victim.num_output_tokens + seconds)
            waiting.append(replace(victim, num_preemptions=victim.num_preemptions + 1, num_output_tokens=grown))


def test_guarded_larry_spends_the_guard() -> None:
    """The bound is tight: a request of one token passes the longest one up to almost guard_s later, and no more."""
    policy, longest = GuardedLarry(guard_s=30), Asked("long", 0.0, MAX_LEN)
    for later, passes in ((29.9, True), (30.1, False)):
        queue = order(policy, [longest, Asked("short", later, 1)], context(100))
        assert (queue[0].request_id == "short") == passes


@pytest.mark.parametrize("name", ["larry", "guarded_larry"])
def test_preempted_first(name: str) -> None:
    """Preempted requests come first, ordered among themselves by the policy; switched off, they queue as others do."""
    small, big, fresh = (
        Asked("small", 5.0, 10, num_preemptions=1),
        Asked("big", 5.0, 2000, num_preemptions=2),
        Asked("fresh", 5.0, 100),
    )
    queue, ctx = [fresh, big, small], context(100)
    assert order(SCHEDULING.make(name), queue, ctx) == [small, big, fresh]
    assert order(SCHEDULING.make(name, preempted_first=False), queue, ctx) == [small, fresh, big]


@given(ALL, REQUESTS, QUEUES, QUEUES, st.floats(0, 10), st.integers(0, 1000))
def test_equal_epochs_mean_equal_keys(
    policy: Any, requests: list[Asked], q: int, other_q: int, seconds: float, free: int
) -> None:
    """While the epoch stays, keys stay: free memory and running requests alone never call for a new order."""
    before = context(q)
    after = replace(before, now=before.now + seconds, free_blocks=free, num_running=free, num_waiting=other_q)
    epoch, keys = policy.order_epoch(before), [policy.waiting_key(request, before) for request in requests]
    policy.on_step(after)
    if policy.order_epoch(after) == epoch:
        assert keys == [policy.waiting_key(request, after) for request in requests]
    later = replace(before, free_blocks=free, num_running=free)
    assert policy.order_epoch(later) == policy.order_epoch(before)


@given(POLICIES, QUEUES, st.floats(0, 1e6))
def test_time_alone_calls_for_no_new_order(policy: Any, q: int, seconds: float) -> None:
    """A long queue is not sorted in each step: the epoch of all but time-driven policies outlasts any wait."""
    before = context(q)
    assert policy.order_epoch(replace(before, now=before.now + seconds)) == policy.order_epoch(before)


def test_adaptive_guard_grows_in_few_steps() -> None:
    """The adaptive guard never shrinks as the queue grows, ends at guard_s, and takes at most nine values."""
    policy = GuardedLarry(guard_s=30, adaptive=True, busy_queue=200)
    guards = [policy.guard(context(q)) for q in range(1000)]
    assert guards == sorted(guards)
    assert guards[0] == 0
    assert guards[200] == guards[-1] == 30
    assert len(set(guards)) <= 9


def test_who_leaves_the_engines_queue_alone() -> None:
    """`reorders` is what makes the engine keep its own deque: for the policies that are first come, first served."""
    unordered = {name for name in SCHEDULING.names() if not SCHEDULING.make(name).reorders}
    assert unordered == {"fcfs", "no_preempt", "prefill_first", "sarathi"}


@pytest.mark.parametrize(
    ("name", "parameters", "field"),
    [
        ("larry_preemptive", {"max_victims": 0}, "max_victims"),
        ("larry_preemptive", {"hysteresis": 2}, "hysteresis"),
        ("larry_preemptive", {"preempted_first": True}, "preempted_first"),
        ("prefill_first", {"watermark": 1}, "watermark"),
        ("sarathi", {"token_budget": 0}, "token_budget"),
        ("srpt", {"c": 1.5}, "c"),
        ("srpt", {"predictor": "crystal ball"}, "predictor"),
        ("ltr", {"predictor": "learned"}, "predictor_path"),
        ("ltr", {"period": 0}, "period"),
        ("mlfq", {"ratio": 1}, "ratio"),
        ("mlfq", {"levels": 2.5}, "levels"),
        ("mlfq", {"starvation_s": 0}, "starvation_s"),
    ],
)
def test_parameters_out_of_range(name: str, parameters: dict[str, Any], field: str) -> None:
    """A wrong parameter is refused with its name."""
    with pytest.raises(PolicyError) as caught:
        SCHEDULING.make(name, **parameters)
    assert caught.value.field == field
