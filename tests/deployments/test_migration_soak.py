"""Many moves under random faults, by seed."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

from .fake_engine import EngineDead
from .migration_parts import Fault
from .migration_world import World
from .virtual_loop import run_virtual


def mishap(rng: random.Random) -> Fault | None:
    """What befalls one message; mostly nothing."""
    if rng.random() < 0.75:
        return None
    late = rng.choice([0.005, 0.05, 0.4, 1.2, 4.0])
    return rng.choice(
        [
            Fault(lose=True),
            Fault(lose_answer=True),
            Fault(double_after=late),
            Fault(delay=late),
            Fault(delay_answer=late),
        ]
    )


async def disturb(world: World, rng: random.Random) -> None:
    """One thing that happens to the fleet."""
    alive = [node for node in world.nodes.values() if not (node.dead or node.engine.dead)]
    name = rng.choice(alive).name
    to = rng.choice([node.name for node in alive if node.name != name])
    running = [rid for rid, client in world.clients.items() if not client.task.done()]
    match rng.choices(
        ["give", "one", "preempt", "still", "slow", "leave", "die", "engine"], [8, 6, 2, 1, 1, 1, 0.3, 0.3]
    )[0]:
        case "give":
            await world.give(name, to, count=rng.randint(1, 4))
        case "one" if here := [sequence.submit.rid for sequence in world.nodes[name].sequences.running]:
            await world.give(name, to, rid=rng.choice(here))
        case "preempt" if requests := list(world.nodes[name].engine.requests):
            world.preempt(name, rng.choice(requests))
        case "still":
            world.stand_still(name, rng.uniform(0.05, 1.5))
        case "slow":
            world.slow(name, rng.uniform(0.1, 2.0))
        case "leave" if running:
            world.leave(rng.choice(running))
        case "die" if len(alive) > 2:
            world.nodes[name].die()
        case "engine" if len(alive) > 2:
            world.lose_engine(name)


async def soak(seed: int, requests: int, disturbances: int) -> World:
    """Requests and disturbances at random times, then the end of all."""
    rng = random.Random(seed)
    world = World("abcd", total=rng.choice([100, 150, 400]), slots=rng.choice([3, 8]))
    world.faults = lambda source, to, message, nth: mishap(rng)

    async def ask(number: int) -> None:
        await asyncio.sleep(rng.uniform(0, 4))
        serving = [name for name, node in world.nodes.items() if node.state == "serving"]
        world.ask(f"r{number}", rng.randint(1, 60), rng.randint(1, 300), rng.choice(serving))

    async def later() -> None:
        await asyncio.sleep(rng.uniform(0, 6))
        with suppress(EngineDead):  # of a replica that was to give
            await disturb(world, rng)

    happenings = [asyncio.ensure_future(ask(number)) for number in range(requests)]
    happenings += [asyncio.ensure_future(later()) for _ in range(disturbances)]
    done, pending = await asyncio.wait(happenings, timeout=200)
    assert not pending, "a move does not end"
    for happening in done:
        if not happening.cancelled():
            happening.result()
    await world.settle()
    world.check()
    return world


@pytest.mark.parametrize("seed", range(8))
def test_soak(seed: int) -> None:
    """Whatever befalls messages, engines and replicas: each client has each token once, nothing is left behind."""
    world = run_virtual(soak(seed, requests=14, disturbances=30))
    assert world.log, "nothing was tried"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_long_soak(seed: int) -> None:
    """The same for hundreds of seeds."""
    run_virtual(soak(seed, requests=25, disturbances=60))
