"""EngineReplica without Serve and without an engine: live settings, calls, the end of an ingress or of the engine."""

from __future__ import annotations

import asyncio
import logging
import logging.config
import os
import time
from logging.handlers import MemoryHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from deployments import replica
from deployments.migration import sequences
from deployments.migration.sequences import Generate, Sequences
from deployments.replica import EngineReplica
from deployments.serve_replica import log_kept
from deployments.stall import StallWatch
from deployments.wire import Outcome, Submit


class Page:
    """Stands for the load page: remembers the policies it was given."""

    def __init__(self) -> None:
        self.policies: list[dict[str, Any]] = []
        self.graces: list[tuple[float, float]] = []
        self.closed = False

    def read(self) -> None:
        return None

    def set_policy(self, spec: dict[str, Any]) -> None:
        self.policies.append(spec)

    def set_grace(self, seconds: float, until: float) -> None:
        self.graces.append((seconds, until))

    def close(self) -> None:
        self.closed = True


class Reports:
    """Stands for the report publisher."""

    endpoint = "tcp://127.0.0.1:7"

    def __init__(self) -> None:
        self.settings: list[dict[str, Any]] = []
        self.states: list[str] = []

    def set_settings(self, settings: dict[str, Any]) -> None:
        self.settings.append(settings)

    def set_state(self, state: str) -> None:
        self.states.append(state)


class Links:
    """Stands for the delta sender."""

    def __init__(self) -> None:
        self.forgotten: list[str] = []

    def forget(self, reply_to: str) -> None:
        self.forgotten.append(reply_to)


class Draining:
    """Stands for the drain."""

    def __init__(self) -> None:
        self.on = False
        self.within: list[float | None] = []

    def start(self, within_s: float | None) -> None:
        self.on = True
        self.within.append(within_s)

    def stop(self) -> None:
        self.on = False


class Bare(EngineReplica):
    """A replica without constructor and end, which need Serve and an engine."""

    def __init__(self) -> None: ...

    def __del__(self) -> None: ...  # type: ignore[override]  # Serve awaits the real one


class Rig:
    """A bare replica and its parts; `generate(submit, entries, emit)` stands for the engine."""

    def __init__(self, generate: Generate | None = None) -> None:
        self.replica = Bare()
        self.page, self.reports, self.links = Page(), Reports(), Links()
        self.engine = SimpleNamespace(errored=False)
        self.draining = Draining()
        self.termination = SimpleNamespace(ordered=False)
        parts: dict[str, Any] = {
            "_page": self.page,
            "_reports": self.reports,
            "_links": self.links,
            "_engine": self.engine,
            "_migration": SimpleNamespace(draining=self.draining),
            "_stall": StallWatch(None),
            "_termination": self.termination,
            "_replica_id": "r1",
            "_stop_s": 7.0,
        }
        if generate is not None:
            parts["_sequences"] = Sequences(generate, lambda reply_to, delta: None, self.links.forget, "r1")
        for name, part in parts.items():
            setattr(self.replica, name, part)

    async def call(self, reply_to: str = "tcp://one", rid: str = "rid") -> Outcome:
        submit = Submit(rid, 1, reply_to, [1, 2, 3], b"", 0.0)
        return await self.replica.generate(msgspec.msgpack.encode(submit), ticket=1, prompt_tokens=3)


def test_good_settings_apply() -> None:
    """A good user_config reaches the engine by the page and the routers by the reports; sections may be missing."""
    rig = Rig()
    rig.replica.reconfigure(
        {"scheduling": {"policy": "larry", "alpha": 2.0}, "balancing": {"policy": "p2c", "stale_s": 3.0}}
    )
    assert rig.page.policies == [{"name": "larry", "alpha": 2.0}]
    assert rig.reports.settings == [{"policy": "p2c", "stale_s": 3.0}]
    rig.replica.reconfigure({"balancing": {"policy": "random"}})
    assert len(rig.page.policies) == 1
    assert rig.reports.settings[-1] == {"policy": "random"}


@pytest.mark.parametrize(
    "user_config",
    [
        {"scheduling": {"policy": "larry", "alpha": 2.0}, "balancing": {"policy": "sal", "beta": -1}},
        {"balancing": {"policy": "p2c"}, "scheduling": {"policy": "nope"}},
        {"balancing": {"policy": "p2c"}, "scheduling": {"alpha": 1.0}},
        {"balancing": {"policy": "p2c"}, "shceduling": {"policy": "fcfs"}},
    ],
)
def test_bad_settings_change_nothing(user_config: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """One bad part keeps all settings as they were, does not raise (Serve would restart the replica), and is logged."""
    rig = Rig()
    with caplog.at_level("ERROR"):
        rig.replica.reconfigure(user_config)
    assert rig.page.policies == []
    assert rig.reports.settings == []
    assert "user_config refused" in caplog.text


def test_reports_endpoint_is_announced() -> None:
    """Routers learn from the replica's metadata where its reports are."""
    assert Rig().replica.record_replica_metadata() == {"reports": Reports.endpoint}


def test_lost_ingress_aborts_its_calls() -> None:
    """When an ingress is gone its sequences are aborted in the engine, and nobody else's."""
    aborted: list[str] = []

    async def endless(submit: Submit, entries: dict[str, Any], emit: Any) -> Outcome:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            aborted.append(submit.reply_to)
            raise
        return Outcome(0)

    async def scenario() -> None:
        rig = Rig(endless)
        names = ("tcp://one", "tcp://one", "tcp://two")
        calls = [asyncio.create_task(rig.call(name, f"r{i}")) for i, name in enumerate(names)]
        await asyncio.sleep(0.01)
        rig.replica._ingress_lost("tcp://one")
        done, running = await asyncio.wait(calls, timeout=0.2)
        assert aborted == ["tcp://one"] * 2
        assert [call.result().message for call in done] == ["aborted"] * 2
        assert running == {calls[2]}
        calls[2].cancel()

    asyncio.run(scenario())


def test_cancelled_call_aborts_its_sequence() -> None:
    """Cancelling `generate` aborts the sequence in the engine before the call ends."""
    aborted: list[str] = []

    async def endless(submit: Submit, entries: dict[str, Any], emit: Any) -> Outcome:
        try:
            await asyncio.sleep(60)
        finally:
            aborted.append(submit.rid)
        return Outcome(0)

    async def scenario() -> None:
        rig = Rig(endless)
        call = asyncio.create_task(rig.call())
        await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert aborted == ["rid"]

    asyncio.run(scenario())


def test_idle_link_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection to an ingress is given up once nothing has used it for a while, not while a sequence runs."""
    monkeypatch.setattr(sequences, "IDLE_LINK_S", 0.05)

    async def scenario() -> None:
        gate = asyncio.Event()

        async def short(submit: Submit, entries: dict[str, Any], emit: Any) -> Outcome:
            if submit.reply_to == "tcp://busy":
                await gate.wait()
            return Outcome(1, "stop")

        rig = Rig(short)
        busy = asyncio.create_task(rig.call("tcp://busy"))
        assert await rig.call("tcp://idle") == Outcome(1, "stop")
        await asyncio.sleep(0.15)
        assert rig.links.forgotten == ["tcp://idle"]
        gate.set()
        await busy
        await asyncio.sleep(0.15)
        assert rig.links.forgotten == ["tcp://idle", "tcp://busy"]

    asyncio.run(scenario())


def test_dead_engine_leaves_routing_and_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead engine is reported at once, the caller still gets its answer, then the process exits with an error."""
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)

    async def broken(submit: Submit, entries: dict[str, Any], emit: Any) -> Outcome:
        return Outcome(0, fault="engine", message="engine_dead: it died")

    async def scenario() -> None:
        rig = Rig(broken)
        assert (await rig.call()).fault == "engine"
        assert rig.reports.states == []  # a failed request alone does not end a healthy engine
        rig.engine.errored = True
        assert (await rig.call()).fault == "engine"
        assert rig.reports.states == ["dead"]
        assert exits == []
        await asyncio.sleep(0.7)
        assert exits == [1]
        assert rig.page.closed

    asyncio.run(scenario())


def test_watch_says_draining_then_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any request, the stop that Serve orders and the death of the engine are reported, each once."""
    stopping = False
    monkeypatch.setattr(os, "_exit", lambda status: None)
    monkeypatch.setattr(replica, "is_stopping", lambda: stopping)

    async def scenario() -> None:
        nonlocal stopping
        rig = Rig()
        watch = asyncio.create_task(rig.replica._watch_engine())
        await asyncio.sleep(0.12)
        assert rig.reports.states == []
        stopping = True
        await asyncio.sleep(0.2)
        assert rig.reports.states == ["draining"]
        assert rig.draining.within == [7.0]
        rig.engine.errored = True
        await asyncio.wait_for(watch, 1)
        assert rig.reports.states == ["draining", "dead"]
        assert not rig.draining.on

    asyncio.run(scenario())


def test_stalled_engine_ends_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that makes no step hands its sequences back to their ingresses, and the replica ends."""
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(replica, "is_stopping", lambda: False)

    async def endless(submit: Submit, entries: dict[str, Any], emit: Any) -> Outcome:
        await asyncio.sleep(60)
        return Outcome(0)

    async def scenario() -> None:
        rig = Rig(endless)
        monkeypatch.setattr(rig.page, "read", lambda: SimpleNamespace(steps=9, running=1, waiting=0))
        setattr(rig.replica, "_stall", StallWatch(0.1))  # noqa: B010  # not declared in the bare replica
        call = asyncio.create_task(rig.call())
        await asyncio.wait_for(rig.replica._watch_engine(), 5)
        outcome = await call
        assert (outcome.fault, outcome.message) == ("engine", "stalled")
        assert rig.reports.states == ["dead"]
        await asyncio.sleep(0.7)
        assert exits == [1]

    asyncio.run(scenario())


def test_sigterm_drains_the_replica_and_ends_it_when_it_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves routing at once, is given a bounded time to drain, and its process ends after its last sequence."""
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(replica, "is_stopping", lambda: False)
    left = asyncio.Event()

    async def until_left(submit: Submit, entries: dict[str, Any], emit: Any) -> Outcome:
        await left.wait()
        return Outcome(1, "stop")

    async def scenario() -> None:
        rig = Rig(until_left)
        rig.termination.ordered = True
        call = asyncio.create_task(rig.call())
        await asyncio.sleep(0)
        watch = asyncio.create_task(rig.replica._watch_engine())
        await asyncio.sleep(0.2)
        assert (rig.reports.states, rig.draining.within) == (["draining"], [10.0])
        left.set()
        assert await call == Outcome(1, "stop")
        await asyncio.wait_for(watch, 5)
        assert rig.reports.states == ["draining", "dead"]
        await asyncio.sleep(0.7)
        assert exits == [1]

    asyncio.run(scenario())


def test_drain_by_hand_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain by hand takes the replica out of routing and ends again; one that Serve stops stays as it is."""
    stopping = False
    monkeypatch.setattr(replica, "is_stopping", lambda: stopping)

    async def scenario() -> None:
        nonlocal stopping
        rig = Rig()
        await rig.replica.drain(True)
        assert (rig.reports.states, rig.draining.within) == (["draining"], [None])
        await rig.replica.drain(False)
        assert (rig.reports.states, rig.draining.on) == (["draining", "serving"], False)
        await rig.replica.drain(False)
        stopping = True
        await rig.replica.drain(True)
        assert rig.reports.states == ["draining", "serving"]

    asyncio.run(scenario())


def test_expected_help_reaches_the_engine() -> None:
    """The coordinator's word of room elsewhere goes to the scheduler, with its end in wall-clock time."""
    rig = Rig()
    before = time.time()
    asyncio.run(rig.replica.expect_help(0.5, 2.5))
    ((seconds, until),) = rig.page.graces
    assert seconds == 0.5
    assert before + 2.5 <= until <= time.time() + 2.5


def test_serve_log_survives_a_configuration(tmp_path: Path) -> None:
    """What a replica logs after vLLM has configured logging reaches Serve's file, as before."""
    serve_logger = logging.getLogger("ray.serve")
    file = logging.FileHandler(tmp_path / "replica.log")
    buffer = MemoryHandler(1, target=file)
    serve_logger.addHandler(buffer)
    try:
        with log_kept():
            logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
        logging.getLogger("ray.serve.deployments").warning("after")
    finally:
        serve_logger.removeHandler(buffer)
    assert "after" in (tmp_path / "replica.log").read_text()
