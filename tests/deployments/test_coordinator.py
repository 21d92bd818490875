"""Coordinator without Serve: whom it asks, what moves and drains by hand answer, and that nothing ends it silently."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from deployments import coordinator
from deployments.coordination import TELL_S
from deployments.coordinator import Coordinator
from deployments.migration.messages import Give, Given, Moved
from deployments.routing import Heard
from deployments.settings import MigrationSettings
from deployments.wire import ReplicaReport

IDLE = ReplicaReport("", 1, 0.0, "serving", 100, 100, 16, 0, 0, 0, 0, 512, 10, 0, [])
TIERS = {"headroom": [0.1, 0.05], "aging_s": [None, None]}
FULL = {"running": 8, "running_by_tier": [0, 8], "free_blocks": 20}
Answer = Callable[[str, Give], Given]


class Engines:
    """Stands for the handle of the engine replicas: remembers what each was asked, answers as told."""

    deployment_name = "EngineReplica"

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.gives: list[tuple[str, Give]] = []
        self.drains: list[tuple[str, bool]] = []
        self.helped: list[tuple[str, float, float]] = []
        self.give = SimpleNamespace(remote=self._give)
        self.expect_help = SimpleNamespace(remote=self._expect_help)
        self.drain = SimpleNamespace(remote=self._drain)

    def _init(self) -> None: ...

    async def _give(self, frame: bytes, *, target_replica: str) -> bytes:
        give = msgspec.msgpack.decode(frame, type=Give)
        self.gives.append((target_replica, give))
        return msgspec.msgpack.encode(self.answer(target_replica, give))

    async def _expect_help(self, grace_s: float, for_s: float, *, target_replica: str) -> None:
        self.helped.append((target_replica, grace_s, for_s))

    async def _drain(self, on: bool, *, target_replica: str) -> None:
        self.drains.append((target_replica, on))


class Rig:
    """A coordinator, the handle that it calls, and the reports that it hears."""

    def __init__(
        self, coordinator: Coordinator, engines: Engines, reports: dict[str, ReplicaReport], router: SimpleNamespace
    ) -> None:
        self.coordinator, self.engines, self.reports, self._router = coordinator, engines, reports, router

    def say(self, name: str, **figures: Any) -> None:
        """Let a report arrive."""
        self.reports[name] = msgspec.structs.replace(IDLE, replica=name, **figures)
        if self._router.listener is not None:
            self._router.listener(self.reports[name])


def moves(source: str, give: Give) -> Given:
    """A source that gives what it is asked for."""
    return Given(give.count, [Moved(give.rid or f"{source}-{i}", "done", "moved", 1, 30) for i in range(give.count)])


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a scenario with a coordinator that ticks every `tick_s` seconds, or not at all (`enabled=False`)."""

    def run(
        scenario: Callable[[Rig], Awaitable[None]],
        answer: Answer = moves,
        *,
        enabled: bool = False,
        tick_s: float = 0.01,
    ) -> None:
        async def body() -> None:
            reports: dict[str, ReplicaReport] = {}
            router = SimpleNamespace(heard=lambda: [Heard(report, time.monotonic()) for report in reports.values()])
            router.fresh, router.listener = (lambda now: router.heard()), None
            monkeypatch.setattr(coordinator, "find_router", lambda name: router if name == "EngineReplica" else None)
            engines, made = Engines(answer), Coordinator.__new__(Coordinator)
            await cast(Any, made).__init__(engines, MigrationSettings(enabled=enabled, tick_s=tick_s), TIERS)
            try:
                await scenario(Rig(made, engines, reports, router))
            finally:
                if made._ticking is not None:
                    made._ticking.cancel()

        asyncio.run(body())

    return run


async def until(happened: Callable[[], object]) -> None:
    """Wait for something that other tasks do."""
    async with asyncio.timeout(10):
        while not happened():
            await asyncio.sleep(0.005)


def test_the_source_is_asked_with_what_the_pairing_decided(run: Any) -> None:
    """A tick sends the order to the crowded replica: reason, destination, and sizes for each tier."""

    async def scenario(rig: Rig) -> None:
        rig.say("full", **FULL)
        rig.say("idle")
        await until(lambda: rig.engines.gives)
        source, give = rig.engines.gives[0]
        assert (source, give.destination, give.reason) == ("full", "idle", "balance")
        least, most = give.room[1]
        assert 1 <= least <= most <= 30
        await until(lambda: rig.coordinator._plan.totals["balance"]["done"] == 1)
        assert (await rig.coordinator.state())["moves"] == {"balance": {"done": 1}}

    run(scenario, enabled=True)


def test_an_inversion_waits_for_no_tick(run: Any) -> None:
    """A higher tier that waits behind a full batch of lower ones makes the coordinator look at once; others do not."""

    async def scenario(rig: Rig) -> None:
        await asyncio.sleep(0.05)  # the first tick is over, the next one a minute away
        rig.say("idle")
        full = {"running": 10, "free_blocks": 40, "waiting": 1, "head_blocks": 2}
        rig.say("full", **full, running_by_tier=[10], waiting_by_tier=[0, 1])
        await asyncio.sleep(0.3)
        assert rig.engines.gives == []
        rig.say("full", **full, running_by_tier=[0, 10], waiting_by_tier=[1])
        await until(lambda: rig.engines.gives)
        assert rig.engines.gives[0][1].reason == "tier"

    run(scenario, enabled=True, tick_s=60.0)


def test_a_crowded_replica_hears_of_room_elsewhere(run: Any) -> None:
    """It is told how long a higher tier may wait, for longer than until it is told again."""

    async def scenario(rig: Rig) -> None:
        rig.say("full", running=10, running_by_tier=[0, 10], free_blocks=20)
        rig.say("idle")
        await until(lambda: rig.engines.helped)
        ((replica, grace_s, for_s),) = rig.engines.helped
        assert (replica, grace_s) == ("full", 0.5)
        assert for_s > TELL_S

    run(scenario, enabled=True)


def test_a_source_that_fails_is_logged_and_left_alone_for_a_while(run: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a call raises, ticking goes on; the pair is asked again, but not at each tick."""

    def broken(source: str, give: Give) -> Given:
        raise RuntimeError("the replica died")

    async def scenario(rig: Rig) -> None:
        rig.say("full", **FULL)
        rig.say("idle")
        with caplog.at_level("WARNING"):
            await until(lambda: rig.coordinator._plan.totals["balance"]["failed"] == 1)
            await asyncio.sleep(0.1)
        assert len(rig.engines.gives) == 1
        assert "the replica died" in caplog.text
        await until(lambda: len(rig.engines.gives) == 2)
        await rig.coordinator.check_health()

    run(scenario, broken, enabled=True)


def test_off_and_paused_make_no_moves(run: Any) -> None:
    """Neither a coordinator that is switched off nor one that is paused moves by itself; unpaused it does."""

    async def off(rig: Rig) -> None:
        rig.say("full", **FULL)
        rig.say("idle")
        await asyncio.sleep(0.1)
        assert rig.engines.gives == []
        assert (await rig.coordinator.state())["enabled"] is False
        await rig.coordinator.check_health()

    async def paused(rig: Rig) -> None:
        await rig.coordinator.pause(True)
        rig.say("full", **FULL)
        rig.say("idle")
        await asyncio.sleep(0.1)
        assert rig.engines.gives == []
        assert (await rig.coordinator.state())["paused"] is True
        await rig.coordinator.pause(False)
        await until(lambda: rig.engines.gives)

    run(off)
    run(paused, enabled=True)


def test_a_defect_of_the_coordinator_makes_it_unhealthy(run: Any) -> None:
    """What ends the ticking is raised by the health check, so that Serve starts another coordinator."""

    async def scenario(rig: Rig) -> None:
        await rig.coordinator.check_health()
        rig.reports["odd"] = cast(Any, SimpleNamespace(replica="odd", state="serving"))
        ticking = rig.coordinator._ticking
        assert ticking is not None
        await until(ticking.done)
        with pytest.raises(AttributeError):
            await rig.coordinator.check_health()

    run(scenario, enabled=True)


def test_move_by_hand_to_the_freest(run: Any) -> None:
    """So many requests of a replica go to the freest other one that serves, of any size; each is told of."""

    async def scenario(rig: Rig) -> None:
        rig.say("a", **FULL)
        rig.say("b", running=2, running_by_tier=[0, 2], free_blocks=80)
        rig.say("c", running=4, running_by_tier=[0, 4], free_blocks=60)
        rig.say("d", state="draining")
        answer = await rig.coordinator.move(source="a", count=2, how="stop_and_copy")
        ((source, give),) = rig.engines.gives
        assert source == "a"
        assert (give.reason, give.destination, give.count, give.how, give.rid) == (
            "hand",
            "b",
            2,
            "stop_and_copy",
            None,
        )
        assert give.room == []
        assert [(told["rid"], told["source"], told["destination"], told["outcome"]) for told in answer] == [
            ("a-0", "a", "b", "done"),
            ("a-1", "a", "b", "done"),
        ]

    run(scenario)


def test_move_by_name_asks_whoever_may_have_it(run: Any) -> None:
    """Without a source all replicas but the destination are asked, and only who has the request is told of."""

    def owner(source: str, give: Give) -> Given:
        return moves(source, give) if source == "b" else Given(0, [Moved(give.rid or "", "aborted", "unknown")])

    async def scenario(rig: Rig) -> None:
        for name in "abc":
            rig.say(name)
        (told,) = await rig.coordinator.move(rid="chatcmpl-1", destination="c")
        assert (told["rid"], told["source"], told["destination"]) == ("chatcmpl-1", "b", "c")
        assert sorted(source for source, _ in rig.engines.gives) == ["a", "b"]
        with pytest.raises(ValueError, match=r"no replica has a request 'chatcmpl-1'.*a, c"):
            await rig.coordinator.move(rid="chatcmpl-1", destination="b")

    run(scenario, owner)


@pytest.mark.parametrize(
    ("question", "said"),
    [
        ({}, r"name the request \(rid\) or the replica that gives \(source\): a, b"),
        ({"source": "z"}, "no such replica: 'z'. There are: a, b"),
        ({"source": "a", "destination": "z"}, "no such replica: 'z'. There are: a, b"),
        ({"source": "a", "destination": "a"}, "both 'a'"),
        ({"source": "a", "count": 0}, "count must be at least 1, got 0"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused(run: Any, question: dict[str, Any], said: str) -> None:
    """What is wrong and which replicas there are, and nobody is asked."""

    async def scenario(rig: Rig) -> None:
        rig.say("a")
        rig.say("b")
        with pytest.raises(ValueError, match=said):
            await rig.coordinator.move(**question)
        assert rig.engines.gives == []

    run(scenario)


def test_nobody_to_give_to(run: Any) -> None:
    """A single replica keeps its requests, and cannot be drained."""

    async def scenario(rig: Rig) -> None:
        rig.say("a")
        rig.say("b", state="draining")
        with pytest.raises(ValueError, match="no other replica that serves"):
            await rig.coordinator.move(source="a")
        with pytest.raises(ValueError, match="only replica that serves"):
            await rig.coordinator.drain("a")
        assert rig.engines.drains == []

    run(scenario)


def test_drain_and_undrain_reach_the_replica(run: Any) -> None:
    """The order goes to the replica that was named, one that drains already included; an unknown name is refused."""

    async def scenario(rig: Rig) -> None:
        rig.say("a")
        rig.say("b")
        await rig.coordinator.drain("a")
        rig.say("a", state="draining")
        await rig.coordinator.drain("a")
        await rig.coordinator.undrain("a")
        assert rig.engines.drains == [("a", True), ("a", True), ("a", False)]
        for order in (rig.coordinator.drain, rig.coordinator.undrain):
            with pytest.raises(ValueError, match=r"no such replica: 'z'\. There are: a, b"):
                await order("z")

    run(scenario)


def test_an_order_stands_before_what_comes_of_it(run: Any) -> None:
    """The replica's report may be quicker than the answer to the order; the list of events has cause and effect."""

    async def scenario(rig: Rig) -> None:
        async def at_once(on: bool, *, target_replica: str) -> None:
            rig.say(target_replica, state="draining" if on else "serving")
            await asyncio.sleep(0.01)  # the answer is slower

        rig.engines.drain = SimpleNamespace(remote=at_once)
        rig.say("a")
        rig.say("b")
        await until(lambda: len(rig.coordinator._events.recent()) == 2)
        await rig.coordinator.drain("a")
        await asyncio.sleep(0)  # until what the report's thread said is heard
        await rig.coordinator.undrain("a")
        await asyncio.sleep(0)
        events = (await rig.coordinator.state())["events"]
        oldest_first = [event["kind"] for event in reversed(events) if event["replica"] == "a"]
        assert oldest_first == ["serving", "order", "draining", "empty", "order", "serving"]

    run(scenario)


def test_a_move_by_hand_that_fails_says_so(run: Any) -> None:
    """A source that cannot be asked is an answer, not an exception: the other sources' answers count."""

    def broken(source: str, give: Give) -> Given:
        raise RuntimeError("gone")

    async def scenario(rig: Rig) -> None:
        rig.say("a")
        rig.say("b")
        (told,) = await rig.coordinator.move(source="a")
        assert (told["outcome"], told["reason"], told["source"]) == ("failed", "no_answer", "a")

    run(scenario, broken)


def test_before_the_first_report_there_is_nothing(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a router (Serve makes it a moment later) the state is empty and ticking waits."""

    async def scenario(rig: Rig) -> None:
        monkeypatch.setattr(coordinator, "find_router", lambda name: None)
        await asyncio.sleep(0.05)
        assert (await rig.coordinator.state())["replicas"] == {}
        await rig.coordinator.check_health()

    run(scenario, enabled=True)


def test_the_engine_is_not_imported() -> None:
    """The coordinator's process has neither vLLM nor torch: it would cost a gigabyte and half a minute."""
    code = "import sys, deployments.coordinator; print(sorted({'vllm', 'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
