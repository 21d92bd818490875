"""The client by a Python handle, against an object that behaves as Serve's handles do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from loadgen.client import CHAT, COMPLETIONS, Prompt
from loadgen.metrics import RequestRecord
from loadgen.run.drive import Watch, drive
from loadgen.run.handle import HandleClient
from loadgen.workloads.workload import Request


class Refused(Exception):
    """As app/python_api.py raises it."""

    def __init__(self) -> None:
        super().__init__("429: full")
        self.status, self.error = 429, {"message": "full", "code": "queue_full"}


class TaskError(Exception):
    """As Ray wraps it."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Stream:
    """Chunks of an answer; remembers that it was cancelled."""

    def __init__(self, body: dict[str, Any], rule: str) -> None:
        self.body, self.rule, self.cancelled = body, rule, False

    async def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        if self.rule == "full":
            raise TaskError(Refused())
        for i in range(self.body["max_tokens"]):
            if self.rule == "stalls" and i == 1:
                await asyncio.sleep(60)
            if self.rule == "dies" and i == 2:
                raise TaskError(RuntimeError("gone"))
            text = f"w{i}"
            choice = {"delta": {"content": text}} if "messages" in self.body else {"text": text, "token_ids": [i]}
            yield {"choices": [choice], "usage": None, "id": "x"}
        yield {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": self.body["max_tokens"]}}

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """`handle.options(stream=True).chat_stream.remote(body)`."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.chat_stream = self.complete_stream = self

    def options(self, *, stream: bool) -> Handle:
        assert stream
        return self

    def remote(self, body: dict[str, Any]) -> Stream:
        self.streams.append(Stream(body, body.pop("rule", "")))
        return self.streams[-1]


def ask(handle: Handle, rule: str = "", leave_at: float | None = None, path: str = CHAT) -> RequestRecord:
    """One request of three tokens."""
    prompt = Prompt("a b", 3, body={"rule": rule, "priority": 2}, path=path)
    return asyncio.run(HandleClient(handle, "m").ask(prompt, 0.0, 0.0, leave_at))


def test_a_whole_answer() -> None:
    """Text, tokens, times and counts as over HTTP; the body is that of the HTTP request."""
    handle = Handle()
    record = ask(handle)
    assert (record.outcome, record.text, record.prompt_len, record.output_len) == ("ok", "w0w1w2", 7, 3)
    assert len(record.times) == 3
    body = handle.streams[0].body
    assert (body["model"], body["priority"], body["max_tokens"]) == ("m", 2, 3)
    assert not handle.streams[0].cancelled
    assert ask(handle, path=COMPLETIONS).token_ids == (0, 1, 2)


@pytest.mark.parametrize(
    ("rule", "outcome", "pieces", "status"), [("full", "shed", 0, 429), ("dies", "cut", 2, 0), ("", "ok", 3, 200)]
)
def test_failures_are_told_apart(rule: str, outcome: str, pieces: int, status: int) -> None:
    """A refusal has its status and reason, an answer that breaks off keeps what it had."""
    record = ask(Handle(), rule)
    assert (record.outcome, len(record.times), record.status) == (outcome, pieces, status)
    assert record.reason == ("queue_full" if rule == "full" else "")


def test_a_client_that_leaves_cancels_the_call() -> None:
    """At its time the client leaves, and the call is cancelled in the cluster."""
    handle = Handle()
    record = ask(handle, "stalls", leave_at=time.perf_counter() + 1.0)
    assert (record.outcome, len(record.times)) == ("cancelled", 1)
    assert handle.streams[0].cancelled


def test_it_drives_a_workload() -> None:
    """The open loop takes it in place of the HTTP client, and stops it."""
    handle = Handle()
    requests = [Request(due=0.0, prompt_tokens=2, output_tokens=3)] * 2

    async def go() -> list[RequestRecord]:
        watch = Watch(2)
        asyncio.get_running_loop().call_later(1.0, watch.stop)
        prompts = [Prompt("a", 3), Prompt("a", 3, body={"rule": "stalls"})]
        return await drive(HandleClient(handle, "m"), requests, prompts, drain=60.0, watch=watch)

    assert [r.outcome for r in asyncio.run(go())] == ["ok", "unfinished"]
