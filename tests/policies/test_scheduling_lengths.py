"""Policies that go by predicted lengths: SRPT with limited preemption, and LTR with its guard against starvation."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.scheduling.capabilities import Follows, OrdersRunning, Preempts
from policies.scheduling.ltr import LTR
from policies.scheduling.srpt import SRPT
from policies.types import Hints
from tests.policies.scheduling_rig import Asked, Replica, context, order, running


def known(name: str, arrival: float, prompt: int, answer: int, **more: Any) -> Asked:
    """A request whose answer's length is hinted and true."""
    return Asked(name, arrival, prompt, max_tokens=answer, hints=Hints(output_tokens=answer), **more)


BURSTS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 150), st.integers(1, 80)), min_size=1, max_size=15).map(
    lambda rows: [known(f"r{i:02}", at / 10, prompt, answer) for i, (at, prompt, answer) in enumerate(rows)]
)
RUNNERS = st.lists(st.tuples(st.integers(1, 600), st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=12)


@given(RUNNERS)
def test_srpt_takes_the_least_remaining(rows: list[tuple[int, int, int]]) -> None:
    """Waiting requests stand by predicted minus generated tokens; one that outlived its prediction has none left."""
    queue = [
        Asked(f"r{i:02}", float(i), prompt, done, hints=Hints(output_tokens=length))
        for i, (prompt, done, length) in enumerate(rows)
    ]
    left = [
        max(0, (r.hints.output_tokens or 0) - r.num_output_tokens)
        for r in order(SRPT(predictor="oracle"), queue, context(9))
    ]
    assert left == sorted(left)


@given(RUNNERS, st.sampled_from([0, 0.2, 0.8, 1]), st.integers(1, 50), st.integers(0, 40))
def test_srpt_never_preempts_past_c(rows: list[tuple[int, int, int]], c: float, shortest: int, free: int) -> None:
    """Victims have generated fewer than c * predicted tokens and have more left than whom they make way for."""
    policy = SRPT(c=c, predictor="oracle")
    assert isinstance(policy, Preempts)
    inside = [
        running(f"r{i:02}", prompt, done, hints=Hints(output_tokens=length))
        for i, (prompt, done, length) in enumerate(rows)
    ]
    queue = [known(f"w{i}", 1_000_000.0, 100, shortest + i) for i in range(5)]
    victims = policy.select_preemptions(queue, inside, context(5, run=len(inside), free=free, seqs=len(inside)))
    for victim in victims:
        length = victim.hints.output_tokens
        assert length is not None
        assert victim.num_output_tokens < c * length
        assert length - victim.num_output_tokens > shortest
    assert not victims or c > 0


@settings(max_examples=50)
@given(BURSTS, st.sampled_from([0, 0.5, 1]))
def test_srpt_serves_all(burst: list[Asked], c: float) -> None:
    """Every burst ends; with c = 0 nothing is preempted by choice."""
    replica = Replica(SRPT(c=c, predictor="oracle"), blocks=24, seqs=4)
    replica.run(burst)
    assert sorted(replica.finished) == sorted(request.request_id for request in burst)
    assert c > 0 or not replica.choices


def test_srpt_preempts_the_young_only() -> None:
    """A short request takes the place of a long one that has just begun, not of one beyond c; c = 0 lets all finish."""
    short = known("short", 1_000_001.0, 50, 5)
    fresh = running("fresh", 159, 79, max_tokens=100)
    ctx = context(1, run=1, free=0, seqs=1)
    assert SRPT(c=0.8).select_preemptions([short], [fresh], ctx) == [fresh]
    fresh.num_output_tokens = 80
    assert SRPT(c=0.8).select_preemptions([short], [fresh], ctx) == []
    assert SRPT(c=1).select_preemptions([short], [fresh], ctx) == [fresh]
    assert SRPT(c=0).select_preemptions([short], [running("new", 159)], ctx) == []


def test_srpt_pins_before_it_ranks() -> None:
    """When blocks run out, the running request with most left among those not pinned goes first."""
    policy, ctx = SRPT(c=0.5, predictor="oracle"), context(0)
    pinned = running("pinned", 10, 100, hints=Hints(output_tokens=200))
    young = running("young", 10, 10, hints=Hints(output_tokens=60))
    younger = running("younger", 10, 1, hints=Hints(output_tokens=90))
    assert isinstance(policy, OrdersRunning)
    batch = sorted([younger, pinned, young], key=lambda request: policy.running_key(request, ctx))
    assert batch == [pinned, young, younger]


@pytest.mark.parametrize(("predictor", "first"), [("oracle", "b"), ("max_tokens", "a")])
@pytest.mark.parametrize("policy", [SRPT, LTR])
def test_the_predictor_decides(policy: Any, predictor: str, first: str) -> None:
    """`oracle` reads the hint, `max_tokens` the limit."""
    queue = [
        Asked("a", 0.0, 10, max_tokens=100, hints=Hints(output_tokens=90)),
        Asked("b", 1.0, 10, max_tokens=200, hints=Hints(output_tokens=20)),
    ]
    assert order(policy(predictor=predictor), queue, context(2))[0].request_id == first


@given(RUNNERS)
def test_ltr_takes_the_shortest_prediction(rows: list[tuple[int, int, int]]) -> None:
    """Nobody starving, the queue stands by predicted length, equal ones by arrival."""
    queue = [known(f"r{i:02}", float(at), 10, length) for i, (at, length, _) in enumerate(rows)]
    expected = sorted(queue, key=lambda r: (r.max_tokens, r.arrival_time, r.request_id))
    assert order(LTR(predictor="oracle"), queue, context(9)) == expected


def overload(policy: Any, steps: int) -> tuple[Replica, list[Asked]]:
    """One slot, one long request, and a new short one in each step: more than the replica can do."""
    replica = Replica(policy, seqs=1)
    requests = [known("long", 0.0, 10, 40)]
    replica.waiting = [requests[0]]
    for i in range(steps):
        requests.append(known(f"s{i:04}", replica.now, 10, 2))
        replica.waiting.append(requests[-1])
        replica.step()
    return replica, requests


@pytest.mark.parametrize(("starvation", "period"), [(20, 5), (50, 10), (7, 1)])
def test_ltr_starvation_guard(starvation: int, period: int) -> None:
    """Under endless overload the longest request gets service once starvation_steps + period steps have passed and
    those idle longer are served; without the guard it never does.
    """
    replica, _ = overload(LTR(starvation_steps=starvation, period=period, predictor="oracle"), 400)
    first = next(i for i, served in enumerate(replica.served) if "long" in served)
    assert starvation <= first <= starvation + period + 2
    unguarded, _ = overload(SRPT(c=0, predictor="oracle"), 400)
    assert not any("long" in served for served in unguarded.served)


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 500)), min_size=1, max_size=20), st.integers(1, 60))
def test_ltr_starved_wait_only_for_those_idle_longer(rows: list[tuple[int, int]], starvation: int) -> None:
    """Whoever has been passed over for starvation_steps is preceded only by requests that arrived before it."""
    policy = LTR(starvation_steps=starvation, period=1, predictor="oracle")
    queue = [known(f"r{i:02}", float(at), 10, length) for i, (at, length) in enumerate(rows)]
    for step in range(120):
        policy.on_step(context(len(queue), now=float(step)))
    here = [request for request in queue if request.arrival_time <= 119]
    for place, request in enumerate(standing := order(policy, here, context(len(queue), now=119.0))):
        if 119 - request.arrival_time >= starvation:
            assert all(ahead.arrival_time <= request.arrival_time for ahead in standing[:place])


def test_ltr_privilege_lasts_a_period() -> None:
    """A starved request keeps the front of the batch for `period` steps of service, also across a preemption."""
    policy = LTR(starvation_steps=3, period=2, predictor="oracle")
    assert isinstance(policy, Follows)
    long, short = known("long", 0.0, 10, 500), known("short", 5.0, 10, 5)
    for step in range(6):
        policy.on_step(context(1, now=float(step)))

    def front() -> str:
        return min((long, short), key=lambda request: policy.running_key(request, context(1, now=6.0))).request_id

    policy.on_scheduled(short, 10, context(1, now=6.0))
    policy.on_scheduled(long, 10, context(1, now=6.0))
    assert front() == "long"
    policy.on_preempted(long, context(1, now=6.0))
    assert order(policy, [short, long], context(2, now=6.0))[0] is long
    policy.on_scheduled(long, 10, context(1, now=7.0))
    assert front() == "short"
    policy.on_preempted(long, context(1, now=7.0))
    assert order(policy, [short, long], context(2, now=7.0))[0] is short


@settings(max_examples=50)
@given(BURSTS, st.integers(15, 40))
def test_ltr_serves_all_and_forgets(burst: list[Asked], blocks: int) -> None:
    """Every burst ends, and then the policy remembers no request."""
    policy = LTR(starvation_steps=5, period=2, predictor="oracle")
    replica = Replica(policy, blocks=blocks, seqs=4)
    replica.run(burst)
    assert sorted(replica.finished) == sorted(request.request_id for request in burst)
    assert not policy._privilege
    assert not policy._idle_since
