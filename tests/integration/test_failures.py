"""A dead engine or replica leaves routing at once, and its streams go on elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest

from .answers import ask, parse_events
from .probe import Probe
from .servers import MAX_NUM_SEQS, Server, until
from .shapes import CHAT, chat

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ENGINE, REPLICA = "VLLM::EngineCore", "ray::ServeReplica:tidegate:EngineReplica"
TOKENS = 60


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
    """A streamed chat: its HTTP status and its raw text so far."""

    status: int = 0
    text: str = ""

    def run(self, server: Server, body: dict) -> Streamed:
        """Read the stream to its end."""
        with httpx.stream("POST", server.url + CHAT, json={**body, "stream": True}, timeout=240, verify=False) as reply:
            self.status = reply.status_code
            for chunk in reply.iter_text():
                self.text += chunk
        return self

    @property
    def pieces(self) -> int:
        """Events that have come."""
        return self.text.count("data: ")

    @property
    def events(self) -> list[Any]:
        """The data of every event."""
        return [data for _, data in parse_events(self.text)]

    @property
    def text_of_answer(self) -> str:
        """All content, and how it ended."""
        choices = [c for data in self.events if isinstance(data, dict) for c in data.get("choices", [])]
        ends = [c["finish_reason"] for c in choices if c.get("finish_reason")]
        return "".join(c["delta"].get("content") or "" for c in choices) + f" <{ends}>"


def victim(server: Server, title: str) -> psutil.Process:
    """The oldest living process with this title."""
    found = server.named(title)
    assert found, f"no process named {title}\n{server.tail()}"
    return found[0]


def question(number: int) -> dict[str, str]:
    """One user message of many."""
    return {"role": "user", "content": f"Tell me about the number {number}."}


def bodies() -> list[dict]:
    """As many requests as two engines have places: greedy, seeded, with penalties, with a grammar."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 0.8, "seed": 6, "presence_penalty": 1.0},
        {"temperature": 0, "ignore_eos": False, "response_format": {"type": "json_object"}},
    ]
    return [
        {**chat(messages=[question(i)], max_tokens=TOKENS, ignore_eos=True), **kinds[i % len(kinds)]}
        for i in range(2 * MAX_NUM_SEQS)
    ]


@pytest.mark.parametrize("title", [ENGINE, pytest.param(REPLICA, marks=pytest.mark.soak)])
def test_kill_9_in_mid_stream(fleet2: Server, probe: Probe, title: str) -> None:
    """Streams whose engine or replica is killed go on elsewhere, and their text is that of an undisturbed run.

    The dead replica is out of routing at once, requests sent right after the kill are answered, and Serve brings the
    fleet back to two replicas.
    """
    until(lambda: serving(probe) == 2, 240, "two serving replicas", every=0.5)
    with ThreadPoolExecutor(4 * MAX_NUM_SEQS) as pool:
        undisturbed = [pool.submit(Streamed().run, fleet2, body) for body in bodies()]
        expected = [stream.text_of_answer for stream in _results(undisturbed)]
        streams = [Streamed() for _ in bodies()]
        running = [pool.submit(s.run, fleet2, body) for s, body in zip(streams, bodies(), strict=True)]
        until(lambda: all(stream.pieces >= 3 for stream in streams), 120, "tokens in every stream")
        victim(fleet2, title).kill()
        took = until(lambda: serving(probe) == 1, 15, "the dead replica out of routing", every=0.01)
        print(f"out of routing {took:.2f} s after the kill")
        after = pool.submit(ask, fleet2.url, CHAT, chat(max_tokens=2))
        for stream, text in zip(_results(running), expected, strict=True):
            assert stream.status == 200
            assert stream.events[-1] == "[DONE]"
            assert stream.text_of_answer == text
        assert after.result().status == 200
    until(lambda: serving(probe) == 2, 240, "a new second replica", every=0.5)
    assert ask(fleet2.url, CHAT, chat(max_tokens=2)).status == 200


def _results(futures: list[Future]) -> list[Any]:
    return [future.result(timeout=240) for future in futures]


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
