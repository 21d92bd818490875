"""FleetRouter: decisions follow policy and reports, the ledger closes each call once, the lost leave at once."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from deployments.routing import NoReplicaError, find_router
from policies.balancing.sal import SAL

from .router_rig import ENGINES, Fleet


def test_decisions_follow_the_reports(run: Any) -> None:
    """A call goes where the newest reports say that fewest requests are."""

    async def scenario() -> None:
        fleet = Fleet("a", "b", "c")
        for name, running in {"a": 5, "b": 1, "c": 9}.items():
            fleet.report(name, running=running)
        assert await fleet.pick() == "b"
        fleet.report("b", running=3, waiting=7)
        assert await fleet.pick() == "a"

    run(scenario)


def test_own_calls_count_until_a_report_covers_them(run: Any) -> None:
    """Calls sent since the last report are added to it, and no longer once a report names their tickets."""

    async def scenario() -> None:
        fleet = Fleet("a", "b")
        fleet.report("a", running=0)
        fleet.report("b", running=3)
        assert [await fleet.pick(ticket=t, prompt_tokens=10) for t in (1, 2, 3)] == ["a"] * 3
        requests = dict(zip(fleet.router.table.ids, fleet.router.table.requests, strict=True))
        assert requests == {"a": 3, "b": 3}
        fleet.report("a", running=3, admitted=[1, 2, 3])
        requests = dict(zip(fleet.router.table.ids, fleet.router.table.requests, strict=True))
        assert requests == {"a": 3, "b": 3}
        assert fleet.inflight() == {"a": 3, "b": 0}

    run(scenario)


def test_sal_is_chosen_by_name(run: Any) -> None:
    """Under `sal` a call goes to the replica with memory for it, although the other one has fewer requests."""

    async def scenario() -> None:
        fleet = Fleet("full", "busy", balancing={"policy": "sal", "beta": 6.5})
        fleet.report("full", running=1, free_blocks=0)
        fleet.report("busy", running=30, free_blocks=90, queued_tokens=512)
        assert {await fleet.pick(prompt_tokens=200) for _ in range(10)} == {"busy"}

    run(scenario)


def test_no_replica_after_a_wait(run: Any) -> None:
    """Without an eligible replica a call waits `wait_for_replica_s`, then raises; one that appears gets it."""

    async def scenario() -> None:
        fleet = Fleet(wait_s=0.2)
        started = time.monotonic()
        with pytest.raises(NoReplicaError):
            await fleet.pick()
        assert time.monotonic() - started >= 0.2
        fleet.router._wait_for_replica_s = 5.0
        waiting = asyncio.create_task(fleet.pick())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        fleet.set("late")
        assert await asyncio.wait_for(waiting, 2) == "late"

    run(scenario)


def test_sibling_calls_are_closed_once_each(run: Any) -> None:
    """Calls of one HTTP request share its internal id: each completion closes one entry, further ones none."""

    async def scenario() -> None:
        fleet = Fleet("a")
        await asyncio.gather(*(fleet.pick(ticket=t, prompt_tokens=1) for t in range(5)))
        for left in (4, 3, 2, 1, 0, 0, 0):
            fleet.complete("a")
            assert fleet.inflight() == {"a": left}
        assert not fleet.router._tickets

    run(scenario)


@pytest.mark.parametrize("told", ["before the retry", "after the retry"])
def test_retry_books_anew(run: Any, told: str) -> None:
    """A refused attempt's end, told before or after the retry, closes its own entry, not that of the retry."""

    async def scenario() -> None:
        fleet = Fleet("a", "b")
        fleet.report("a", running=0)
        fleet.report("b", running=5)
        assert await fleet.pick(ticket=7, prompt_tokens=3) == "a"
        if told == "before the retry":
            fleet.complete("a")
        fleet.report("a", running=20)
        assert await fleet.pick(ticket=7, prompt_tokens=3, is_retry=True) == "b"
        if told == "after the retry":
            fleet.complete("a")
        assert fleet.inflight() == {"a": 0, "b": 1}
        fleet.complete("b")
        assert fleet.inflight() == {"a": 0, "b": 0}
        assert not fleet.router._tickets

    run(scenario)


def test_retry_spares_siblings_on_the_same_replica(run: Any) -> None:
    """The late end of a refused attempt does not close a sibling call that runs on the replica which refused."""

    async def scenario() -> None:
        fleet = Fleet("a", "b")
        for ticket in (1, 2):
            await fleet.pick(ticket=ticket, prompt_tokens=3, target_replica="a")
        fleet.report("a", running=9)
        assert await fleet.pick(ticket=1, prompt_tokens=3, is_retry=True) == "b"
        fleet.complete("a")
        assert fleet.inflight() == {"a": 1, "b": 1}
        fleet.complete("a")
        fleet.complete("b")
        assert fleet.inflight() == {"a": 0, "b": 0}
        assert not fleet.router._tickets

    run(scenario)


def test_calls_without_a_ticket_are_not_booked(run: Any) -> None:
    """Control calls are not counted, and their end closes no sibling that came later (an attach, then a submission)."""

    async def scenario() -> None:
        fleet = Fleet("a")
        await fleet.pick()
        await fleet.pick(ticket=1, prompt_tokens=1)
        assert fleet.inflight() == {"a": 1}
        fleet.complete("a")
        assert fleet.inflight() == {"a": 1}
        fleet.complete("a")
        assert fleet.inflight() == {"a": 0}
        assert not fleet.router._tickets

    run(scenario)


def test_newest_settings_win(run: Any) -> None:
    """Balancing settings in reports apply live, the ones set last win, and bad ones leave those before in force."""

    async def scenario() -> None:
        fleet = Fleet("a", "b")
        fleet.report("a", settings={"policy": "round_robin", "stale_s": 7.0}, settings_t=2.0)
        assert fleet.router.policy.name == "round_robin"
        assert fleet.router.table.stale_s == 7.0
        fleet.report("b", settings={"policy": "random"}, settings_t=1.0)
        assert fleet.router.policy.name == "round_robin"
        fleet.report("b", settings={"policy": "sal", "beta": -1}, settings_t=3.0)
        fleet.report("b", settings={"policy": "no such"}, settings_t=4.0)
        assert fleet.router.policy.name == "round_robin"
        fleet.report("b", settings={"policy": "p2c"}, settings_t=5.0)
        assert fleet.router.policy.name == "p2c"

    run(scenario)


def beta(fleet: Fleet) -> float:
    """SAL's beta in a router."""
    assert isinstance(fleet.router.policy, SAL)
    return fleet.router.policy.beta


def test_same_settings_keep_what_was_learnt(run: Any) -> None:
    """A restarted replica announces the settings in force again: the beta that SAL has learnt stays."""

    async def scenario() -> None:
        settings = {"policy": "sal"}
        fleet = Fleet("a", balancing=settings)
        for _ in range(200):
            fleet.router.observe(1000, 10)
        learnt = beta(fleet)
        assert learnt != beta(Fleet("b", balancing=settings))
        fleet.report("a", settings=dict(settings), settings_t=9.0)
        assert beta(fleet) == learnt
        fleet.report("a", settings={"policy": "sal", "beta": 3.0}, settings_t=10.0)
        assert beta(fleet) == 3.0

    run(scenario)


def test_routers_share_reports_not_ledgers(run: Any) -> None:
    """Two routers that hear the same reports forget their own calls each, once a report has named them."""

    async def scenario() -> None:
        one, two = Fleet("a"), Fleet("a")
        await one.pick(ticket=1, prompt_tokens=100)
        await two.pick(ticket=2, prompt_tokens=30)

        def queued(fleet: Fleet) -> float:
            return float(fleet.router.table.queued_tokens[0])

        for fleet in (one, two):
            fleet.report("a", queued_tokens=100, admitted=[1])
        assert (queued(one), queued(two)) == (100, 130)
        for fleet in (one, two):
            fleet.report("a", queued_tokens=130, admitted=[1, 2])
        assert (queued(one), queued(two)) == (130, 130)
        assert one.inflight() == two.inflight() == {"a": 1}

    run(scenario)


def test_stale_reports_fall_back_to_own_calls(run: Any) -> None:
    """When no report is fresh, two choices on this router's own calls decide, whatever the old figures say."""

    async def scenario() -> None:
        fleet = Fleet("a", "b", balancing={"policy": "least_requests", "stale_s": 0.05})
        fleet.router._rng = np.random.default_rng(1)
        fleet.report("a", running=0)
        fleet.report("b", running=60)
        assert await fleet.pick() == "a"
        await asyncio.sleep(0.1)
        assert fleet.router.reports_stale
        names = [await fleet.pick(ticket=t, prompt_tokens=1) for t in range(40)]
        assert abs(names.count("a") - names.count("b")) <= 2

    run(scenario)


def test_router_is_found_by_its_deployment(run: Any) -> None:
    """The process finds its router under the name of the deployment it routes to."""

    async def scenario() -> None:
        fleet = Fleet("a")
        assert find_router(ENGINES.name) is fleet.router
        assert find_router("another") is None

    run(scenario)
