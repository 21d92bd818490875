"""Streaming client against a small server of our own: what it counts, and what it calls a failure."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from loadgen.client import Prompt, StreamingClient, closed_loop, open_loop
from loadgen.metrics import RequestRecord

ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}],"usage":null}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":"hi"}}],"usage":null}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"
PAUSE = 0.05


@asynccontextmanager
async def serving(*events: bytes, status: int = 200) -> AsyncIterator[StreamingClient]:
    """A client of a server that answers every chat with these events, `PAUSE` seconds between them."""

    async def chat(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for event in events:
            await response.write(event)
            await asyncio.sleep(PAUSE)
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with StreamingClient(f"http://127.0.0.1:{port}", "m") as client:
            yield client
    finally:
        await runner.cleanup()


def ask(*events: bytes, status: int = 200) -> RequestRecord:
    """One request to such a server."""

    async def one() -> RequestRecord:
        async with serving(*events, status=status) as client:
            return (await closed_loop(client, [Prompt("x", 2)], 1))[0]

    return asyncio.run(one())


def test_a_good_stream_is_timed_at_its_first_text() -> None:
    """TTFT is the first event with text, not the one that names the role; lengths come from the usage event."""
    record = ask(ROLE, TOKEN, TOKEN, USAGE, DONE)
    assert record.error == ""
    assert (record.prompt_len, record.output_len) == (7, 2)
    assert PAUSE <= record.ttft < record.latency
    assert record.tgt >= PAUSE


@pytest.mark.parametrize(
    ("events", "status", "complaint"),
    [
        ((ROLE, TOKEN, USAGE), 200, "without [DONE]"),
        ((ROLE, USAGE, DONE), 200, "without a token"),
        ((b'{"error": {"message": "full"}}',), 503, "status 503"),
        ((ROLE, TOKEN, b'data: {"error":{"message":"engine died"}}\n\n', DONE), 200, "engine died"),
    ],
)
def test_broken_answers_are_failures(events: tuple[bytes, ...], status: int, complaint: str) -> None:
    """A cut stream, an answer without text, an error status and an in-band error each fail with their reason."""
    assert complaint in ask(*events, status=status).error


def test_no_server_is_a_failure_not_a_crash() -> None:
    """A refused connection ends in a failed record."""

    async def one() -> RequestRecord:
        async with StreamingClient("http://127.0.0.1:9", "m") as client:
            return await client.ask(Prompt("x", 1), 0.0)

    assert "Connect" in asyncio.run(one()).error


def in_flight(drive: Callable[[StreamingClient], object]) -> list[RequestRecord]:
    """Run `drive` against a good server."""

    async def go() -> list[RequestRecord]:
        async with serving(ROLE, TOKEN, USAGE, DONE) as client:
            return await drive(client)  # type: ignore[misc]

    return asyncio.run(go())


def test_closed_loop_keeps_to_its_streams() -> None:
    """At no time are more requests open than streams, and every prompt is asked once."""
    records = in_flight(lambda client: closed_loop(client, [Prompt("x", 2)] * 7, 3))
    assert len(records) == 7
    spans = [(r.sent, r.sent + r.latency) for r in records]
    assert max(sum(a <= t < b for a, b in spans) for t, _ in spans) == 3


def test_open_loop_does_not_wait_for_answers() -> None:
    """Requests go out at their times even though the first has not been answered, and wait from when they were due."""
    due = [0.0, PAUSE / 2, PAUSE]
    records = in_flight(lambda client: open_loop(client, [Prompt("x", 2)] * 3, due))
    assert [r.due for r in records] == due
    assert records[1].sent < records[0].due + records[0].latency
    assert all(r.sent >= r.due for r in records)
