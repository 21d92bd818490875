"""Streaming client against a small server of our own: what it counts, and what it calls a failure."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from loadgen.client import COMPLETIONS, Answer, Prompt, StreamingClient, closed_loop, open_loop
from loadgen.metrics import RequestRecord

ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}],"usage":null}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":"hi"}}],"usage":null}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"
PAUSE = 0.05


@asynccontextmanager
async def serving(
    *events: bytes,
    status: int = 200,
    headers: dict[str, str] | None = None,
    seen: list[tuple[str | None, dict]] | None = None,
) -> AsyncIterator[StreamingClient]:
    """A client of a server that answers every chat with these events, `PAUSE` seconds between them.

    `seen` gets the priority header and the body of each request.
    """

    async def chat(request: web.Request) -> web.StreamResponse:
        if seen is not None:
            seen.append((request.headers.get("X-Vllm-Priority"), await request.json()))
        response = web.StreamResponse(status=status, headers=headers)
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


def ask(*events: bytes, status: int = 200, headers: dict[str, str] | None = None) -> RequestRecord:
    """One request to such a server."""

    async def one() -> RequestRecord:
        async with serving(*events, status=status, headers=headers) as client:
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


def test_a_refusal_is_recorded_with_its_reason_and_wait() -> None:
    """Status, machine-readable reason and Retry-After of a refused request are in its record; a good one has 200."""
    refused = ask(b"{}", status=429, headers={"Retry-After": "7", "x-tidegate-reason": "queue_full"})
    assert (refused.status, refused.reason, refused.retry_after) == (429, "queue_full", 7.0)
    assert "429" in refused.error
    good = ask(ROLE, TOKEN, USAGE, DONE)
    assert (good.status, good.reason, good.retry_after) == (200, "", None)


def test_headers_and_body_of_a_prompt_are_sent() -> None:
    """What a prompt adds reaches the server beside what every request has."""
    seen: list[tuple[str | None, dict]] = []

    async def one() -> None:
        async with serving(ROLE, TOKEN, USAGE, DONE, seen=seen) as client:
            await client.ask(Prompt("x", 2, {"X-Vllm-Priority": "3"}, {"priority": 1}), 0.0)

    asyncio.run(one())
    ((header, body),) = seen
    assert header == "3"
    assert body["priority"] == 1
    assert body["max_tokens"] == 2


def test_what_is_forced_on_an_answer() -> None:
    """The length is forced, but not beyond the end of a grammar; 0 forces nothing; a body of its own is kept."""
    assert Prompt("x", 2).request("m")["ignore_eos"] is True
    assert Prompt("x", 2, body={"response_format": {}}).request("m")["ignore_eos"] is False
    assert "max_tokens" not in Prompt("x", 0).request("m")
    own = {"messages": [{"role": "user", "content": "y"}], "temperature": 1}
    asked = Prompt("", 2, body=own).request("m")
    assert (asked["messages"], asked["temperature"]) == (own["messages"], 1)
    assert Prompt("x", 2, path=COMPLETIONS).request("m")["prompt"] == "x"


def test_pieces_of_an_answer() -> None:
    """Chunks may end anywhere; reasoning, tool calls and token ids are pieces too; comments and blanks are nothing."""
    answer = Answer()
    stream = (
        b': ping\n\ndata: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\r\n\r\n'
        b'data:{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\n\n'
        b'data: {"choices":[{"text":"","token_ids":[5,6]}]}\n\ndata: {"choices":[{"text":"\xc3\xa9"}]}\n\n' + DONE
    )
    for i in range(0, len(stream), 7):
        assert answer.take(stream[i : i + 7], float(i)) == ""
    assert ("".join(answer.pieces), answer.token_ids, len(answer.times)) == ("hm\u00e9", [5, 6], 4)
    assert answer.finished
    assert answer.times == sorted(answer.times)
    assert "not understood" in Answer().take(b'data: {"choices": 3}\n', 0.0)
    assert "not understood" in Answer().take_object({"choices": 3}, 0.0)


def test_a_silent_server_is_a_failure() -> None:
    """A request that has no end within the client's patience fails; it is not taken for one that the client left."""

    async def one() -> RequestRecord:
        async with (
            serving(ROLE, TOKEN, *[b": wait\n\n"] * 100) as server,
            StreamingClient(server._base, "m", timeout_s=10 * PAUSE) as client,
        ):
            return await client.ask(Prompt("x", 2), 0.0)

    record = asyncio.run(one())
    assert "TimeoutError" in record.error
    assert (record.outcome, record.left) == ("cut", "")


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
