"""Tiers in the router: who is served first when calls wait, what the policy is told, what the fleet is said to have."""

from __future__ import annotations

import asyncio
import math
from contextlib import closing
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.routing import NoReplicaError, WaitingLine
from policies.balancing import InfaasCost, TieredSAL
from policies.tiers import SINGLE, Tiers

from .router_rig import Fleet

TIERS: dict[str, Any] = {"headroom": [0.2, 0.1, 0.0], "aging_s": [30, 30.0, None], "ttft_slo_s": [1, None, None]}
TIERED = {"policy": "tiered_sal"}


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=4))
def test_the_line_goes_by_tier_then_by_arrival(tiers: list[int], late: list[int]) -> None:
    """Waiting calls go highest tier first, then first come first served; one that comes meanwhile overtakes only lower
    tiers."""
    order: list[tuple[int, int]] = []

    async def scenario() -> None:
        opened = False
        line = WaitingLine(lambda: opened)

        async def call(tier: int, arrival: int) -> None:
            await line.turn(tier, 5)
            order.append((tier, arrival))

        calls = [asyncio.create_task(call(tier, i)) for i, tier in enumerate(tiers)]
        await asyncio.sleep(0)
        calls += [asyncio.create_task(call(tier, len(tiers) + i)) for i, tier in enumerate(late)]
        opened = True
        line.advance()
        await asyncio.gather(*calls)
        await asyncio.wait_for(line.turn(3, 5), 1)  # nobody waits: at once

    asyncio.run(scenario())
    assert len(order) == len(tiers) + len(late)
    waited = [call for call in order if call[1] < len(tiers)]
    assert waited == sorted(waited)
    for i, (tier, arrival) in enumerate(order):
        if arrival >= len(tiers):
            assert all(overtaken > tier for overtaken, before in order[i:] if before < len(tiers))


def test_who_gives_up_lets_the_next_go() -> None:
    """A waiting call that is cancelled or runs out of time, even when it is just being called up, blocks nobody."""

    async def scenario() -> None:
        opened = False
        line = WaitingLine(lambda: opened)
        first, second, third = (asyncio.create_task(line.turn(tier, 5)) for tier in (0, 1, 2))
        with pytest.raises(TimeoutError):
            await line.turn(0, 0.01)
        opened = True
        line.advance()
        first.cancel()
        await asyncio.wait_for(asyncio.gather(second, third), 1)
        assert first.cancelled()

    asyncio.run(scenario())


def test_the_line_closes_again() -> None:
    """A replica that leaves before its first call was placed keeps everybody waiting for the next one."""

    async def scenario() -> None:
        opened = False
        line = WaitingLine(lambda: opened)
        call = asyncio.create_task(line.turn(0, 5))
        await asyncio.sleep(0)
        opened = True
        line.advance()
        opened = False
        await asyncio.sleep(0.01)
        assert not call.done()
        opened = True
        line.advance()
        await asyncio.wait_for(call, 1)

    asyncio.run(scenario())


def test_waiting_calls_are_placed_by_tier() -> None:
    """When a replica appears, or serves again, the calls that wait in this router are booked highest tier first."""

    async def scenario() -> None:
        with closing(Fleet(wait_s=5.0, tiers=TIERS)) as fleet:
            placed: list[int] = []

            async def call(ticket: int, tier: int) -> None:
                await fleet.pick(ticket=ticket, prompt_tokens=10, tier=tier)
                placed.append(ticket)

            for appear in (lambda: fleet.set("a"), lambda: fleet.report("a")):
                placed.clear()
                calls = [asyncio.create_task(call(ticket, tier)) for ticket, tier in enumerate([2, 1, 0, 99, 1, 0])]
                await asyncio.sleep(0.02)
                assert not placed
                appear()
                await asyncio.gather(*calls)
                assert placed == [2, 5, 1, 4, 0, 3]
                fleet.report("a", state="draining")
            fleet.router._wait_for_replica_s = 0.01
            with pytest.raises(NoReplicaError):
                await fleet.pick(tier=0)

    asyncio.run(scenario())


def tiers_of(fleet: Fleet, kind: type) -> Tiers:
    """What the router's policy, of this kind, knows of the tiers."""
    assert type(fleet.router.policy) is kind
    return cast(Tiers, cast(Any, fleet.router.policy)._tiers)


def test_policies_are_told_the_tiers() -> None:
    """The policy knows the tiers from the start and after each live change; without a spec there is one tier."""

    async def scenario() -> None:
        with closing(Fleet("a", balancing=TIERED, tiers=TIERS)) as fleet:
            assert tiers_of(fleet, TieredSAL).headroom == (0.2, 0.1, 0.0)
            assert tiers_of(fleet, TieredSAL).aging_s == (30, 30, math.inf)
            fleet.report("a", settings={"policy": "infaas_cost"}, settings_t=1.0)
            assert len(tiers_of(fleet, InfaasCost)) == 3
            fleet.report("a", settings={**TIERED, "expect_s": 5}, settings_t=2.0)
            assert len(tiers_of(fleet, TieredSAL)) == 3
        with closing(Fleet("a", balancing=TIERED)) as fleet:
            assert tiers_of(fleet, TieredSAL) == SINGLE

    asyncio.run(scenario())


def test_headroom_turns_lower_tiers_away() -> None:
    """A replica whose free memory is the headroom of a higher tier that runs there gets calls of that tier only."""

    async def scenario() -> None:
        with closing(Fleet("kept", "queue", balancing=TIERED, tiers=TIERS)) as fleet:
            fleet.report("kept", free_blocks=15, running=1, running_by_tier=[1])
            fleet.report("queue", free_blocks=60, queued_tokens=4000)
            assert {await fleet.pick(prompt_tokens=100, tier=2) for _ in range(10)} == {"queue"}
            assert {await fleet.pick(prompt_tokens=100, tier=0) for _ in range(10)} == {"kept"}

    asyncio.run(scenario())


def test_own_calls_carry_their_tier() -> None:
    """A call on its way makes its tier present on its replica until it ends; its seconds are remembered."""

    async def scenario() -> None:
        with closing(Fleet("a", tiers=TIERS)) as fleet:
            fleet.report("a")
            await fleet.pick(ticket=1, prompt_tokens=10, tier=1)
            assert fleet.router.table.tier_tokens[:3, 0].tolist() == [0, 1600, 0]
            await asyncio.sleep(0.02)
            fleet.complete("a")
            assert fleet.router.table.tier_tokens[:3, 0].tolist() == [0, 0, 0]
            assert 0.02 <= fleet.router.table.service_s[0] < 5

    asyncio.run(scenario())


def test_sessions_stay_on_their_replica() -> None:
    """With affinity the calls of a session go to one replica, in every router; without a session they go anywhere."""

    async def scenario() -> None:
        names = [f"r{i}" for i in range(6)]
        settings = {**TIERED, "affinity_tokens": 1000}
        with closing(Fleet(*names, balancing=settings)) as one, closing(Fleet(*names[::-1], balancing=settings)) as two:
            for fleet in (one, two):
                for name in names:
                    fleet.report(name)
            for session in range(5):
                homes = {await fleet.pick(session=session, prompt_tokens=9) for fleet in (one, two) for _ in range(5)}
                assert len(homes) == 1
            assert len({await one.pick(prompt_tokens=9) for _ in range(60)}) > 1

    asyncio.run(scenario())


def test_freeness_of_each_replica() -> None:
    """F and F_normal in blocks per running request and phi, by the last report; idle is inf, draining -inf."""

    async def scenario() -> None:
        with closing(Fleet("a", "idle", "drains", "silent", tiers=TIERS)) as fleet:
            fleet.report("a", free_blocks=60, running=4, head_blocks=8, waiting=1, running_by_tier=[0, 4])
            fleet.report("idle")
            fleet.report("drains", state="draining")
            figures = fleet.router.freeness()
            assert figures["a"] == pytest.approx({"F": (60 - 8 - 10) / 4, "F_normal": 13, "phi": 10.5 * 64 / 100})
            assert set(figures["idle"].values()) == {math.inf}
            assert set(figures["drains"].values()) == {-math.inf}
            assert "silent" not in figures

    asyncio.run(scenario())
