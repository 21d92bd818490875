"""Whole moves over the real executors, with fake engines: nothing lost, nothing doubled, nothing left behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from deployments.migration.messages import How
from policies.migration.events import Limits

from .migration_world import LIMITS, MIGRATION, World
from .virtual_loop import run_virtual


def test_a_running_request_moves() -> None:
    """It goes in stages while it decodes and its client has each token once; no KV is computed anew."""

    async def scenario() -> None:
        world = World()
        client = world.ask("r", prompt=50, length=60, node="a")
        await asyncio.sleep(0.4)
        (moved,) = await world.give("a", "b", "r")
        assert (moved.outcome, moved.reason, moved.hop) == ("done", "moved", 1)
        assert 0 < moved.tokens < 60
        assert moved.blocks >= 13
        await world.settle()
        assert (client.stream.epoch, client.stream.hop, client.stream.sender) == (1, 1, "b")
        assert (world.nodes["b"].engine.adopted, world.nodes["b"].engine.recomputed) == (1, 0)
        world.check()

    run_virtual(scenario())


def test_several_move_at_once_and_one_comes_back() -> None:
    """Moves of one replica in both directions do not disturb each other; a chain of hops keeps one epoch."""

    async def scenario() -> None:
        world = World("abc")
        clients = [world.ask(f"r{i}", prompt=10 + 7 * i, length=150, node="ab"[i % 2]) for i in range(6)]
        await asyncio.sleep(0.5)
        first = await asyncio.gather(world.give("a", "b", count=3), world.give("b", "a", count=2))
        assert [moved.outcome for moves in first for moved in moves] == ["done"] * 5
        for source, to in ("ab", "bc", "ca"):
            await asyncio.gather(*(world.give(source, to, f"r{i}") for i in range(6)))
        await world.settle()
        assert {client.stream.epoch for client in clients} == {1}
        assert max(client.stream.hop for client in clients) >= 3
        assert sum(node.engine.recomputed for node in world.nodes.values()) == 0
        world.check()

    run_virtual(scenario())


def test_a_waiting_request_moves_without_kv() -> None:
    """One that waits for a slot goes to a replica that has one, and its stream comes from there alone."""

    async def scenario() -> None:
        world = World(slots=1)
        world.ask("runs", prompt=10, length=200, node="a")
        client = world.ask("waits", prompt=10, length=20, node="a")
        await asyncio.sleep(0.5)
        (moved,) = await world.give("a", "b", "waits")
        assert (moved.outcome, moved.blocks, moved.tokens) == ("done", 0, 0)
        await asyncio.sleep(0.5)
        assert client.stream.finished or client.stream.sender == "b"
        await world.settle()
        world.check()

    run_virtual(scenario())


def test_a_waiting_request_moves_on_before_its_first_token() -> None:
    """Its tokens name the hop before as their parent although another hop lies between: the client takes them."""

    async def scenario() -> None:
        world = World("abc", slots=1)
        for node in "ab":
            world.ask(f"runs {node}", prompt=10, length=200, node=node)
        client = world.ask("waits", prompt=10, length=20, node="a")
        await asyncio.sleep(0.5)
        assert [m.outcome for m in await world.give("a", "b", "waits")] == ["done"]
        assert [m.outcome for m in await world.give("b", "c", "waits")] == ["done"]
        await asyncio.sleep(2.0)
        assert client.stream.finished
        assert (client.stream.epoch, client.stream.sender) == (1, "c")
        await world.settle()
        world.check()

    run_virtual(scenario())


@pytest.mark.parametrize(("how", "stages"), [("live", True), ("stop_and_copy", False)])
def test_ways_to_move(how: How, stages: bool) -> None:
    """Live copies in stages before the pause, stop-and-copy everything within it; both keep the stream."""

    async def scenario() -> None:
        world = World()
        world.ask("r", prompt=50, length=60, node="a")
        await asyncio.sleep(0.4)
        (moved,) = await world.give("a", "b", how=how)
        assert moved.outcome == "done"
        assert any(ask == "Write" for _, ask in world.sent) == stages
        await world.settle()
        world.check()

    run_virtual(scenario())


def test_recompute_hands_back() -> None:
    """The third way: the request goes back to its ingress, which sends it elsewhere as a new epoch."""

    async def scenario() -> None:
        world = World()
        client = world.ask("r", prompt=50, length=60, node="a")
        await asyncio.sleep(0.4)
        (moved,) = await world.give("a", "", how="recompute")
        assert (moved.outcome, moved.reason) == ("recompute", "handed_back")
        await world.settle()
        assert client.stream.epoch == 2
        world.check()

    run_virtual(scenario())


def test_orders_that_cannot_be_carried_out() -> None:
    """A request that is not here, still prefills, is under way, or has no room there stays, under a name of its own."""

    async def scenario() -> None:
        world = World(total=40, settings=replace(MIGRATION, limits=Limits(stage_blocks=1)))
        world.ask("r", prompt=40, length=80, node="a")
        world.ask("large", prompt=100, length=20, node="b")
        await asyncio.sleep(0.03)
        assert [(m.outcome, m.reason) for m in await world.give("a", "b", "nobody")] == [("aborted", "unknown")]
        assert [(m.outcome, m.reason) for m in await world.give("a", "b", "r")] == [("aborted", "prefill")]
        await asyncio.sleep(0.2)
        assert [(m.outcome, m.reason) for m in await world.give("a", "b", "r")] == [("aborted", "no_blocks")]
        world.nodes["b"].engine.fingerprint = "another model"
        assert [(m.outcome, m.reason) for m in await world.give("a", "b", "r")] == [("aborted", "unlike_engine")]
        world.unreachable.add(("a", "b"))
        assert [(m.outcome, m.reason) for m in await world.give("a", "b", "r")] == [("aborted", "unreachable")]
        world.unreachable.clear()
        twice = await asyncio.gather(world.give("a", "b", "r"), world.give("a", "b", "r"))
        assert sorted(m.reason for moves in twice for m in moves) == ["busy", "unlike_engine"]
        await world.settle()
        world.check()

    run_virtual(scenario())


def test_a_draining_replica_takes_nothing() -> None:
    """A replica that goes away refuses what would come to it."""

    async def scenario() -> None:
        world = World()
        world.ask("r", prompt=20, length=60, node="a")
        await asyncio.sleep(0.3)
        world.nodes["b"].migration.draining.start()
        assert [(m.outcome, m.reason) for m in await world.give("a", "b", "r")] == [("aborted", "draining")]
        world.nodes["b"].migration.draining.stop()
        await world.settle()
        world.check()

    run_virtual(scenario())


def test_nobody_follows_a_moved_request() -> None:
    """A sequence that came here and that no ingress attaches to is aborted, and its blocks are free again."""

    async def scenario() -> None:
        world = World()
        client = world.ask("r", prompt=20, length=5000, node="a")
        await asyncio.sleep(0.3)
        client.task.cancel()  # as if the ingress had died, without Serve's noticing
        ended = world.nodes["a"].sequences.running[0]
        ended.cancel = lambda: None  # type: ignore[method-assign]
        moved = await world.give("a", "b", "r")
        assert [m.outcome for m in moved] == ["done"]
        await asyncio.sleep(LIMITS.lease_s + 10.0)
        assert not world.nodes["b"].engine.requests
        assert world.nodes["b"].engine.free == world.nodes["b"].engine.total

    run_virtual(scenario())


def test_cancelled_attach_aborts() -> None:
    """A client that leaves after its request moved ends it on the replica that has it now."""

    async def scenario() -> None:
        world = World()
        world.ask("r", prompt=20, length=500, node="a")
        await asyncio.sleep(0.3)
        await world.give("a", "b", "r")
        await asyncio.sleep(0.3)
        assert world.nodes["b"].engine.requests
        world.leave("r")
        await asyncio.sleep(0.1)
        assert not world.nodes["b"].engine.requests
        await world.settle()
        world.check()

    run_virtual(scenario())


def test_late_and_unknown_attach() -> None:
    """An outcome is kept for a minute; one that never was here is the engine's fault, so that it is sent again."""

    async def scenario() -> None:
        world = World()
        world.ask("r", prompt=20, length=30, node="a")
        await asyncio.sleep(0.3)
        await world.give("a", "b", "r")
        await world.settle()
        sequences = world.nodes["b"].sequences
        assert (await sequences.attach(("r", 1, 1))).finish_reason == "length"
        assert (await world.nodes["a"].sequences.attach(("r", 1, 0))).moved_to == "b"
        assert (await sequences.attach(("r", 1, 7))).fault == "engine"
        await asyncio.sleep(60)
        assert (await sequences.attach(("r", 1, 1))).fault == "engine"

    run_virtual(scenario())
