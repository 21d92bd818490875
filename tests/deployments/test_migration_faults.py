"""Each fault at each moment of a move: the client has each token once and in order, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from deployments.migration.messages import Message

from .migration_parts import Fault
from .migration_world import World
from .virtual_loop import run_virtual

RID, A_ID = "r", "r#1.0"
ASKS = ("Reserve", "Write", "Commit")

MISHAPS: dict[str, Callable[[], Fault]] = {
    "message lost": lambda: Fault(lose=True),
    "answer lost": lambda: Fault(lose_answer=True),
    "message doubled": lambda: Fault(double_after=0.003),
    "message doubled late": lambda: Fault(double_after=4.0),
    "message late": lambda: Fault(delay=1.5),
    "message very late": lambda: Fault(delay=5.0),
    "answer late": lambda: Fault(delay_answer=1.5),
}


async def moved(world: World) -> None:
    """One request, which moves from a to b under the world's faults, and the end of all."""
    world.ask(RID, prompt=40, length=90, node="a")
    await asyncio.sleep(0.3)
    give = asyncio.ensure_future(world.give("a", "b", RID))
    await asyncio.wait([give], timeout=30)  # cancelled with its executor
    assert give.done(), "the move does not end"
    if not give.cancelled():
        give.result()
    await world.settle()
    world.check()


@pytest.mark.parametrize("ask", [*ASKS, "Query", "ReleaseOnDestination"])
@pytest.mark.parametrize("mishap", MISHAPS)
def test_message_mishaps(mishap: str, ask: str) -> None:
    """A message or its answer is lost, doubled or late, whichever; the request is never sent again for it."""

    async def scenario() -> None:
        world = World()

        def faults(source: str, to: str, message: Message, nth: int) -> Fault | None:
            if ask in ("Query", "ReleaseOnDestination") and message.ask == "Commit":
                return Fault(delay=1.0)  # so that A has to ask, and to call it off
            return MISHAPS[mishap]() if message.ask == ask and nth == 1 else None

        world.faults = faults
        await moved(world)
        assert world.clients[RID].stream.epoch == 1

    run_virtual(scenario())


EVENTS: dict[str, Callable[[World], None]] = {
    "A dies": lambda world: world.nodes["a"].die(),
    "B dies": lambda world: world.nodes["b"].die(),
    "A's engine dies": lambda world: world.lose_engine("a"),
    "B's engine dies": lambda world: world.lose_engine("b"),
    "client leaves": lambda world: world.leave(RID),
    "A preempts": lambda world: world.preempt("a", A_ID),
    "it finishes": lambda world: world.finish(RID),
    "B stands still": lambda world: world.stand_still("b", 1.0),
    "A's engine is slow": lambda world: world.slow("a", 2.0),
    "B's engine is slow": lambda world: world.slow("b", 2.0),
    "no message passes": lambda world: world.cut_off(),
    "A's executor dies": lambda world: world.nodes["a"].migration.departures.close(),
}
MOMENTS = (
    *(f"{ask} {when}" for ask in ASKS for when in ("sent", "answered")),
    *("park", "parked", "adopt", "done"),
)


def sent_again(event: str, moment: str) -> bool:
    """Whether the request may have to be computed anew: its replica is dead, or nobody can tell where it is."""
    if event in ("B dies", "B's engine dies"):
        return moment in ("Commit answered", "done")
    if event == "no message passes":
        return moment in ("park", "parked")
    return event in ("A dies", "A's engine dies")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("event", EVENTS)
def test_events_at_each_moment(event: str, moment: str) -> None:
    """Whatever happens, whenever: no token lost or doubled, no block left taken, nothing parked or sent again idly."""

    async def scenario() -> None:
        world = World("abc")
        world.at(moment, lambda: EVENTS[event](world))
        await moved(world)
        assert world.clients[RID].stream.epoch <= 1 + sent_again(event, moment)

    run_virtual(scenario())


@pytest.mark.parametrize("b_goes_on", [True, False])
def test_a_park_that_ends_by_itself(b_goes_on: bool) -> None:
    """A's engine unparks a request whose commit is under way: its tokens wait until it is known who goes on."""

    async def scenario() -> None:
        world = World()
        if not b_goes_on:
            world.at("adopt", lambda: world.stand_still("b", 5.0))
        order = world.faults

        def faults(source: str, to: str, message: Message, nth: int) -> Fault | None:
            if message.ask == "Commit":
                world.nodes["a"].engine.requests[A_ID].lease = 0.0
                return Fault(delay=0.2)
            return order(source, to, message, nth)

        world.faults = faults
        await moved(world)
        (end,) = world.given
        late = [delta for name, delta in world.left if name == "a" and delta.start >= end.tokens]
        assert (end.outcome, bool(late)) == (("done", False) if b_goes_on else ("rolled_back", True))

    run_virtual(scenario())


def test_last_tokens_of_the_source_are_late() -> None:
    """B's first token is at the ingress before A's last ones have come out of A's engine: none of them is lost."""

    async def scenario() -> None:
        world = World()
        world.nodes["a"].engine.output_s = 0.3
        await moved(world)
        assert [end.outcome for end in world.given] == ["done"]
        assert world.clients[RID].stream.epoch == 1

    run_virtual(scenario())
