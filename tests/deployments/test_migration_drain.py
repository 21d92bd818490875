"""A replica that is to go away: everything moves, what cannot is handed back in time, nobody's stream breaks."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from deployments.migration import drain
from policies.migration.pairing import Pairing

from .migration_world import MIGRATION, World
from .virtual_loop import run_virtual


def start(world: World, name: str, within_s: float | None = None) -> None:
    """Drain a replica as EngineReplica does."""
    world.nodes[name].state = "draining"
    world.nodes[name].migration.draining.start(within_s)


async def emptied(world: World, name: str, timeout: float = 60.0) -> None:
    """Until nothing runs on a replica."""
    async with asyncio.timeout(timeout):
        while world.nodes[name].sequences.running:
            await asyncio.sleep(0.05)


def test_everything_moves() -> None:
    """Running and waiting requests leave with their KV for replicas that serve, several of them at a time."""

    async def scenario() -> None:
        world = World("abc", slots=8)
        clients = [world.ask(f"r{i}", prompt=10 + 5 * i, length=400, node="a") for i in range(10)]
        await asyncio.sleep(0.6)
        assert any(request.status == "waiting" for request in world.nodes["a"].engine.requests.values())
        start(world, "a")
        await emptied(world, "a")
        assert not any(client.stream.finished for client in clients)
        world.ask("late", prompt=10, length=10, node="a")
        await asyncio.sleep(0.5)
        assert {client.stream.epoch for client in clients} == {1}
        assert sum(node.engine.recomputed for node in world.nodes.values()) == 0
        await world.settle()
        world.nodes["a"].migration.draining.stop()
        world.check()

    run_virtual(scenario())


def test_what_cannot_move_is_handed_back_in_time() -> None:
    """Where no replica has room, streams stay to the deadline and are then sent again elsewhere."""

    async def scenario() -> None:
        world = World("ab", total=60, settings=replace(MIGRATION, pairing=Pairing(share=0.01)))
        clients = [world.ask(f"r{i}", prompt=20, length=180, node="a") for i in range(2)]
        await asyncio.sleep(0.5)
        start(world, "a", within_s=1.0)
        await asyncio.sleep(0.8)
        assert {client.stream.epoch for client in clients} == {1}
        await emptied(world, "a", 0.6)
        await world.settle()
        assert {client.stream.epoch for client in clients} == {2}
        world.check()

    run_virtual(scenario())


def test_the_last_replica_finishes_its_requests() -> None:
    """With nobody else to go to they run to their ends, deadline or not."""

    async def scenario() -> None:
        world = World("a")
        client = world.ask("r", prompt=20, length=200, node="a")
        await asyncio.sleep(0.3)
        start(world, "a", within_s=0.5)
        await world.settle()
        assert client.stream.epoch == 1
        world.check()

    run_virtual(scenario())


def test_a_replica_that_comes_up_takes_over() -> None:
    """A drain waits for a destination and uses it when it is there."""

    async def scenario() -> None:
        world = World("a")
        client = world.ask("r", prompt=20, length=300, node="a")
        await asyncio.sleep(0.3)
        start(world, "a", within_s=60.0)
        await asyncio.sleep(1.0)
        world.add("b", 200, 8)
        await emptied(world, "a", 2.0)
        await world.settle()
        assert (client.stream.epoch, client.stream.sender) == (1, "b")
        world.check()

    run_virtual(scenario())


def test_by_hand_without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain by hand has no deadline: it hands back after a minute in which nothing leaves, and it can be undone."""
    monkeypatch.setattr(drain, "BY_HAND_S", 3.0)

    async def scenario() -> None:
        world = World("ab", settings=replace(MIGRATION, pairing=Pairing(share=0.01)))
        client = world.ask("r", prompt=20, length=700, node="a")
        await asyncio.sleep(0.3)
        start(world, "a")
        await asyncio.sleep(2.5)
        assert client.stream.epoch == 1
        world.nodes["a"].migration.draining.stop()
        await asyncio.sleep(2.0)
        assert client.stream.epoch == 1
        start(world, "a")
        await asyncio.sleep(4.0)
        assert client.stream.epoch == 2
        await world.settle()
        world.check()

    run_virtual(scenario())


def test_its_engine_dies_meanwhile() -> None:
    """The drain ends with the engine: what had moved goes on where it is, the rest is sent again."""

    async def scenario() -> None:
        world = World("abc")
        for i in range(6):
            world.ask(f"r{i}", prompt=30, length=300, node="a")
        await asyncio.sleep(0.5)
        start(world, "a")
        await asyncio.sleep(0.3)
        world.lose_engine("a")
        await world.settle()
        world.check()

    run_virtual(scenario())
