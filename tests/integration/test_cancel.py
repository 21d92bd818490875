"""A client that goes away frees the engine within a step or two: running or queued, stream or not, n>1 too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest

from .answers import ask
from .probe import Probe
from .servers import MAX_NUM_SEQS, Server, until
from .shapes import CHAT, COMPLETIONS, RESPONSES, chat, complete, respond

pytestmark = pytest.mark.integration

# Load reports come at 10 Hz or faster and an engine step of one sequence takes some 20-50 ms on a busy core.
FREED_WITHIN_S = 2.0
ENDLESS: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def probe(fleet: Server) -> Iterator[Probe]:
    """A view into the fleet, idle at first."""
    made = Probe(fleet)
    until(lambda: idle(made), 30, "an idle fleet")
    yield made
    made.close()


def idle(probe: Probe) -> bool:
    """Whether no replica has a request or a used KV block that the prefix cache could not give back."""
    return probe.total("running") == probe.total("waiting") == 0 and probe.total("queued_tokens") == 0


def leave_stream(server: Server, path: str, body: dict, pieces: int) -> None:
    """Open a stream, read some pieces, close the connection."""
    with httpx.stream("POST", server.url + path, json=body, timeout=60) as reply:
        assert reply.status_code == 200
        lines = (line for line in reply.iter_lines() if line.startswith("data:"))
        for _ in range(pieces):
            next(lines)


def leave_waiting(server: Server, path: str, body: dict, after: float) -> None:
    """Send a request and close the connection before its answer."""
    with suppress(httpx.ReadTimeout), httpx.Client(timeout=httpx.Timeout(60, read=after)) as client:
        client.post(server.url + path, json=body)


SAMPLED = {"temperature": 1.0, "n": 3}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(CHAT, chat(**ENDLESS), id="chat"),
        pytest.param(CHAT, {**chat(**ENDLESS), **SAMPLED}, id="chat-n3"),
        pytest.param(COMPLETIONS, complete(**ENDLESS), id="completions"),
        pytest.param(COMPLETIONS, {**complete(**ENDLESS), "prompt": ["a", "b", "c"]}, id="completions-3-prompts"),
        pytest.param(RESPONSES, respond(max_output_tokens=1500, ignore_eos=True), id="responses"),
    ],
)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "full"])
def test_disconnect_frees_the_engine(fleet: Server, probe: Probe, path: str, body: dict, stream: bool) -> None:
    """After a disconnect nothing runs, nothing waits and every KV block is free again."""
    free = probe.total("free_blocks")
    if stream:
        leave_stream(fleet, path, {**body, "stream": True}, pieces=4)
    else:
        with ThreadPoolExecutor() as pool:
            gone = pool.submit(leave_waiting, fleet, path, body, 1.5)
            until(lambda: probe.total("running") > 0, 10, "the request runs", every=0.02)
            gone.result()
    took = until(lambda: idle(probe), 20, "an idle engine", every=0.02)
    assert took < FREED_WITHIN_S
    assert probe.total("free_blocks") == free


def test_disconnect_of_queued_requests(fleet: Server, probe: Probe) -> None:
    """Requests that still wait for a place leave the queue when their client goes, and those running stay."""
    with ExitStack() as running, ThreadPoolExecutor(8) as pool:
        full = {**chat(**ENDLESS), "n": MAX_NUM_SEQS, "temperature": 1.0, "stream": True}
        reply = running.enter_context(httpx.stream("POST", fleet.url + CHAT, json=full, timeout=60))
        assert reply.status_code == 200
        until(lambda: probe.total("running") == MAX_NUM_SEQS, 20, "a full engine")
        bodies = [chat(stream=kind, **ENDLESS) for kind in [True, False] * 3]
        queued = [pool.submit(leave_waiting, fleet, CHAT, body, 2.0) for body in bodies]
        until(lambda: probe.total("waiting") == len(queued), 10, "queued requests")
        for request in queued:
            request.result()
        until(lambda: probe.total("waiting") == 0, FREED_WITHIN_S, "an empty queue")
        assert probe.total("running") == MAX_NUM_SEQS
    until(lambda: idle(probe), 20, "an idle engine")


def test_stop_string_frees_the_engine(fleet: Server, probe: Probe) -> None:
    """A stop string is found at the ingress; the engine does not go on to max_tokens."""
    answer = ask(fleet.url, COMPLETIONS, complete(prompt="1, 2, 3, 4, 5,", stop=["9"], **ENDLESS))
    assert answer.body["choices"][0]["finish_reason"] == "stop"
    until(lambda: idle(probe), FREED_WITHIN_S, "an idle engine")


@pytest.mark.slow
def test_many_random_disconnects_leak_nothing(fleet: Server, probe: Probe) -> None:
    """A hundred clients that leave at random moments leave nothing behind."""
    free = probe.total("free_blocks")
    with ThreadPoolExecutor(16) as pool:
        for number in range(100):
            body = {**chat(max_tokens=200), "temperature": 1.0, "n": 1 + number % 3, "stream": number % 2 == 0}
            pool.submit(leave_waiting, fleet, CHAT, body, 0.01 + (number * 37 % 100) / 50)
    time.sleep(FREED_WITHIN_S)
    until(lambda: idle(probe), 20, "an idle engine")
    assert probe.total("free_blocks") == free
