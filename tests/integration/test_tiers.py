"""Priority tiers on a running fleet: which one a request gets, who makes way, who is refused and how."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest

from .answers import ask
from .probe import Probe
from .servers import MAX_NUM_SEQS, MAX_QUEUED, MODEL, Server, until
from .shapes import CHAT, COMPLETIONS, chat, complete

pytestmark = pytest.mark.integration

CRITICAL, STANDARD, BACKGROUND = "0", "1", "3"
TIER = "X-Vllm-Priority"
# A step is running, the next one makes room or prefills, and the answer passes replica, ingress and proxy.
WITHIN_STEPS = 12


@pytest.fixture(scope="module")
def probe(fleet: Server) -> Iterator[Probe]:
    """A view into the fleet, idle at first."""
    made = Probe(fleet)
    until(made.idle, 60, "an idle fleet")
    yield made
    made.close()


@dataclass
class Stream:
    """A streamed completion: its status, headers, and text pieces with the times at which they came."""

    status: int = 0
    headers: httpx.Headers = field(default_factory=httpx.Headers)
    pieces: list[tuple[float, str]] = field(default_factory=list)
    finish: str | None = None
    refusal: dict[str, Any] = field(default_factory=dict)
    leave: threading.Event = field(default_factory=threading.Event)

    @property
    def text(self) -> str:
        """What was streamed so far."""
        return "".join(piece for _, piece in self.pieces)

    def pieces_between(self, begin: float, end: float) -> int:
        """How many pieces came in that time."""
        return sum(begin < t <= end for t, _ in self.pieces)

    def read(self, url: str, body: dict[str, Any], tier: str) -> Stream:
        """Send the request and read to its end, or hang up at the next piece once `leave` is set."""
        content, headers = {**body, "stream": True}, {TIER: tier}
        with httpx.stream("POST", url, json=content, headers=headers, timeout=120, verify=False) as reply:
            self.status, self.headers = reply.status_code, reply.headers
            if self.status != 200:
                self.refusal = json.loads(reply.read())["error"]
                return self
            for line in reply.iter_lines():
                if self.leave.is_set():
                    break
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    self.pieces.append((time.monotonic(), choice["text"]))
                    self.finish = choice["finish_reason"] or self.finish
        return self


@contextmanager
def streams(server: Server, bodies: list[dict[str, Any]], tier: str) -> Iterator[list[Stream]]:
    """Streams of these completions, all read at once; those still open at the end of the block hang up."""
    made = [Stream() for _ in bodies]
    with ThreadPoolExecutor(len(bodies)) as pool:
        reading = [pool.submit(s.read, server.url + COMPLETIONS, b, tier) for s, b in zip(made, bodies, strict=True)]
        try:
            yield made
        finally:
            for stream in made:
                stream.leave.set()
            for future in reading:
                future.result(timeout=120)


def stories(count: int, tokens: int) -> list[dict[str, Any]]:
    """Completions of exactly so many tokens, all different."""
    return [
        complete(prompt=f"Story number {i}: once upon a time", max_tokens=tokens, ignore_eos=True) for i in range(count)
    ]


@pytest.mark.parametrize(
    ("body", "header", "expected"),
    [
        pytest.param({}, None, "standard", id="none"),
        pytest.param({"priority": 0}, None, "critical", id="priority"),
        pytest.param({"priority": 0}, BACKGROUND, "critical", id="priority-before-header"),
        pytest.param({"priority": 99}, None, "background", id="beyond-the-last"),
        pytest.param({"priority": -5}, None, "critical", id="before-the-first"),
        pytest.param({"priority": "urgent!"}, None, "standard", id="garbage"),
        pytest.param({"priority": [1]}, None, "standard", id="garbage-list"),
        pytest.param({}, "background", "background", id="header-name"),
        pytest.param({}, "2", "relaxed", id="header-number"),
        pytest.param({}, "drop; -- 1", "standard", id="garbage-header"),
        pytest.param({"service_tier": "flex"}, None, "background", id="service-tier"),
        pytest.param({"service_tier": "gold"}, None, "standard", id="garbage-service-tier"),
    ],
)
def test_a_request_gets_its_tier(fleet: Server, body: dict, header: str | None, expected: str) -> None:
    """Field and header name the tier, what nobody understands means the default, and the answer says which it was."""
    headers = {} if header is None else {TIER: header}
    answer = ask(fleet.url, CHAT, chat(max_tokens=1, **body), headers=headers)
    assert answer.status == 200, answer.body
    assert answer.headers["x-tidegate-tier"] == expected


def test_equals_do_not_displace_each_other_and_critical_displaces_background(fleet: Server, probe: Probe) -> None:
    """A critical request enters a full batch within a few steps, and the one that made way loses nothing.

    Every sequence slot runs a background request, one more waits. Alone, nobody is preempted; beside the critical
    request somebody is, yet all background streams go on to the same greedy float32 answers.
    """
    bodies = stories(MAX_NUM_SEQS + 1, 80)
    before = probe.total("preemptions")
    with streams(fleet, bodies, BACKGROUND) as undisturbed:
        until(lambda: all(s.finish for s in undisturbed), 120, "all end")
    assert probe.total("preemptions") == before
    with streams(fleet, bodies, BACKGROUND) as background:
        until(lambda: probe.total("running") == MAX_NUM_SEQS and probe.total("waiting") == 1, 60, "a full batch")
        sent = time.monotonic()
        critical = Stream().read(fleet.url + COMPLETIONS, complete(max_tokens=2, ignore_eos=True), CRITICAL)
        first = critical.pieces[0][0]
        assert not any(s.finish for s in background)
        assert max(s.pieces_between(sent, first) for s in background) <= WITHIN_STEPS
        assert probe.total("preemptions") > before
        until(lambda: all(s.finish for s in background), 120, "all end")
    assert critical.headers["x-tidegate-tier"] == "critical"
    assert [s.text for s in background] == [s.text for s in undisturbed]
    assert {s.finish for s in background} == {"length"}


@pytest.fixture
def full_queue(fleet: Server, probe: Probe) -> Iterator[list[Stream]]:
    """A background request with so many sequences that every slot runs one and the ingress' queue is full."""
    until(probe.idle, 60, "an idle fleet")
    sequences = MAX_NUM_SEQS + MAX_QUEUED
    body = complete(max_tokens=1500, ignore_eos=True, temperature=1, n=sequences)
    with streams(fleet, [body], BACKGROUND) as filler:
        until(lambda: probe.total("waiting") == MAX_QUEUED, 60, "a full queue")
        yield filler
    until(probe.idle, 60, "an idle fleet")


def test_a_full_queue_refuses_with_reason_and_wait(fleet: Server, full_queue: list[Stream]) -> None:
    """Beyond the bound, streams and whole answers alike get 429, seconds to wait, and a machine-readable reason."""
    for stream in (False, True):
        answer = ask(fleet.url, CHAT, chat(stream=stream), headers={TIER: BACKGROUND})
        assert answer.status == 429
        assert answer.headers["x-tidegate-reason"] == "queue_full"
        assert answer.headers["x-tidegate-tier"] == "background"
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.body["error"]["code"] == "queue_full"


def test_a_waiting_request_is_shed_for_a_higher_tier(fleet: Server, probe: Probe) -> None:
    """When the queue is full, a higher tier's request takes the place of one that waits in a lower tier."""
    until(probe.idle, 60, "an idle fleet")
    endless = complete(max_tokens=1500, ignore_eos=True, temperature=1, n=MAX_NUM_SEQS)
    waiting = complete(max_tokens=1, temperature=1, n=MAX_QUEUED)
    with streams(fleet, [endless], STANDARD) as running:
        # The ingress counts a sequence until its first token is here, not until it runs.
        until(lambda: len(running[0].pieces) >= 3 * MAX_NUM_SEQS, 60, "tokens of a full batch")
        with streams(fleet, [waiting], BACKGROUND) as shed:
            until(lambda: probe.total("waiting") == MAX_QUEUED, 60, "a full queue")
            answer = ask(fleet.url, COMPLETIONS, complete(max_tokens=1), headers={TIER: CRITICAL})
            assert answer.status == 200
            until(lambda: shed[0].status, 30, "the background request is answered")
            assert shed[0].status == 429
            assert shed[0].headers["x-tidegate-reason"] == "shed"
            assert int(shed[0].headers["retry-after"]) >= 1
            assert shed[0].refusal["code"] == "shed"
        assert running[0].status == 200
    until(probe.idle, 60, "an idle fleet")


def test_the_openai_client_waits_as_told(fleet: Server, full_queue: list[Stream]) -> None:
    """OpenAI's client tries again after Retry-After of its own accord, and succeeds once there is room."""
    answers: list[tuple[float, Any]] = []

    def note(response: Any) -> None:
        answers.append((time.monotonic(), response))
        full_queue[0].leave.set()

    with (
        openai.DefaultHttpxClient(event_hooks={"response": [note]}) as http,
        openai.OpenAI(
            base_url=fleet.url + "/v1", api_key="unused", max_retries=8, timeout=120, http_client=http
        ) as client,
    ):
        reply = client.completions.create(model=MODEL, prompt="Hello", max_tokens=2, extra_headers={TIER: CRITICAL})
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 2
    assert [r.status_code for _, r in answers] == [429] * (len(answers) - 1) + [200]
    assert len(answers) >= 2
    # Left to itself the client would wait half a second before its first retry.
    assert answers[1][0] - answers[0][0] >= int(answers[0][1].headers["retry-after"])
