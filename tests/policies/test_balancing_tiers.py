"""Balancers that know freeness and tiers: each against its definition, counted slowly, and what tiers promise."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.wire import ReplicaReport
from policies.balancing import BALANCING, SAL, InfaasCost, InfaasPlusPlus, Llumnix, TieredSAL, UsesTiers
from policies.balancing import infaas as infaas_module
from policies.balancing import llumnix as llumnix_module
from policies.balancing import sal as sal_module
from policies.balancing import tiered_sal as tiered_sal_module
from policies.balancing.affinity import home
from policies.fleet import FleetTable
from policies.freeness import freeness
from policies.registry import PolicyError
from policies.tiers import SINGLE, Tiers, decaying_headroom
from policies.types import Call

from .balancing_rig import FEW, MANY, assert_frequencies, chosen, fleet

FOUR = Tiers(decaying_headroom(4), (math.inf,) * 4)
BLOCK, BLOCKS = 16, 1000
NEW = ["infaas_cost", "infaas_pp", "llumnix", "sal", "tiered_sal"]

Load = tuple[int, int, tuple[int, ...], tuple[int, ...], int]
BY_TIER = st.tuples(*[st.integers(0, 2)] * 4)
LOADS = st.lists(
    st.tuples(st.integers(0, BLOCKS), st.integers(0, 9000), BY_TIER, BY_TIER, st.integers(0, 60)),
    min_size=1,
    max_size=12,
)
OWN = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 4000), st.integers(0, 3)), max_size=8)


def report(name: str, load: Load, state: Any = "serving") -> ReplicaReport:
    """Free blocks, queued tokens, requests running and waiting by tier, blocks that the head of the queue wants."""
    free, queued, running, waiting, head = load
    return ReplicaReport(
        *(name, 1, 0.0, state, free, BLOCKS, BLOCK, sum(running), sum(waiting), queued, head, 2048, 64, 0, []),
        running_by_tier=list(running),
        waiting_by_tier=list(waiting),
    )


def table_of(loads: list[Load], own: list[tuple[int, int, int]] = []) -> FleetTable:  # noqa: B006  # never changed
    """A fleet with these loads, and own uncovered calls (replica, prompt tokens, tier) where there is the replica."""
    table = FleetTable()
    for i, load in enumerate(loads):
        table.join(f"r{i}")
        table.apply(report(f"r{i}", load), 0.0)
    for ticket, (replica, tokens, tier) in enumerate(own):
        if replica < len(loads):
            table.dispatch(ticket, f"r{replica}", tokens, tier=tier, now=0.0)
    return table


def made(name: str, tiers: Tiers = FOUR, **parameters: Any) -> Any:
    """A balancing policy that knows the tiers."""
    policy = BALANCING.make(name, **parameters)
    if isinstance(policy, UsesTiers):
        policy.use_tiers(tiers)
    return policy


def allowed(
    loads: list[Load], own: list[tuple[int, int, int]], tier: int, prompt: int, expected: set[int]
) -> list[bool]:
    """Eligibility by its definition: free - headroom of higher tiers present or expected >= whole blocks of prompt."""
    result = []
    for i, (free, _, running, waiting, _) in enumerate(loads):
        mine = [(tokens, p) for replica, tokens, p in own if replica == i]
        room = float(free * BLOCK - sum(tokens for tokens, _ in mine))
        for p in range(tier):
            if running[p] or waiting[p] or p in expected or p in {p for _, p in mine}:
                room -= BLOCKS * BLOCK * FOUR.headroom[p]
        result.append(room >= math.ceil(prompt / BLOCK) * BLOCK)
    return result


@given(LOADS, OWN, st.integers(0, 3), st.integers(0, 9000), st.sets(st.integers(0, 3)), st.integers(0, 2**32))
def test_tiered_sal_is_its_definition(
    loads: list[Load], own: list[tuple[int, int, int]], tier: int, prompt: int, expected: set[int], seed: int
) -> None:
    """A least SAL load among the eligible replicas is chosen; where none is eligible, the freest of all."""
    table, policy, rng = table_of(loads, own), made("tiered_sal", beta=6.47), np.random.default_rng(seed)
    for p in expected:
        policy.choose(table, Call(1, p, 100.0), rng)
    choice = policy.choose(table, Call(prompt, tier, 100.0), rng)
    eligible = allowed(loads, own, tier, prompt, expected)
    if any(eligible):
        sal = SAL(beta=6.47).few_loads(table, prompt)
        assert eligible[choice]
        assert sal[choice] == min(load for load, fits in zip(sal, eligible, strict=True) if fits)
    else:
        freest = made("llumnix").few_loads(table)
        assert freest[choice] == min(freest)


@given(LOADS, OWN, st.integers(0, 9000), st.sets(st.integers(0, 3)))
def test_a_higher_tier_may_go_wherever_a_lower_one_may(
    loads: list[Load], own: list[tuple[int, int, int]], prompt: int, expected: set[int]
) -> None:
    """Raising the tier never makes the set of eligible replicas smaller."""
    table, policy, rng = table_of(loads, own), made("tiered_sal"), np.random.default_rng(0)
    for p in expected | {0}:
        policy.choose(table, Call(1, p, 1.0), rng)
    need, equal = math.ceil(prompt / BLOCK) * BLOCK, [0.0] * len(loads)
    eligible = [
        {i for i, load in enumerate(policy._few_eligible(equal, table, tier, need)) if load == 0} for tier in range(4)
    ]
    assert all(eligible[tier + 1] <= eligible[tier] for tier in range(3))


@given(LOADS, st.integers(0, 9000), st.integers(0, 2**32))
def test_one_tier_is_plain_sal(loads: list[Load], prompt: int, seed: int) -> None:
    """With one tier and room everywhere tiered_sal makes the choices of SAL, call by call, by the same chances."""
    roomy = table_of([(BLOCKS, *load[1:]) for load in loads])
    plain, tiered = SAL(), made("tiered_sal", SINGLE)
    assert chosen(tiered, roomy, 20, seed, prompt) == chosen(plain, roomy, 20, seed, prompt)


@pytest.mark.parametrize("name", NEW)
@given(LOADS, OWN, st.integers(0, 3), st.integers(0, 9000), st.integers(0, 2**32))
def test_few_and_many_choose_alike(
    name: str, loads: list[Load], own: list[tuple[int, int, int]], tier: int, prompt: int, seed: int
) -> None:
    """The list and the array way of computing loads make the same choices, affinity included."""
    table = table_of(loads, own)
    for ticket in range(0, len(own), 2):
        table.complete(ticket, now=1.0 + ticket)
    affinity: dict[str, Any] = {"affinity_tokens": 2000.0} if name in ("sal", "tiered_sal") else {}
    choices = []
    for few in (100, 0):
        policy, rng = made(name, **affinity), np.random.default_rng(seed)
        with pytest.MonkeyPatch.context() as patch:
            for module in (infaas_module, llumnix_module, sal_module, tiered_sal_module):
                patch.setattr(module, "FEW", few)
            calls = [Call(prompt, tier, 1.0, session) for session in (None, 1, 2, 3)]
            choices.append([policy.choose(table, call, rng) for call in [Call(1, 1, 0.5), *calls]])
    assert choices[0] == choices[1]


@pytest.mark.parametrize("name", BALANCING.names())
@settings(max_examples=30)
@given(LOADS, st.data())
def test_only_serving_replicas_are_chosen(name: str, loads: list[Load], data: st.DataObject) -> None:
    """A replica that drains or died is never chosen, however free it is."""
    table = table_of([*loads, (0, 9000, (9,) * 4, (9,) * 4, 60)])
    gone = data.draw(st.sets(st.integers(0, len(loads) - 1)))
    for i in gone:
        state = data.draw(st.sampled_from(["draining", "dead"]))
        table.apply(msgspec.structs.replace(report(f"r{i}", (BLOCKS, 0, (), (), 0), state), seq=2), 0.1)
    policy, rng = made(name), np.random.default_rng(1)
    names = {table.ids[policy.choose(table, Call(100, tier, 1.0), rng)] for tier in range(4) for _ in range(5)}
    assert names.isdisjoint(f"r{i}" for i in gone)


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("width", [FEW, MANY])
def test_an_idle_fleet_is_shared_evenly(name: str, width: int) -> None:
    """On idle replicas each is as likely: no comparison prefers the first of equals."""
    table = fleet([(BLOCKS, 0, 0)] * width)
    assert_frequencies(chosen(made(name), table, 4000), dict.fromkeys(range(width), 1 / width))


@pytest.mark.parametrize("name", NEW)
def test_a_burst_between_reports_is_spread(name: str) -> None:
    """Calls that no report shows yet count at once: a burst goes to all replicas alike."""
    table, policy, rng = fleet([(BLOCKS, 0, 0)] * 4), made(name), np.random.default_rng(3)
    for ticket in range(100):
        choice = policy.choose(table, Call(50, 1, 0.0), rng)
        table.dispatch(ticket, table.ids[choice], 50, tier=1, now=0.0)
    assert table.inflight.tolist() == [25] * 4


@given(LOADS, st.integers(0, 2**32))
def test_llumnix_takes_the_freest(loads: list[Load], seed: int) -> None:
    """The replica with the largest F, headroom of the tiers present included, is chosen."""
    (choice,) = chosen(made("llumnix"), table_of(loads), 1, seed)
    figures = [freeness(report("r", load), FOUR) for load in loads]
    assert figures[choice] == pytest.approx(max(figures))


def test_llumnix_counts_headroom() -> None:
    """Equal memory, equal batch: the replica without a critical request is freer, until tiers keep nothing free."""
    table = table_of([(500, 0, (1, 0), (), 0), (500, 0, (0, 1), (), 0)])
    assert set(chosen(made("llumnix"), table, 20)) == {1}
    assert set(chosen(Llumnix(), table, 20)) == {0, 1}


def test_memory_is_kept_for_a_tier_that_is_expected() -> None:
    """After a critical call background keeps off its headroom, everywhere, for expect_s seconds, and then not."""
    table, rng = table_of([(150, 0, (), (), 0), (400, 9000, (), (), 0)]), np.random.default_rng(0)
    policy = made("tiered_sal", expect_s=60.0)
    background = Call(100, 3, 10.0)
    assert policy.choose(table, background, rng) == 0
    policy.choose(table, Call(100, 0, 11.0), rng)
    for now, choice in ((11.0, 1), (70.9, 1), (71.1, 0)):
        assert policy.choose(table, Call(100, 3, now), rng) == choice
    policy.choose(table, Call(100, 0, 80.0), rng)
    policy.choose(table, Call(100, 0, 130.0), rng)  # seen again: the minute starts anew
    assert policy.choose(table, Call(100, 3, 189.0), rng) == 1
    assert policy.choose(table, Call(100, 3, 191.0), rng) == 0


def test_memory_is_kept_where_a_higher_tier_is() -> None:
    """Without expecting any, background keeps off the headroom of a critical request only where one is."""
    table = table_of([(150, 0, (1,), (), 0), (150, 9000, (), (), 0)])
    assert set(chosen_of_tier(made("tiered_sal", expect_s=0.0), table, 3)) == {1}
    assert set(chosen_of_tier(made("tiered_sal", expect_s=0.0), table, 0)) == {0}


def chosen_of_tier(policy: Any, table: FleetTable, tier: int) -> list[int]:
    """Choices for twenty calls of a tier."""
    rng = np.random.default_rng(0)
    return [policy.choose(table, Call(100, tier, 1.0), rng) for _ in range(20)]


def test_a_prompt_needs_whole_blocks() -> None:
    """A prompt of 17 tokens needs two blocks: where one is free it may not go, however short the queue."""
    table = table_of([(1, 0, (), (), 0), (2, 9000, (), (), 0)])
    policy = made("tiered_sal", beta=0.001)
    assert set(chosen(policy, table, 10, prompt=16)) == {0}
    assert set(chosen(policy, table, 10, prompt=17)) == {1}


@pytest.mark.parametrize("width", [FEW, MANY])
@pytest.mark.parametrize("name", ["sal", "tiered_sal"])
@given(st.integers(0, 2**63), st.integers(0, 20_000), st.integers(0, 2**32))
def test_affinity_is_bounded(name: str, width: int, session: int, bound: int, seed: int) -> None:
    """The session's replica is chosen just when it may be and is at most the bound behind the best."""
    rng = np.random.default_rng(seed)
    table = fleet([(int(rng.integers(300, BLOCKS)), int(rng.integers(0, 30_000)), 0) for _ in range(width)])
    policy = made(name, beta=6.47, affinity_tokens=float(bound))
    choice, own = policy.choose(table, Call(100, 0, 1.0, session), rng), home(session, table)
    loads = SAL(beta=6.47).few_loads(table, 100)
    assert loads[choice] <= min(loads) + bound / 2048
    if bound > 0:
        assert (choice == own) == (loads[own] <= min(loads) + bound / 2048)


def test_affinity_never_breaks_eligibility() -> None:
    """A session whose replica keeps its memory for a higher tier goes elsewhere."""
    table = table_of([(250, 0, (), (), 0)] * 4)
    policy, rng = made("tiered_sal", affinity_tokens=1e6), np.random.default_rng(0)
    own = home(7, table)
    call = Call(2000, 1, 1.0, 7)
    assert policy.choose(table, call, rng) == own
    table.dispatch(1, table.ids[own], 16, tier=0)
    assert policy.choose(table, call, rng) != own
    assert made("tiered_sal").choose(table, Call(2000, 1, 1.0, 7), rng) in range(4)


@given(st.integers(2, 40), st.integers(0, 39), st.integers(0, 2**64))
def test_a_session_moves_only_with_its_replica(width: int, leaves: int, session: int) -> None:
    """When another replica leaves, and the columns change, a session stays; all routers agree on its replica."""
    table = fleet([(1, 0, 0)] * width)
    before = table.ids[home(session, table)]
    gone = f"r{leaves % width}"
    table.leave(gone)
    after = table.ids[home(session, table)]
    assert (after == before) == (gone != before)


def test_sessions_are_spread_evenly() -> None:
    """Sessions have their replicas everywhere alike, whether they are numbered or hashed."""
    table = fleet([(1, 0, 0)] * 10)
    for step in (1, 2**40 + 12345):
        homes = [home(session * step, table) for session in range(4000)]
        assert_frequencies(homes, dict.fromkeys(range(10), 0.1))


@pytest.mark.parametrize("width", [3, MANY])
def test_infaas_cost_on_examples(width: int) -> None:
    """Queue and service add up; a deep queue with slow calls is penalised, and so is a short one with slow calls."""
    table = table_of([(10, 0, (1,), (0, waiting), 0) for waiting in (4, 1, 3)] + [(0, 0, (), (99,), 0)] * (width - 3))
    for i, seconds in enumerate((0.5, 1.25, 2.0)):
        table.dispatch(i, f"r{i}", 10, now=0.0)
        table.complete(i, now=seconds)
    policy = InfaasCost()
    costs = [4 + 0.5, 1 + 1.25 + 0.5, 3 + 2.0 + 1.0]
    assert policy.few_loads(table, 0)[:3] == pytest.approx(costs)
    assert policy.loads(table, 0)[:3] == pytest.approx(costs)
    assert set(chosen(policy, table, 10)) == {1}
    weighed = InfaasCost(alpha=0.0, beta=2.0, gamma=10.0)
    assert weighed.few_loads(table, 0)[:3] == pytest.approx([1.0, 2.5 + 5, 4 + 10])


def test_infaas_cost_scales_by_tier() -> None:
    """Queue and service count 0.1 less per tier above the last, at least half; penalties count in full."""
    table, policy = table_of([(10, 0, (), (2,), 0)]), InfaasCost()
    policy.use_tiers(FOUR)
    assert [policy.few_loads(table, tier)[0] for tier in (0, 1, 3, 9)] == pytest.approx([1.4, 1.6, 2.0, 2.0])
    policy.use_tiers(Tiers((0.0,) * 8, (math.inf,) * 8))
    assert policy.few_loads(table, 0)[0] == pytest.approx(1.0)


def test_infaas_pp_on_examples() -> None:
    """Free memory less what all waiting requests want, per request; own calls count once; idle is best."""
    table = table_of([(100, 400, (1,), (1,), 5), (100, 0, (1,), (), 0), (1, 0, (), (), 0)])
    policy = InfaasPlusPlus()
    assert policy.few_loads(table) == [-(1600 - 400) / 2, -1600.0, -math.inf]
    assert policy.loads(table).tolist() == policy.few_loads(table)
    table.dispatch(1, "r2", 100)
    assert policy.few_loads(table)[2] == -(16 - 100)
    assert set(chosen(policy, table, 5)) == {1}


def test_tiered_sal_learns_like_sal() -> None:
    """Its beta follows the traffic."""
    plain, tiered = SAL(), TieredSAL()
    for policy in (plain, tiered):
        for _ in range(300):
            policy.observe(2000, 20)
    assert tiered.beta == plain.beta > 7


@pytest.mark.parametrize(
    ("name", "field"),
    [
        *(("tiered_sal", field) for field in ("expect_s", "affinity_tokens")),
        *(("infaas_cost", field) for field in ("alpha", "beta", "gamma", "overloaded_s", "interfered_s")),
        ("sal", "affinity_tokens"),
    ],
)
def test_parameters_below_zero_are_refused(name: str, field: str) -> None:
    """A negative weight, time or bound is refused by its name; 0 is allowed."""
    with pytest.raises(PolicyError, match="must be a number >= 0") as refusal:
        BALANCING.make(name, **{field: -1})
    assert refusal.value.field == field
    assert BALANCING.make(name, **{field: 0}).name == name
