"""Moves that go wrong: lost replicas, lost tokens, runs that should not be; the answer is right all the same."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from app.streams import Failover
from deployments.wire import Outcome

from .scripted_fleet import END, FleetMaker, Script, Submission, collect, lost_with, moves, says, silent

TEXT = "Hi 🍕 日本語 — done"


ONCE = Failover(max_attempts=1, timeout_s=5)  # nothing is sent again: what is lost fails


LATE = [
    ActorDiedError(),
    ZeroDivisionError("a bug"),
    Outcome(2, fault="engine", message="EngineCore died"),
    Outcome(2, fault="request", message="refused"),
    Outcome(9, "length"),
]


@pytest.mark.parametrize("late", LATE, ids=lambda value: getattr(value, "fault", None) or type(value).__name__)
@pytest.mark.parametrize("when", ["before the end", "after the end"])
def test_what_becomes_of_the_source_after_the_move(
    run: Any, make_fleet: FleetMaker, failovers: list[str], late: Any, when: str
) -> None:
    """Once the destination is heard, the source's death, error or own end is no matter of the stream."""

    async def scenario() -> None:
        fleet = await make_fleet(silent, over_zmq=False)
        ids = fleet.ids(TEXT)
        source_ended = asyncio.Event()

        async def destination(call: Submission) -> Outcome:
            call.send(ids[2])
            if when == "before the end":
                await source_ended.wait()
            return await says(ids)(call)

        async def source(call: Submission) -> Outcome:
            call.send(*ids[:2])
            call.move("B", destination)
            await asyncio.sleep(0.02)
            source_ended.set()
            return await lost_with(late)(call)

        fleet.replicas.scripts[:] = [source]
        assert (await collect(fleet))[0] == (TEXT, [*ids, END], ("stop", None))
        assert await fleet.settle() == {}
        assert (len(fleet.replicas.calls), failovers) == (1, [])

    run(scenario())


def test_a_source_that_goes_on_is_aborted(run: Any, make_fleet: FleetMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that decodes on after the client has gone over is not heard, and its call is cancelled in the end."""
    monkeypatch.setattr("app.streams._LAST_DELTA_S", 0.1)

    async def scenario() -> None:
        fleet = await make_fleet(silent, over_zmq=False, failover=ONCE)
        ids = fleet.ids(TEXT)

        async def destination(call: Submission) -> Outcome:
            call.send(ids[2])
            await asyncio.sleep(0.3)
            return await says(ids)(call)

        async def source(call: Submission) -> Outcome:
            call.send(*ids[:2])
            call.move("B", destination)
            while True:
                await asyncio.sleep(0.01)
                call.send(999)

        fleet.replicas.scripts[:] = [source]
        assert (await collect(fleet))[0] == (TEXT, [*ids, END], ("stop", None))
        assert fleet.replicas.calls[0].state == "aborted"

    run(scenario())


def moved_to_nobody(*ids: int) -> Script:
    """A script that sends these tokens and says that the sequence is on B, where nobody knows it."""

    async def script(call: Submission) -> Outcome:
        call.send(*ids)
        return Outcome(call.sent, moved_to="B", hop=1)

    return script


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (ActorDiedError(), "actor_died"),
        (Outcome(0, fault="engine", message="draining"), "draining"),
        ("unknown there", "other"),
        ("replica gone", "actor_died"),
    ],
    ids=["actor", "engine", "unknown", "gone"],
)
@pytest.mark.parametrize("heard", [False, True])
def test_a_lost_destination_is_a_fail_over(
    run: Any, make_fleet: FleetMaker, failovers: list[str], end: Any, reason: str, heard: bool
) -> None:
    """Where the sequence moved it is lost, before or after a token from there: it is sent again with what there is."""

    async def scenario() -> None:
        fleet = await make_fleet(silent, over_zmq=False)
        ids = fleet.ids(TEXT)
        had = ids[:2]
        if isinstance(end, str):
            fleet.replicas.gone |= {"B"} if end == "replica gone" else set()
            fleet.replicas.scripts[:] = [moved_to_nobody(*had), says(ids)]
        else:
            had = ids[: 3 if heard else 2]
            fleet.replicas.scripts[:] = [moves("B", lost_with(end, *had[2:]), *ids[:2]), says(ids)]
        assert (await collect(fleet))[0] == (TEXT, [*ids, END], ("stop", None))
        assert [call.submit.output for call in fleet.replicas.calls] == [[], had]
        assert failovers == [reason]

    run(scenario())


def test_a_barred_destination_is_not_waited_for(run: Any, make_fleet: FleetMaker, failovers: list[str]) -> None:
    """The source went on and then gave the sequence away after all, to one that began behind: it is sent again."""

    async def scenario() -> None:
        fleet = await make_fleet(silent, over_zmq=False)
        ids = fleet.ids(TEXT)

        async def source(call: Submission) -> Outcome:
            call.send(*ids[:2])
            outcome = call.move("B", lambda run: lost_with(ZeroDivisionError("never asked"), 999)(run))
            call.send(ids[2])
            await asyncio.sleep(0.01)
            return outcome

        fleet.replicas.scripts[:] = [source, says(ids)]
        assert (await collect(fleet))[0] == (TEXT, [*ids, END], ("stop", None))
        assert [call.submit.output for call in fleet.replicas.calls] == [[], ids[:3]]
        assert failovers == ["other"]

    run(scenario())


def test_barred_while_attached(run: Any, make_fleet: FleetMaker, failovers: list[str]) -> None:
    """A destination that turns out to have begun behind ends the waiting for it, and its run is aborted."""

    async def scenario() -> None:
        fleet = await make_fleet(silent, over_zmq=False)
        ids = fleet.ids(TEXT)

        async def destination(call: Submission) -> Outcome:
            while not call.attached:
                await asyncio.sleep(0)
            call.sent = 1
            call.send(999)
            return await silent(call)

        fleet.replicas.scripts[:] = [moves("B", destination, *ids[:2]), says(ids)]
        assert (await collect(fleet))[0] == (TEXT, [*ids, END], ("stop", None))
        assert fleet.replicas.adopted[0].state == "aborted"
        assert failovers == ["other"]

    run(scenario())


def test_last_tokens_lost_before_a_move(
    run: Any, make_fleet: FleetMaker, failovers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that the source sent before the move and that never come are made again, not waited for to the end."""
    monkeypatch.setattr("app.streams._LAST_DELTA_S", 0.1)

    async def scenario() -> None:
        fleet = await make_fleet(silent, over_zmq=False)
        ids = fleet.ids(TEXT)

        async def destination(call: Submission) -> Outcome:
            call.send(*ids[3:5])
            return await silent(call)

        async def source(call: Submission) -> Outcome:
            call.send(*ids[:2])
            call.sent = 3  # one is lost
            return call.move("B", destination)

        fleet.replicas.scripts[:] = [source, says(ids)]
        assert (await collect(fleet))[0] == (TEXT, [*ids, END], ("stop", None))
        assert fleet.replicas.adopted[0].state == "aborted"
        assert failovers == ["tokens_lost"]

    run(scenario())


def test_last_tokens_lost_after_a_move(
    run: Any, make_fleet: FleetMaker, failovers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The destination's end without its last tokens is a loss like any other."""
    monkeypatch.setattr("app.streams._LAST_DELTA_S", 0.1)

    async def scenario() -> None:
        fleet = await make_fleet(silent, over_zmq=False)
        ids = fleet.ids(TEXT)
        ends_early = lost_with(Outcome(9, "stop"), ids[2])
        fleet.replicas.scripts[:] = [moves("B", ends_early, *ids[:2]), says(ids)]
        assert (await collect(fleet))[0] == (TEXT, [*ids, END], ("stop", None))
        assert failovers == ["tokens_lost"]

    run(scenario())


def test_a_slow_destination_is_waited_for(
    run: Any, make_fleet: FleetMaker, failovers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the source's tokens are all there is enough: the destination may be silent longer than the link may."""
    monkeypatch.setattr("app.streams._LAST_DELTA_S", 0.05)

    async def scenario() -> None:
        fleet = await make_fleet(silent, over_zmq=False, failover=ONCE)
        ids = fleet.ids(TEXT)

        async def slow(call: Submission) -> Outcome:
            await asyncio.sleep(0.3)
            return await says(ids)(call)

        fleet.replicas.scripts[:] = [moves("B", slow, *ids[:2])]
        assert (await collect(fleet))[0] == (TEXT, [*ids, END], ("stop", None))
        assert failovers == []

    run(scenario())


def test_moves_and_losses_at_random(run: Any, make_fleet: FleetMaker) -> None:
    """Under random moves, losses, late deltas and clients that leave, answers are right and nothing is left."""

    async def scenario() -> None:
        rng = random.Random(23)
        fleet = await make_fleet(silent, over_zmq=False, failover=Failover(max_attempts=50, timeout_s=20))
        ids = fleet.ids(TEXT)
        wanted = [*ids, END]

        async def chaos(call: Submission) -> Outcome:
            while True:
                for _ in range(rng.randint(0, 3)):
                    await asyncio.sleep(0)
                event = rng.random()
                if event < 0.03:
                    raise ActorDiedError
                if event < 0.05:
                    return Outcome(call.sent, fault="engine", message="stalled")
                if event < 0.20:
                    outcome = call.move(f"replica-{rng.randint(0, 9)}", chaos)
                    if event < 0.10:
                        return outcome
                    if event < 0.12:
                        raise ActorDiedError  # after it gave the sequence away
                    for _ in range(rng.randint(0, 20)):
                        await asyncio.sleep(0)
                    return outcome
                if event < 0.30 and call.hop == 0:
                    call.send_late(rng.randint(0, call.sent), 777, epoch=rng.choice([0, 99]))
                piece = wanted[call.sent : call.sent + rng.randint(1, 3)]
                finish = "stop" if piece[-1] == END else None
                call.send(*piece, finish=finish)
                if finish:
                    return Outcome(call.sent, finish)

        fleet.replicas.scripts[:] = [chaos]
        finished = 0

        async def one(number: int) -> None:
            nonlocal finished
            assert (await collect(fleet, rid=f"r{number}"))[0] == (TEXT, wanted, ("stop", None))
            finished += 1

        tasks = [asyncio.create_task(one(number)) for number in range(300)]
        for task in tasks:
            await asyncio.sleep(0)
            if rng.random() < 0.2:
                task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [r for r in results if isinstance(r, Exception)] == []
        for orphan in fleet.replicas.adopted:  # nobody attached to it: a replica ends it by itself after a while
            if orphan.task is not None and not orphan.attached:
                orphan.task.cancel()
        assert await fleet.settle() == {}
        assert finished > 200
        assert max(run.hop for run in fleet.replicas.adopted) >= 3
        assert any(call.submit.epoch > 1 for call in fleet.replicas.calls)

    run(scenario())
