"""Which replicas a FleetRouter sends calls to: those that serve, and by name those that are about to end."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from ray.serve._private.common import ReplicaID

import deployments.router
from deployments.routing import NoReplicaError

from .router_rig import ENGINES, LEAST, Fleet


def test_target_replica_pins_a_call(run: Any) -> None:
    """`target_replica` wins over the policy and is booked like any call; a target that is gone is refused at once."""

    async def scenario() -> None:
        fleet = Fleet("a", "b")
        fleet.report("a", running=50)
        fleet.report("b", running=0)
        assert await fleet.pick(target_replica="a", ticket=1, prompt_tokens=5) == "a"
        assert fleet.inflight() == {"a": 1, "b": 0}
        started = time.monotonic()
        with pytest.raises(NoReplicaError, match="gone"):
            await fleet.pick(target_replica="z", ticket=2, prompt_tokens=5)
        assert time.monotonic() - started < 0.1
        assert fleet.inflight() == {"a": 1, "b": 0}

    run(scenario)


@pytest.mark.parametrize("state", ["draining", "dead"])
def test_unserving_replicas_leave_at_once(run: Any, state: str) -> None:
    """The report that says draining or dead ends routing to the replica; serving again brings it back."""

    async def scenario() -> None:
        fleet = Fleet("a", "b")
        fleet.report("a", running=0)
        fleet.report("b", running=9)
        fleet.report("a", state=state)
        assert [await fleet.pick() for _ in range(5)] == ["b"] * 5
        assert fleet.router.reports["a"].state == state
        fleet.report("a", running=0)
        assert await fleet.pick() == "a"

    run(scenario)


def test_dead_actor_leaves_at_once(run: Any) -> None:
    """A replica whose actor died takes no more calls, pinned ones included, and its late reports change nothing."""

    async def scenario() -> None:
        fleet = Fleet("a", "b")
        fleet.report("a", running=0)
        fleet.report("b", running=9)
        await fleet.pick(ticket=1, prompt_tokens=5)
        fleet.router.on_replica_actor_died(ReplicaID(unique_id="a", deployment_id=ENGINES))
        fleet.report("a", running=0)
        assert await fleet.pick() == "b"
        with pytest.raises(NoReplicaError):
            await fleet.pick(target_replica="a")
        assert "a" not in fleet.router.reports
        fleet.complete("b")
        fleet.complete("a")  # Serve tells the end of the broken call as well
        assert not fleet.router._tickets

    run(scenario)


def test_unlisted_replica_stays_while_it_serves(run: Any) -> None:
    """Serve drops a replica from its list while its user_config changes: as long as it reports serving, it serves."""

    async def scenario() -> None:
        fleet = Fleet("a", "b", balancing={**LEAST, "stale_s": 0.3})
        fleet.report("b", running=9)
        for _ in range(6):
            fleet.report("a")
            fleet.set("b")
            assert await fleet.pick() == "a"
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)  # and now it says nothing any more
        fleet.report("b", running=9)
        assert await fleet.pick() == "b"
        assert fleet.router.table.ids == ["b"]
        assert set(fleet.router.reports) == {"b"}

    run(scenario)


@pytest.mark.parametrize("state", [None, "dead"])
def test_unlisted_replica_leaves(run: Any, state: str | None) -> None:
    """A replica that Serve does not list, and that reports nothing or its death, is forgotten at once."""

    async def scenario() -> None:
        fleet = Fleet("a", "b")
        fleet.report("b", running=9)
        if state is not None:
            fleet.report("a", state=state)
        fleet.set("b")
        assert fleet.router.table.ids == ["b"]
        assert await fleet.pick() == "b"
        with pytest.raises(NoReplicaError):
            await fleet.pick(target_replica="a")

    run(scenario)


def test_stopping_replica_takes_pinned_calls_only(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that Serve stops is reached by name for as long as it reports draining, and by nothing else; then it is gone.

    Moves off it, and the calls that follow a request that came to it last, need that.
    """
    monkeypatch.setattr(deployments.router, "DRAINING_SILENT_S", 2.0)

    async def scenario() -> None:
        fleet = Fleet("a", "b", balancing={**LEAST, "stale_s": 0.1})
        fleet.report("a")
        fleet.report("b", running=9)
        fleet.report("a", state="draining")
        fleet.set("b")
        for _ in range(5):
            await asyncio.sleep(0.1)
            fleet.report("a", state="draining")
            fleet.report("b", running=9)
            assert await fleet.pick() == "b"
            assert await fleet.pick(target_replica="a") == "a"
        assert fleet.router.table.ids == ["b"]
        async with asyncio.timeout(30):
            while "a" in fleet.router.reports:
                await asyncio.sleep(0.1)
        with pytest.raises(NoReplicaError, match="gone"):
            await fleet.pick(target_replica="a")
        assert set(fleet.router.reports) == {"b"}

    run(scenario)


def test_refused_pinned_call_is_not_sent_again(run: Any) -> None:
    """A pinned replica that refuses a call (it is about to end) would refuse each further one: the caller is told."""

    async def scenario() -> None:
        fleet = Fleet("a", "b")
        assert await fleet.pick(target_replica="a") == "a"
        with pytest.raises(NoReplicaError, match="takes no more calls"):
            await fleet.pick(target_replica="a", is_retry=True)

    run(scenario)


def test_heard_tells_when(run: Any) -> None:
    """Each replica's last report comes with the time at which it arrived; fresh are those of the last `stale_s`."""

    async def scenario() -> None:
        fleet = Fleet("a", "b", balancing={**LEAST, "stale_s": 5.0})
        before = time.monotonic()
        fleet.report("a", running=3)
        (heard,) = fleet.router.heard()
        assert (heard.report.replica, heard.report.running) == ("a", 3)
        assert before <= heard.at <= time.monotonic()
        assert fleet.router.fresh(heard.at + 4.9) == [heard]
        assert fleet.router.fresh(heard.at + 5.1) == []

    run(scenario)
