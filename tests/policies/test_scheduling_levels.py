"""MLFQ: which level a request joins, when it sinks and rises, and whom it preempts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.scheduling.capabilities import Follows, OrdersRunning, Preempts
from policies.scheduling.mlfq import MLFQ
from tests.policies.scheduling_rig import Asked, Replica, context, order, running

PER_TOKEN: dict[str, Any] = {"prefill_token_ms": 0.1, "decode_token_ms": 10.0}


def at(seconds: float, q: int = 3, **more: Any) -> Any:
    """The replica `seconds` after the second 1,000,000."""
    return context(q, now=1_000_000.0 + seconds, **more)


def asked(name: str, prompt: int, seconds: float = 0.0, **more: Any) -> Asked:
    """A request that arrived `seconds` after the second 1,000,000."""
    return Asked(name, 1_000_000.0 + seconds, prompt, **more)


@given(st.integers(1, 20_000), st.integers(1, 8), st.sampled_from([2.0, 4.0]), st.sampled_from([1.0, 10.0]))
def test_mlfq_skip_join(prompt: int, levels: int, ratio: float, q0_ms: float) -> None:
    """A request joins the first level whose quantum q0 * ratio^level covers its prompt's time, or the last."""
    policy = MLFQ(q0_ms=q0_ms, ratio=ratio, levels=levels, **PER_TOKEN)
    level = policy.level(asked("r", prompt), at(0))
    assert 0 <= level < levels
    assert level == levels - 1 or q0_ms * ratio**level >= prompt * 0.1
    assert level == 0 or q0_ms * ratio ** (level - 1) < prompt * 0.1


def test_mlfq_follows_and_preempts() -> None:
    """The engine's adapter finds the three capabilities that the queue needs."""
    policy = MLFQ()
    assert isinstance(policy, OrdersRunning)
    assert isinstance(policy, Preempts)
    assert isinstance(policy, Follows)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 200))
def test_mlfq_demotion_by_service(levels: int, decode_ms: int, decodes: int) -> None:
    """A request sinks one level at the decode that takes it beyond the level's quantum, and never below the last."""
    policy, request = MLFQ(q0_ms=8, levels=levels, decode_token_ms=decode_ms), running("r", 1)
    level, served = 0, 0
    for _ in range(decodes):
        policy.on_scheduled(request, 1, at(0))
        served += decode_ms
        if served > 8 * 2**level and level < levels - 1:
            level, served = level + 1, 0
        assert policy.level(request, at(0)) == level


def test_mlfq_prefill_counts_less_than_decodes() -> None:
    """A prompt in chunks uses up its quantum exactly and stays; the first decode beyond sinks the request."""
    policy, request = MLFQ(**PER_TOKEN), asked("r", 200)
    assert policy.level(request, at(0)) == 1  # 20 ms
    for chunk in (128, 72):
        policy.on_scheduled(request, chunk, at(0))
        assert policy.level(request, at(0)) == 1
    policy.on_scheduled(request, 1, at(0))
    assert policy.level(request, at(0)) == 2


def test_mlfq_places_within_a_level() -> None:
    """Newcomers queue behind each other; one that sinks goes to the front of its new level."""
    policy = MLFQ(**PER_TOKEN)
    early, late, sunk = asked("early", 200), asked("late", 200, 1.0), running("sunk", 50, arrival=1_000_000.5)
    for _ in range(2):
        policy.on_scheduled(sunk, 1, at(1))
    policy.on_preempted(sunk, at(1))
    assert [policy.level(request, at(1)) for request in (early, late, sunk)] == [1, 1, 1]
    assert order(policy, [late, early, sunk], at(1)) == [sunk, early, late]


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.3, 0.37])
def test_mlfq_promotion_on_starvation(seconds: float) -> None:
    """Waiting for starvation_s, at most an eighth more, lifts a request to level 0, behind those who are there."""
    policy = MLFQ(starvation_s=3, levels=6, **PER_TOKEN)
    deep, fresh = asked("deep", 2000, seconds), asked("fresh", 10, 2.5)
    assert policy.level(deep, at(seconds)) == 5
    assert policy.level(deep, at(seconds + 2.99)) == 5
    assert policy.level(deep, at(seconds + 3.0 + 3 / 8)) == 0
    assert order(policy, [deep, fresh], at(seconds + 3.375)) == [fresh, deep]
    policy.on_scheduled(deep, 50, at(seconds + 3.375))
    assert policy.level(deep, at(seconds + 3.375)) == 0
    policy.on_scheduled(deep, 1950, at(seconds + 3.4))
    assert policy.level(deep, at(99)) == 1  # it runs: waiting is over, and it sinks as others do


def test_mlfq_starvation_starts_anew_with_a_preemption() -> None:
    """Who runs does not starve; the time counts again from the preemption on."""
    policy, request = MLFQ(starvation_s=3, **PER_TOKEN), running("r", 200)
    for _ in range(5):
        policy.on_scheduled(request, 1, at(10))
    level = policy.level(request, at(60))
    assert level > 0
    policy.on_preempted(request, at(60))
    request.num_computed_tokens = 0
    assert policy.level(request, at(62.9)) == level
    assert policy.level(request, at(63.4)) == 0


@given(
    st.lists(st.tuples(st.integers(1, 900), st.integers(0, 80), st.integers(0, 1)), min_size=1, max_size=10),
    st.lists(st.tuples(st.integers(1, 900), st.integers(0, 40), st.integers(0, 1)), min_size=1, max_size=10),
    st.integers(0, 30),
)
def test_mlfq_preempts_lower_levels_only(
    inside: list[tuple[int, int, int]], queue: list[tuple[int, int, int]], free: int
) -> None:
    """Each victim's level is below that of somebody who waits and is of no higher tier: never equal, never above."""
    policy = MLFQ(**PER_TOKEN)
    batch = [running(f"r{i}", prompt, priority=tier) for i, (prompt, _, tier) in enumerate(inside)]
    for request, (_, decodes, _) in zip(batch, inside, strict=True):
        for _ in range(decodes):
            policy.on_scheduled(request, 1, at(0))
    waiting = [asked(f"w{i}", prompt, tenths / 10, priority=tier) for i, (prompt, tenths, tier) in enumerate(queue)]
    ctx = at(4, len(waiting), run=len(batch), free=free, seqs=len(batch))
    waiting.sort(key=lambda request: (request.priority, *policy.waiting_key(request, ctx)))
    victims = policy.select_preemptions(waiting, batch, ctx)
    for victim in victims:
        below = [r for r in waiting if policy.level(r, ctx) < policy.level(victim, ctx)]
        assert any(request.priority <= victim.priority for request in below)
    if all(policy.level(request, ctx) >= policy.level(other, ctx) for request in waiting for other in batch):
        assert not victims


def test_mlfq_takes_the_lowest_level_first() -> None:
    """Of several runners of lower levels, that of the lowest makes way, and it is vLLM's victim too."""
    policy, ctx = MLFQ(**PER_TOKEN), at(0, 1, run=3, free=0, seqs=3)
    batch = [running("deep", 159), running("deeper", 159), running("top", 10)]
    for request, decodes in zip(batch, (3, 9, 0), strict=True):
        for _ in range(decodes):
            policy.on_scheduled(request, 1, ctx)
    assert policy.select_preemptions([asked("new", 50)], batch, ctx) == [batch[1]]
    assert max(batch, key=lambda request: policy.running_key(request, ctx)) is batch[1]


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 150), st.integers(1, 80)), min_size=1, max_size=15),
    st.integers(15, 40),
)
def test_mlfq_serves_all_and_forgets(rows: list[tuple[int, int, int]], blocks: int) -> None:
    """Every burst ends, however much it preempts, and then the policy remembers no request."""
    policy = MLFQ(starvation_s=1)
    replica = Replica(policy, blocks=blocks, seqs=4)
    replica.run(Asked(f"r{i:02}", tenths / 10, prompt, max_tokens=n) for i, (tenths, prompt, n) in enumerate(rows))
    assert len(replica.finished) == len(rows)
    assert not policy._jobs


def test_mlfq_lets_short_answers_pass_long_ones() -> None:
    """A short request that arrives late ends long before the long ones that held all slots, by preemption."""
    replica = Replica(MLFQ(), seqs=2)
    replica.run(
        [Asked("a", 0.0, 10, max_tokens=100), Asked("b", 0.0, 10, max_tokens=100), Asked("s", 1.0, 10, max_tokens=2)]
    )
    assert replica.finished[0] == "s"
    assert replica.choices
