"""Who makes way for whom: the greedy choice of victims, and preemptive LARRY."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.scheduling import SCHEDULING
from policies.scheduling.capabilities import Preempts
from policies.scheduling.larry import Larry
from policies.scheduling.larry_preemptive import LarryPreemptive
from policies.scheduling.preemption import make_room
from policies.types import Request, SchedulerContext
from tests.policies.scheduling_rig import Asked, context, order, running

ROWS = st.tuples(st.integers(0, 800), st.integers(1, 1500), st.integers(0, 300), st.integers(0, 2))
PREEMPTING: list[tuple[str, dict[str, Any]]] = [
    ("larry_preemptive", {"hysteresis": 0}),
    ("larry_preemptive", {"alpha": 500, "max_victims": 8}),
    ("srpt", {"c": 1}),
    ("srpt", {}),
    ("mlfq", {}),
]


@st.composite
def situations(draw: Any) -> tuple[list[Asked], list[Asked], SchedulerContext]:
    """A batch, a queue, and a replica whose blocks and slots are just about used up."""
    inside = [
        running(f"r{i:02}", prompt, 1 + output, 1_000_000 + at / 8, priority=tier)
        for i, (at, prompt, output, tier) in enumerate(draw(st.lists(ROWS, max_size=12)))
    ]
    queue = [
        Asked(f"w{i:02}", 1_000_000 + at / 8, prompt, output, priority=tier)
        for i, (at, prompt, output, tier) in enumerate(draw(st.lists(ROWS, min_size=1, max_size=12)))
    ]
    seqs = len(inside) + draw(st.integers(0, 3))
    free, budget = draw(st.integers(0, 120)), draw(st.sampled_from([16, 512, 4096]))
    return queue, inside, context(len(queue), run=len(inside), free=free, seqs=max(seqs, 1), budget=budget)


@given(st.sampled_from(PREEMPTING), situations())
def test_victims_make_room_and_are_no_better(choice: tuple[str, dict[str, Any]], situation: Any) -> None:
    """Victims are few and distinct runners, each of no higher tier than somebody who waits, and who waits first then
    fits: nobody makes way in vain.
    """
    policy = SCHEDULING.make(choice[0], **choice[1])
    assert isinstance(policy, Preempts)
    queue, inside, ctx = situation
    queue.sort(key=lambda request: (request.priority, *policy.waiting_key(request, ctx)))
    victims = policy.select_preemptions(queue, inside, ctx)
    names = [victim.request_id for victim in victims]
    assert len(set(names)) == len(names)
    assert set(names) <= {request.request_id for request in inside}
    if victims:
        owed = sum(ctx.blocks(r.num_tokens) - ctx.blocks(r.num_computed_tokens) for r in inside)
        freed = sum(ctx.blocks(victim.num_tokens) for victim in victims)
        assert ctx.blocks(queue[0].num_tokens) <= ctx.free_blocks - owed + freed
        assert len(inside) - len(victims) < ctx.max_num_seqs
        assert min(victim.priority for victim in victims) >= queue[0].priority
        assert len(victims) <= getattr(policy, "max_victims", len(inside))


@given(st.sampled_from(PREEMPTING), situations())
def test_nobody_makes_way_where_there_is_room(choice: tuple[str, dict[str, Any]], situation: Any) -> None:
    """With free slots and blocks for all, and equally with no token left in the step, nothing is preempted."""
    policy = SCHEDULING.make(choice[0], **choice[1])
    assert isinstance(policy, Preempts)
    queue, inside, _ = situation
    roomy = context(len(queue), run=len(inside), free=4000, budget=100_000)
    spent = context(len(queue), run=len(inside), free=0, seqs=1, budget=len(inside))
    for ctx in (roomy, spent):
        queue.sort(key=lambda request: policy.waiting_key(request, ctx))
        assert not policy.select_preemptions(queue, inside, ctx)


def test_room_is_made_head_by_head() -> None:
    """The queue's front gets the last candidates; who would still not fit takes nobody's place."""
    inside = [running("a", 159), running("b", 159), running("c", 159)]  # 10 blocks each, all allotted
    ctx = context(2, run=3, free=0, seqs=8)
    anyone = lambda waiting, runner: True  # noqa: E731
    small, big = Asked("small", 0.0, 100), Asked("big", 0.0, 16 * 21)
    assert make_room([small], inside, inside, ctx, anyone) == [inside[2]]
    # 10 + 10 - 7 - 7 blocks are left when big's turn comes: even a's would not do.
    assert make_room([small, small, big], inside, inside, ctx, anyone) == [inside[2], inside[1]]
    assert make_room([big], inside, inside, ctx, anyone) == [inside[2], inside[1], inside[0]]
    assert make_room([big], inside, inside, ctx, anyone, limit=2) == []
    assert make_room([small], inside, inside, ctx, lambda waiting, runner: runner is inside[0]) == [inside[0]]
    assert make_room([small], inside, inside[:2], ctx, anyone) == [inside[1]]


def test_slots_are_room_too() -> None:
    """A full batch makes way although blocks are free, and what runners still need for their prompts is not free."""
    ctx = context(1, run=2, free=50, seqs=2)
    inside = [running("a", 100), running("b", 100)]
    short = Asked("short", 0.0, 100)
    assert make_room([short], inside, inside, ctx, lambda w, r: True) == [inside[1]]
    half = Asked("half", 0.0, 800, num_computed_tokens=160)  # needs 40 more blocks
    owing = context(1, run=1, free=45, seqs=2)
    assert make_room([short], [half], [half], owing, lambda w, r: True) == [half]


def test_a_tier_is_never_displaced_by_a_lower_one() -> None:
    """However well it ranks, a request of tier 1 takes no place from tier 0, but one from tier 1 or 2."""
    inside = [running("top", 159, priority=0), running("equal", 159, priority=1), running("low", 159, priority=2)]
    ctx = context(1, run=3, free=0)
    head = Asked("head", 0.0, 160, priority=1)
    assert make_room([head], inside, inside, ctx, lambda w, r: True) == [inside[2]]
    assert make_room([head], inside, inside[:2], ctx, lambda w, r: True) == [inside[1]]
    assert make_room([head], inside, inside[:1], ctx, lambda w, r: True) == []


class Counted:
    """A request that counts how often it is looked at."""

    def __init__(self, request: Asked, looks: Counter[str]) -> None:
        self._request, self._looks = request, looks

    def __getattr__(self, name: str) -> Any:
        self._looks[name] += 1
        return getattr(self._request, name)


@pytest.mark.parametrize(("name", "parameters"), PREEMPTING)
def test_choosing_victims_costs_linear_work(name: str, parameters: dict[str, Any]) -> None:
    """256 runners and 2,000 waiting: each runner is looked at some times, of the queue no more than what may enter."""
    policy, looks = SCHEDULING.make(name, **parameters), Counter[str]()
    assert isinstance(policy, Preempts)
    inside: Any = [Counted(running(f"r{i}", 900, 1, float(i)), looks) for i in range(256)]
    queue: Any = [Counted(Asked(f"w{i}", 1000.0 + i, 10, max_tokens=4), looks) for i in range(2000)]
    policy.select_preemptions(queue, inside, context(2000, run=256, free=0, seqs=256, budget=8192))
    assert sum(looks.values()) < 30 * (256 + 256)


@given(st.lists(ROWS, min_size=1, max_size=20), st.integers(0, 3000))
def test_larry_preemptive_queues_as_larry(rows: list[tuple[int, int, int, int]], q: int) -> None:
    """Waiting requests stand as in LARRY without preempted ones first: a victim does not return to the head."""
    requests = [
        Asked(f"r{i:02}", at / 8, prompt, out, num_preemptions=n) for i, (at, prompt, out, n) in enumerate(rows)
    ]
    plain = Larry(preempted_first=False)
    assert order(LarryPreemptive(), requests, context(q)) == order(plain, requests, context(q))


@given(situations(), st.integers(0, 100), st.integers(1, 4))
def test_larry_preemptive_limits(situation: Any, max_age: int, max_victims: int) -> None:
    """At most max_victims a step, none that generated more than max_age_tokens, and only for a clearly better score."""
    queue, inside, ctx = situation
    policy = LarryPreemptive(max_age_tokens=max_age, max_victims=max_victims, hysteresis=0.5)
    queue.sort(key=lambda request: (request.priority, *policy.waiting_key(request, ctx)))
    victims = policy.select_preemptions(queue, inside, ctx)

    def score(request: Request) -> float:
        return ctx.now - request.arrival_time - ctx.num_waiting * policy.memory(request.num_tokens, ctx)

    assert len(victims) <= max_victims
    for victim in victims:
        assert victim.num_output_tokens <= max_age
        lead = max(score(request) for request in queue) - score(victim)
        assert lead > 0.5 * ctx.num_waiting * policy.memory(victim.num_tokens, ctx)


def test_larry_preemptive_spares_progress() -> None:
    """Of young requests the one with least computed tokens makes way; it is vLLM's victim too when blocks run out."""
    policy = LarryPreemptive()
    begun = Asked("begun", 1_000_000.0, 2000, num_computed_tokens=64)
    inside = [begun, running("far", 2000), running("old", 2000, 40)]
    ctx = context(10, run=3, seqs=3, free=200)
    assert policy.select_preemptions([Asked("small", 1_000_001.0, 10)], inside, ctx) == [begun]
    assert max(inside, key=lambda request: policy.running_key(request, ctx)) is begun
