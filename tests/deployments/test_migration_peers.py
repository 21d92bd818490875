"""Calls from replica to replica without Serve: what comes back, what a failure means, what is known of the fleet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray import serve
from ray.exceptions import ActorUnavailableError
from ray.serve.exceptions import RayServeException

from deployments.migration import messages, peers
from deployments.migration.peers import Peers
from deployments.migration.source import DestinationDead, Unreachable
from deployments.routing import Heard, NoReplicaError
from deployments.wire import ReplicaReport
from policies.migration import events as e
from policies.tiers import SINGLE


def report(replica: str, state: Any = "serving") -> ReplicaReport:
    """A load report of an idle replica."""
    return ReplicaReport(replica, 1, 0.0, state, 90, 90, 16, 0, 0, 0, 0, 512, 8, 0, [])


class Handle:
    """Stands for the deployment handle; `answer` is what the next call gives or raises."""

    def __init__(self, answer: bytes | Exception) -> None:
        self.answer = answer
        self.calls: list[tuple[bytes, tuple[Any, ...], str]] = []
        self.inits: list[int] = []
        self.migration: Any = self

    def _init(self) -> None:
        self.inits.append(1)

    def remote(self, frame: bytes, *parts: Any, target_replica: str) -> Coroutine[Any, Any, bytes]:
        self.calls.append((frame, parts, target_replica))
        return self._answered()

    async def _answered(self) -> bytes:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A handle, the router that comes with it, and the object store."""
    heard: list[Heard] = []
    made = SimpleNamespace(
        handle=Handle(messages.encode_answer(e.Reserved(3))),
        router=SimpleNamespace(reports={}, tiers=SINGLE, fresh=lambda now: heard),
        heard=heard,
    )
    monkeypatch.setattr(serve, "get_deployment_handle", lambda name, app: made.handle)
    monkeypatch.setattr(peers, "find_router", lambda name: made.router)
    monkeypatch.setattr(ray, "put", lambda part: ("ref", part.nbytes))
    return made


RESERVE = messages.message("m", e.Reserve(3, 1.0), fingerprint="f")


def test_a_call(fleet: SimpleNamespace) -> None:
    """The frame goes to the named replica, blocks beside it as references; the handle is made once."""
    mine = Peers("EngineReplica", "tidegate")
    for _ in range(2):
        assert asyncio.run(mine.call("b", RESERVE, [np.zeros(16, np.uint8)])) == e.Reserved(3)
    assert fleet.handle.calls == [(messages.encode(RESERVE), (("ref", 16),), "b")] * 2
    assert fleet.handle.inits == [1]


@pytest.mark.parametrize(
    ("raised", "means"),
    [(NoReplicaError("gone"), Unreachable), (ActorUnavailableError("died", None), DestinationDead)],
)
def test_what_failures_mean(fleet: SimpleNamespace, raised: Exception, means: type[Exception]) -> None:
    """A replica that routing does not know was sent nothing; one whose actor is gone will send nothing."""
    fleet.handle.answer = raised
    with pytest.raises(means):
        asyncio.run(Peers("EngineReplica", "tidegate").call("b", RESERVE, []))


def test_ready_waits_for_the_router(fleet: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first move waits until the replica is known, but not for one that never will be."""
    monkeypatch.setattr(peers, "_KNOWN_S", 0.2)

    async def scenario() -> bool:
        asyncio.get_running_loop().call_later(0.05, fleet.router.reports.update, {"b": report("b")})
        mine = Peers("EngineReplica", "tidegate")
        waiting = asyncio.ensure_future(mine.ready("b"))
        await asyncio.sleep(0)
        waited = not waiting.done()
        await waiting
        await mine.ready("nobody")
        return waited

    assert asyncio.run(scenario())


def test_who_serves(fleet: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Destinations are those whose last report says that they serve; without Serve there are none."""
    fleet.heard += [Heard(report("a"), time.monotonic()), Heard(report("b", "draining"), time.monotonic())]
    assert [standing.replica for standing in Peers("EngineReplica", "tidegate").serving()] == ["a"]

    def deleted(name: str, app: str) -> None:
        raise RayServeException("the application is gone")

    monkeypatch.setattr(serve, "get_deployment_handle", deleted)
    assert Peers("EngineReplica", "tidegate").serving() == []
