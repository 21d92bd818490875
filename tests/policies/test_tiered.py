"""Tiers around a policy: the order, what aging means, and who makes way for whom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.scheduling import FCFS, SCHEDULING
from policies.scheduling.capabilities import (
    BudgetsTokens,
    Follows,
    GatesAdmission,
    HoldsBack,
    OrdersRunning,
    Preempts,
    PrefillsFirst,
)
from policies.scheduling.inversion import blocks_of, displaced, in_the_way, without
from policies.scheduling.tiered import TICKS, Tiered
from policies.tiers import Tiers
from policies.types import SchedulerContext

from .scheduling_rig import Asked, context, order, running

NOW = 1_000_100.0
AGING = Tiers((0.0,) * 4, (math.inf, 30.0, 20.0, 10.0))
STRICT = Tiers((0.0,) * 4, (math.inf,) * 4)


def waiting(name: str, tier: int, waited: float = 0.0, prompt: int = 100, **more: Any) -> Asked:
    return Asked(name, NOW - waited, prompt, priority=tier, **more)


@pytest.mark.parametrize("policy", SCHEDULING.names())
def test_the_wrapper_can_what_the_policy_can(policy: str) -> None:
    """Gate, budget and prefill-first are there exactly if the policy has them; order, victims and hooks always."""
    inner = SCHEDULING.make(policy)
    tiered = Tiered(inner, AGING)
    for capability in (GatesAdmission, BudgetsTokens, PrefillsFirst):
        assert isinstance(tiered, capability) == isinstance(inner, capability)
    assert all(isinstance(tiered, capability) for capability in (OrdersRunning, Preempts, HoldsBack, Follows))
    assert (tiered.name, tiered.reorders) == (policy, True)


REQUESTS = st.lists(
    st.builds(
        lambda tier, waited, prompt, preempted: (tier, waited, prompt, preempted),
        st.integers(0, 3),
        st.floats(0, 100),
        st.integers(1, 500),
        st.integers(0, 1),
    ),
    max_size=12,
)


@given(REQUESTS, st.sampled_from(["fcfs", "larry", "guarded_larry", "srpt"]))
def test_order_is_by_effective_tier_and_then_the_policys(made: list[tuple[int, float, int, int]], policy: str) -> None:
    """The queue is ascending in effective tiers, and within one it is the policy's own order."""
    tiered, ctx = Tiered(SCHEDULING.make(policy), AGING), context(len(made))
    queue = [waiting(f"r{i}", t, w, p, num_preemptions=n) for i, (t, w, p, n) in enumerate(made)]
    ordered = order(tiered, queue, ctx)
    tiers = [tiered.effective(r, ctx) for r in ordered]
    assert tiers == sorted(tiers)
    for tier in set(tiers):
        peers = [r for r in queue if tiered.effective(r, ctx) == tier]
        own = order(tiered.policy, peers, ctx)
        if policy == "fcfs":  # vLLM's own queue has preempted requests in front
            own.sort(key=lambda r: r.num_preemptions == 0)
        assert [r for r in ordered if r in peers] == own


def test_only_waiting_ages() -> None:
    """Seconds in the batch are not waiting; those before and after count together; nobody is younger than new."""
    tiered, ctx = Tiered(FCFS(), AGING), context(1)
    request = waiting("a", 3, waited=0.0)

    def effective_at(now: float) -> int:
        return tiered.effective(request, replace(ctx, now=NOW + now))

    assert [effective_at(s) for s in (-5, 0, 9.9, 10, 20)] == [3, 3, 3, 2, 1]
    tiered.on_scheduled(request, 10, replace(ctx, now=NOW + 10))
    tiered.on_scheduled(request, 1, replace(ctx, now=NOW + 90))
    assert tiered.running_key(request, ctx)[0] == 2
    tiered.on_preempted(request, replace(ctx, now=NOW + 110))
    assert [effective_at(s) for s in (110, 119.9, 120, 130)] == [2, 2, 1, 0]
    tiered.on_finished(request)
    assert effective_at(110) == 0


@given(st.floats(0, 1e4), st.floats(0, 40))
def test_the_order_notices_aging_within_a_sixteenth(start: float, later: float) -> None:
    """Two moments further apart than min(aging_s) / 16 have different epochs; without aging there is one for ever."""
    tiered, strict = Tiered(FCFS(), AGING), Tiered(FCFS(), STRICT)
    before, after = context(0, now=NOW + start), context(0, now=NOW + start + later)
    if later > 10.0 / TICKS + 1e-6:
        assert tiered.order_epoch(before) != tiered.order_epoch(after)
    assert strict.order_epoch(before) == strict.order_epoch(after)


def test_running_requests_are_ordered_by_the_tier_of_their_admission() -> None:
    """The tail, which is preempted first, is the lowest tier and in it the last admitted, or the policy's own tail."""
    ctx = context(0)
    batch = [running(f"r{i}", 50, arrival=NOW - i, priority=tier) for i, tier in enumerate((3, 0, 2, 3, 0))]
    tiered = Tiered(FCFS(), STRICT)
    for request in batch:
        tiered.on_scheduled(request, 50, ctx)
    assert [r.request_id for r in sorted(batch, key=lambda r: tiered.running_key(r, ctx))] == "r1 r4 r2 r0 r3".split()
    srpt = Tiered(SCHEDULING.make("srpt"), STRICT)
    keys = [srpt.running_key(request, ctx) for request in batch]
    assert keys == [(r.priority, *srpt.policy.running_key(r, ctx)) for r in batch]  # type: ignore[attr-defined]


class Everyone(FCFS):
    """Wants to preempt all that it sees, and remembers what that was."""

    def select_preemptions(
        self, waiting: Sequence[Asked], running: Sequence[Asked], ctx: SchedulerContext
    ) -> Sequence[Asked]:
        self.seen = ([r.request_id for r in waiting], [r.request_id for r in running], ctx)
        return list(running)


def test_a_policys_own_victims_are_of_the_tier_at_the_head() -> None:
    """The policy sees the tier at the head of the queue only, in a replica as large as the others leave it."""
    policy = Everyone()
    tiered, ctx = Tiered(policy, STRICT), context(4, total=100, free=10, run=4, seqs=6)
    batch = [running(f"r{i}", 160, priority=tier) for i, tier in enumerate((0, 1, 1, 2))]
    for request in batch:
        tiered.on_scheduled(request, 160, ctx)
    queue = [waiting("a", 1), waiting("b", 1), waiting("c", 2), waiting("d", 3)]
    victims = tiered.select_preemptions(queue, batch, ctx)
    waiters, runners, view = policy.seen
    assert (waiters, runners) == (["a", "b"], ["r1", "r2"])
    assert (view.num_waiting, view.num_running, view.max_num_seqs, view.total_blocks) == (2, 2, 4, 80)
    assert {r.request_id for r in victims[:2]} == {"r1", "r2"}
    assert all(r.priority > 1 for r in victims[2:])


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 400), st.integers(0, 3)), max_size=10),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 400)), min_size=1, max_size=6),
    st.integers(0, 20),
    st.integers(0, 3),
    st.integers(1, 1000),
)
def test_as_few_as_do_make_way_and_only_for_higher_tiers(
    held: list[tuple[int, int, int]], asked: list[tuple[int, int]], free: int, seats: int, budget: int
) -> None:
    """Who is displaced runs at a lower tier than a request that enters by it, none is superfluous, none in vain."""
    batch = [running(f"r{i}", size, priority=tier) for i, (tier, size, _) in enumerate(held)]
    tier_of = {f"r{i}": max(0, tier - lifted) for i, (tier, _, lifted) in enumerate(held)}
    queue = [waiting(f"w{i}", tier, prompt=size) for i, (tier, size) in enumerate(asked)]
    ctx = context(len(queue), free=free, run=len(batch), seqs=len(batch) + seats, budget=budget)
    gone = displaced(queue, batch, tier_of, None, ctx)

    def entering(leaving: Sequence[Asked]) -> int:
        room, slots = free + blocks_of(leaving, ctx), seats + len(leaving)
        for number, request in enumerate(queue):
            room, slots = room - ctx.blocks(request.num_tokens), slots - 1
            if room < 0 or slots < 0:
                return number
        return len(queue)

    assert len({r.request_id for r in gone}) == len(gone)
    assert without(batch, gone) == [r for r in batch if r not in gone]
    enter = entering(gone)
    assert bool(gone) <= (enter > entering(()))
    for victim in gone:
        assert any(tier_of[victim.request_id] > request.priority for request in queue[:enter])
    if len(queue) == 1:
        for victim in gone:
            assert entering(without(gone, (victim,))) == 0
        lower = [r for r in batch if tier_of[r.request_id] > queue[0].priority]
        assert enter or not entering(lower)
        spared = [tier_of[r.request_id] for r in without(lower, gone) if ctx.blocks(r.num_computed_tokens) >= 25]
        assert not gone or all(tier_of[v.request_id] >= max(spared, default=0) for v in gone)


def test_the_cheapest_of_the_lowest_tier_makes_way_for_a_slot() -> None:
    """For a sequence slot one request leaves: of the lowest tier the one with fewest tokens to compute again."""
    batch = [running(n, p, priority=t) for n, p, t in (("a", 10, 2), ("b", 90, 3), ("c", 40, 3), ("d", 5, 1))]
    tier_of = {r.request_id: r.priority for r in batch}
    ctx = context(1, run=4, seqs=4)
    assert displaced([waiting("w", 0)], batch, tier_of, None, ctx) == [batch[2]]
    assert displaced([waiting("w", 3)], batch, tier_of, None, ctx) == []
    assert displaced([waiting("w", 1), waiting("v", 0)], batch, tier_of, None, ctx) == [batch[2], batch[1]]
    assert displaced([waiting("w", 0)], batch, {**tier_of, "b": 0, "c": 0}, None, ctx) == [batch[0]]


def test_nobody_leaves_beside_one_whose_leaving_is_enough() -> None:
    """A small runner is spared where a larger one must leave anyway and frees enough blocks."""
    small, large = running("small", 16, priority=3), running("large", 400, priority=3)
    queue = [waiting("w", 0, prompt=300)]
    assert displaced(queue, [small, large], {"small": 3, "large": 3}, None, context(1, free=2, run=2)) == [large]


def test_a_grace_spares_runners_until_the_request_has_waited_so_long() -> None:
    """With room elsewhere nobody is sent back for a request that came less than its grace ago; then as ever.

    What the policy preempts within its own tier has nothing to do with it.
    """
    tiered, batch = Tiered(FCFS(), STRICT), [running("low", 100, priority=3)]
    plain = context(1, run=1, seqs=1)
    tiered.on_scheduled(batch[0], 100, plain)
    for grace_s, waited, leaving in ((0.0, 0.0, batch), (0.5, 0.0, []), (0.5, 0.4, []), (0.5, 0.6, batch)):
        ctx = replace(plain, grace_s=grace_s)
        assert list(tiered.select_preemptions([waiting("high", 0, waited=waited)], batch, ctx)) == leaving
    own = Tiered(SCHEDULING.make("larry_preemptive"), STRICT)
    peers = [running("peer", 900, output=1, priority=0)]
    own.on_scheduled(peers[0], 900, plain)
    queue = [waiting("old", 0, waited=10.0, prompt=10), waiting("new", 0, prompt=10)]
    assert own.select_preemptions(queue, peers, replace(plain, grace_s=60.0)) == own.select_preemptions(
        queue, peers, plain
    )


def test_a_gate_counts_as_lack_of_room() -> None:
    """Where the policy's gate holds a higher tier back, lower ones make way until it opens."""
    policy = SCHEDULING.make("no_preempt")
    tiered, ctx = Tiered(policy, STRICT), context(1, total=100, free=60, run=2)
    batch = [running(n, 100, priority=t, max_tokens=600) for n, t in (("a", 1), ("b", 3))]
    for request in batch:
        tiered.on_scheduled(request, 100, ctx)
    assert tiered.select_preemptions([waiting("w", 0, max_tokens=600)], batch, ctx) == [batch[1]]
    assert tiered.select_preemptions([waiting("w", 0, max_tokens=60)], batch, ctx) == []


def test_a_new_policy_takes_over_what_the_tiers_knew() -> None:
    """After a change of policy a runner keeps the tier of its admission and a waiting request its time in the batch."""
    ctx = context(0)
    before, after = Tiered(FCFS(), AGING), Tiered(FCFS(), AGING)
    lifted, ran = waiting("lifted", 3, waited=20.0), waiting("ran", 3, waited=0.0)
    before.on_scheduled(lifted, 1, ctx)
    before.on_scheduled(ran, 1, ctx)
    before.on_preempted(ran, replace(ctx, now=NOW + 500))
    after.take_over(before)
    later = replace(ctx, now=NOW + 505)
    assert after.running_key(lifted, later)[0] == 1
    assert after.effective(ran, later) == 3


def test_prompts_of_lower_tiers_are_held_back_for_a_head_that_can_enter() -> None:
    """Only runners of lower tiers that are still in their prompts; nobody if the head finds no slot or no blocks."""
    batch = [
        running("decoding", 100, priority=3),
        replace(running("in-prompt", 100, priority=3), num_computed_tokens=40),
        replace(running("equal", 100, priority=1), num_computed_tokens=40),
    ]
    tier_of = {r.request_id: r.priority for r in batch}
    head = waiting("head", tier=1)
    assert [r.request_id for r in in_the_way(head, batch, tier_of, context(1, run=3, seqs=4))] == ["in-prompt"]
    assert in_the_way(head, batch, tier_of, context(1, run=3, seqs=3)) == []
    assert in_the_way(head, batch, tier_of, context(1, run=3, seqs=4, free=1)) == []
