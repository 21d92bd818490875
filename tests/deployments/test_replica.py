"""EngineReplica without Serve and without an engine: live settings, calls, the end of an ingress or of the engine."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from deployments import engine, replica
from deployments.replica import EngineReplica
from deployments.wire import Outcome, Submit


class Page:
    """Stands for the load page: remembers the policies it was given."""

    def __init__(self) -> None:
        self.policies: list[dict[str, Any]] = []
        self.closed = False

    def set_policy(self, spec: dict[str, Any]) -> None:
        self.policies.append(spec)

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


class Bare(EngineReplica):
    """A replica without constructor and end, which need Serve and an engine."""

    def __init__(self) -> None: ...

    def __del__(self) -> None: ...  # type: ignore[override]  # Serve awaits the real one


class Rig:
    """A bare replica and its parts."""

    def __init__(self) -> None:
        self.replica = Bare()
        self.page, self.reports, self.links = Page(), Reports(), Links()
        self.engine = SimpleNamespace(errored=False)
        parts = {"_page": self.page, "_reports": self.reports, "_links": self.links, "_engine": self.engine}
        for name, part in {**parts, "_replica_id": "r1", "_calls": defaultdict(set)}.items():
            setattr(self.replica, name, part)

    async def call(self, reply_to: str = "tcp://one") -> Outcome:
        submit = Submit("rid", 1, reply_to, [1, 2, 3], b"", 0.0)
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


def test_lost_ingress_aborts_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """When an ingress is gone its sequences are cancelled, and nobody else's."""
    aborted: list[str] = []

    async def endless(engine: Any, submit: Submit, links: Any) -> Outcome:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            aborted.append(submit.reply_to)
            raise
        return Outcome(0)

    monkeypatch.setattr(engine, "generate", endless)

    async def scenario() -> None:
        rig = Rig()
        calls = [asyncio.create_task(rig.call(name)) for name in ("tcp://one", "tcp://one", "tcp://two")]
        await asyncio.sleep(0)
        rig.replica._ingress_lost("tcp://one")
        done, running = await asyncio.wait(calls, timeout=0.2)
        assert aborted == ["tcp://one"] * 2
        assert all(call.cancelled() for call in done)
        assert running == {calls[2]}
        calls[2].cancel()

    asyncio.run(scenario())


def test_idle_link_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection to an ingress is given up once nothing has used it for a while, not while a call runs."""
    monkeypatch.setattr(replica, "_IDLE_LINK_S", 0.05)
    gate = asyncio.Event()

    async def short(engine: Any, submit: Submit, links: Any) -> Outcome:
        if submit.reply_to == "tcp://busy":
            await gate.wait()
        return Outcome(1, "stop")

    monkeypatch.setattr(engine, "generate", short)

    async def scenario() -> None:
        rig = Rig()
        busy = asyncio.create_task(rig.call("tcp://busy"))
        assert await rig.call("tcp://idle") == Outcome(1, "stop")
        await asyncio.sleep(0.15)
        assert rig.links.forgotten == ["tcp://idle"]
        gate.set()
        await busy
        await asyncio.sleep(0.15)
        assert rig.links.forgotten == ["tcp://idle", "tcp://busy"]
        assert not rig.replica._calls

    asyncio.run(scenario())


def test_dead_engine_leaves_routing_and_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead engine is reported at once, the caller still gets its answer, then the process exits with an error."""
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)

    async def broken(engine: Any, submit: Submit, links: Any) -> Outcome:
        return Outcome(0, fault="engine", message="EngineCore died")

    monkeypatch.setattr(engine, "generate", broken)

    async def scenario() -> None:
        rig = Rig()
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
        rig.engine.errored = True
        await asyncio.wait_for(watch, 1)
        assert rig.reports.states == ["draining", "dead"]

    asyncio.run(scenario())
