"""A client that goes away frees the engine within a step or two: running or queued, stream or not, n>1 too."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from .answers import ask
from .probe import Probe
from .servers import MAX_NUM_SEQS, Server, until
from .shapes import CHAT, COMPLETIONS, RESPONSES, chat, complete, respond

pytestmark = pytest.mark.integration

# Measured: 0.05 to 2.3 s, the longer the busier the cores. An endless request would run for a minute or more.
FREED_WITHIN_S = 15.0
ENDLESS: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def probe(fleet: Server) -> Iterator[Probe]:
    """A view into the fleet, idle at first."""
    made = Probe(fleet)
    until(made.idle, 60, "an idle fleet")
    yield made
    made.close()


@contextmanager
def client(server: Server, path: str, body: dict) -> Iterator[socket.socket]:
    """A client that has sent its request; it hangs up at the end of the block, whatever it has read."""
    place = urlsplit(server.url)
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(content)}"]
    head = "\r\n".join([*lines, "", ""])
    with socket.create_connection((place.hostname, place.port), timeout=60) as connection:
        connection.sendall(head.encode() + content)
        yield connection


def read_pieces(connection: socket.socket, count: int) -> None:
    """Read a stream until it has brought `count` events."""
    text = b""
    while text.count(b"data:") < count:
        got = connection.recv(4096)
        assert got, text
        text += got


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(CHAT, chat(**ENDLESS), id="chat"),
        pytest.param(CHAT, {**chat(**ENDLESS), "temperature": 1, "n": 3}, id="chat-n3"),
        pytest.param(COMPLETIONS, complete(**ENDLESS), id="completions"),
        pytest.param(COMPLETIONS, {**complete(**ENDLESS), "prompt": ["a", "b", "c"]}, id="completions-3-prompts"),
        pytest.param(RESPONSES, respond(max_output_tokens=1500, ignore_eos=True), id="responses"),
    ],
)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "full"])
def test_disconnect_frees_the_engine(fleet: Server, probe: Probe, path: str, body: dict, stream: bool) -> None:
    """After a disconnect nothing runs, nothing waits and every KV block is free again."""
    free = probe.total("free_blocks")
    with client(fleet, path, {**body, "stream": stream}) as connection:
        if stream:
            read_pieces(connection, 4)
        until(lambda: probe.total("running") > 0, 60, "the request runs", every=0.02)
    took = until(probe.idle, 60, "an idle engine", every=0.02)
    assert took < FREED_WITHIN_S
    assert probe.total("free_blocks") == free


def test_disconnect_of_queued_requests(fleet: Server, probe: Probe) -> None:
    """Requests that still wait for a place leave the queue when their client goes, and those running stay."""
    full = {**chat(**ENDLESS), "n": MAX_NUM_SEQS, "temperature": 1, "stream": True}
    with client(fleet, CHAT, full):
        until(lambda: probe.total("running") == MAX_NUM_SEQS, 60, "a full engine")
        with ExitStack() as queued:
            for stream in [True, False] * 3:
                queued.enter_context(client(fleet, CHAT, chat(stream=stream, **ENDLESS)))
            until(lambda: probe.total("waiting") == 6, 60, "queued requests")
        took = until(lambda: probe.total("waiting") == 0, 60, "an empty queue", every=0.02)
        assert took < FREED_WITHIN_S
        assert probe.total("running") == MAX_NUM_SEQS
    until(probe.idle, 60, "an idle engine")


def test_stop_string_frees_the_engine(fleet: Server, probe: Probe) -> None:
    """A stop string is found at the ingress; the engine does not go on to max_tokens."""
    answer = ask(fleet.url, COMPLETIONS, complete(prompt="1, 2, 3, 4, 5,", stop=["9"], **ENDLESS))
    assert answer.body["choices"][0]["finish_reason"] == "stop"
    until(probe.idle, FREED_WITHIN_S, "an idle engine")


def test_disconnects_are_no_errors(fleet: Server) -> None:
    """A client that leaves is not a failure: no error and no traceback in the log."""
    before = len(fleet.log.read_text(errors="replace"))
    for stream in [True, False] * 5:
        with client(fleet, CHAT, chat(stream=stream, **ENDLESS)):
            time.sleep(0.1)
    time.sleep(1)
    assert "Traceback" not in fleet.log.read_text(errors="replace")[before:]


def test_many_random_disconnects_leak_nothing(fleet: Server, probe: Probe) -> None:
    """A hundred clients that leave at random moments leave nothing behind."""
    free = probe.total("free_blocks")

    def come_and_go(number: int) -> None:
        body = {**chat(max_tokens=200), "temperature": 1, "n": 1 + number % 3, "stream": number % 2 == 0}
        with client(fleet, CHAT, body):
            time.sleep(0.01 + number * 37 % 100 / 50)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(come_and_go, range(100)))
    until(probe.idle, 60, "an idle engine")
    assert probe.total("free_blocks") == free
