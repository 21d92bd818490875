"""A dead engine or replica leaves routing at once; what had no token yet finishes elsewhere, the rest ends cleanly."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest

from .answers import ask, parse_events
from .probe import Probe
from .servers import MAX_NUM_SEQS, Server, until
from .shapes import CHAT, chat

pytestmark = pytest.mark.integration

ENGINE, REPLICA = "VLLM::EngineCore", "ray::ServeReplica:tidegate:EngineReplica"
ENDLESS: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def probe(fleet2: Server) -> Iterator[Probe]:
    """A view into the two-replica fleet, both replicas serving."""
    made = Probe(fleet2)
    yield made
    made.close()


def serving(probe: Probe) -> int:
    """How many replicas serve."""
    return sum(replica["state"] == "serving" for replica in probe.state().values())


@dataclass
class Streamed:
    """A streamed chat: its HTTP status and its text so far; `leave` makes the client hang up at the next piece."""

    status: int = 0
    text: str = ""
    leave: threading.Event = field(default_factory=threading.Event)

    def run(self, server: Server, body: dict) -> Streamed:
        """Read the stream to its end."""
        with httpx.stream("POST", server.url + CHAT, json={**body, "stream": True}, timeout=120, verify=False) as reply:
            self.status = reply.status_code
            for chunk in reply.iter_text():
                self.text += chunk
                if self.leave.is_set():
                    break
        return self

    @property
    def events(self) -> list[Any]:
        """The data of every event."""
        return [data for _, data in parse_events(self.text)]

    @property
    def finish(self) -> str | None:
        """The finish reason of the first choice."""
        choices = [c for data in self.events if isinstance(data, dict) for c in data.get("choices", [])]
        return next((c["finish_reason"] for c in choices if c.get("finish_reason")), None)


def victim(server: Server, title: str) -> psutil.Process:
    """The oldest living process with this title."""
    found = server.named(title)
    assert found, f"no process named {title}\n{server.tail()}"
    return found[0]


@contextmanager
def filled(server: Server, pool: ThreadPoolExecutor, probe: Probe) -> Iterator[list[Streamed]]:
    """Every place of both engines occupied by an endless stream, which all hang up in the end.

    Balancing need not spread them evenly: more are sent until no place is left, and a few may wait.
    """
    places = 2 * MAX_NUM_SEQS
    streams: list[Streamed] = []

    def full() -> bool:
        running = probe.total("running")
        if running < places and running + probe.total("waiting") == len(streams):
            streams.append(Streamed())
            pool.submit(streams[-1].run, server, chat(**ENDLESS))
        return running == places

    try:
        until(full, 120, "two full engines")
        until(lambda: sum('"content"' in stream.text for stream in streams) == places, 60, "a token in every stream")
        yield streams
    finally:
        for stream in streams:
            stream.leave.set()


def test_kill_9_of_an_engine(fleet2: Server, probe: Probe) -> None:
    """kill -9 of one engine under load.

    Requests with no token yet finish on the other replica, streams under way end in-band with [DONE], requests sent
    right after the kill are answered, and Serve brings the fleet back to two replicas.
    """
    until(lambda: serving(probe) == 2, 240, "two serving replicas", every=0.5)
    with ThreadPoolExecutor(8 * MAX_NUM_SEQS) as pool:
        with filled(fleet2, pool, probe) as running:
            queued = [pool.submit(Streamed().run, fleet2, chat(max_tokens=4)) for _ in range(6)]
            full = [pool.submit(ask, fleet2.url, CHAT, chat(max_tokens=4)) for _ in range(6)]
            behind = len(running) - 2 * MAX_NUM_SEQS
            until(lambda: probe.total("waiting") == behind + 12, 60, "queued requests")
            assert all(replica["waiting"] for replica in probe.state().values() if replica["state"] == "serving")
            victim(fleet2, ENGINE).kill()
            took = until(lambda: serving(probe) == 1, 15, "the dead replica out of routing", every=0.01)
            after = pool.submit(ask, fleet2.url, CHAT, chat(max_tokens=2))
            took += until(lambda: len(ended(running)) >= MAX_NUM_SEQS, 30, "the end of the cut streams")
            print(f"cut streams told {took:.2f} s after the kill")
            cut = ended(running)
            assert len(cut) == MAX_NUM_SEQS  # those of the other replica go on, those without a token were sent there
            for stream in cut:
                assert stream.status == 200
                assert stream.events[-1] == "[DONE]"
                assert stream.events[-2]["error"]["code"] == 503
                assert stream.events[-2]["error"]["message"]
        for one in _results(queued):
            assert (one.status, one.finish, one.events[-1]) == (200, "length", "[DONE]")
        for other in [*_results(full), after.result()]:
            assert other.status == 200, other.body
    until(lambda: serving(probe) == 2, 240, "a new second replica", every=0.5)
    assert ask(fleet2.url, CHAT, chat(max_tokens=2)).status == 200


def ended(streams: list[Streamed]) -> list[Streamed]:
    """Those that have been told their end."""
    return [stream for stream in streams if "[DONE]" in stream.text]


def _results(futures: list[Future]) -> list[Any]:
    return [future.result(timeout=120) for future in futures]


def test_no_replica_left(fleet2: Server, probe: Probe) -> None:
    """With every replica dead a request gets 503 with Retry-After, readiness says so, liveness does not."""
    for process in fleet2.named(REPLICA):
        process.kill()
    until(lambda: ready(fleet2) == 503, 30, "an unready fleet")
    for more in ({}, {"stream": True}):
        answer = ask(fleet2.url, CHAT, chat(max_tokens=2, **more))
        assert answer.status == 503, answer.body
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.body["error"]["message"]
    assert ask(fleet2.url, "/health/live", method="GET").status == 200
    assert int(ask(fleet2.url, "/health/ready", method="GET").headers["retry-after"]) >= 1


@pytest.mark.slow
def test_fleet_comes_back(fleet2: Server, probe: Probe) -> None:
    """After every replica has died Serve starts new ones, and the same ingress finds them."""
    for process in fleet2.named(REPLICA):
        process.kill()
    until(lambda: ready(fleet2) == 503, 30, "an unready fleet")
    until(lambda: ready(fleet2) == 200, 240, "replaced replicas", every=0.5)
    assert ask(fleet2.url, CHAT, chat(max_tokens=2)).status == 200


def ready(server: Server) -> int:
    """Status of the readiness route."""
    return ask(server.url, "/health/ready", method="GET").status
