"""Streamed completions against a small server of our own: ids, times, and what counts as an end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from loadgen.token_stream import TokenClient, TokenPrompt, TokenStream, closed_loop

PAUSE = 0.05
DONE = b"data: [DONE]\n\n"


def token(*ids: int, finish: str | None = None) -> bytes:
    """An event of a completion stream with these token ids."""
    choice = {"text": "x", "token_ids": list(ids), "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


WHOLE = (token(7), token(8, 9), token(10, finish="length"), DONE)


@asynccontextmanager
async def serving(
    events: tuple[bytes, ...], status: int = 200, seen: list[dict[str, Any]] | None = None
) -> AsyncIterator[TokenClient]:
    """A client of a server that answers every completion with these events, `PAUSE` seconds between them."""

    async def complete(request: web.Request) -> web.StreamResponse:
        if seen is not None:
            seen.append({**await request.json(), "session": request.headers.get("X-Session-ID")})
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for event in events:
            await response.write(event)
            await asyncio.sleep(PAUSE)
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with TokenClient(f"http://127.0.0.1:{runner.addresses[0][1]}", "m") as client:
            yield client
    finally:
        await runner.cleanup()


def ask(*events: bytes, status: int = 200) -> TokenStream:
    """One request to such a server."""

    async def one() -> TokenStream:
        async with serving(events, status) as client:
            return await client.ask(TokenPrompt((1, 2), 4))

    return asyncio.run(one())


def test_each_token_has_its_id_and_its_time() -> None:
    """Ids come in order, those of one event at one time, those of the next event later."""
    stream = ask(*WHOLE)
    assert stream.whole
    assert (stream.ids, stream.finish, stream.error) == ([7, 8, 9, 10], "length", "")
    first, second, third, fourth = stream.times
    assert stream.sent < first < second == third < fourth <= stream.ended_at


def test_request_asks_for_token_ids() -> None:
    """The prompt's ids, the forced length, and what the prompt adds are sent."""
    seen: list[dict[str, Any]] = []

    async def one() -> None:
        async with serving(WHOLE, seen=seen) as client:
            await client.ask(TokenPrompt((1, 2), 4, {"X-Session-ID": "s"}, {"temperature": 0.5, "seed": 3}))

    asyncio.run(one())
    wanted = {"prompt": [1, 2], "max_tokens": 4, "ignore_eos": True, "return_token_ids": True, "temperature": 0.5}
    assert {**wanted, "seed": 3, "session": "s"}.items() <= seen[0].items()


@pytest.mark.parametrize(
    ("events", "status", "complaint"),
    [
        (WHOLE[:2], 200, "without a finish reason"),
        (WHOLE[:3], 200, "without a finish reason or [DONE]"),
        ((token(7), b'data: {"error": {"message": "lost"}}\n\n', DONE), 200, "lost"),
        ((b'{"error": "full"}',), 503, "status 503"),
    ],
)
def test_what_does_not_end_well_is_told(events: tuple[bytes, ...], status: int, complaint: str) -> None:
    """A cut stream, an error in it and a refusal are errors; the tokens that came are kept."""
    stream = ask(*events, status=status)
    assert not stream.whole
    assert complaint in stream.error
    assert stream.status == status
    assert stream.ids == ([] if status != 200 else [7, 8, 9, 10][: len(stream.ids)])


def test_waiting_for_tokens() -> None:
    """`reach` returns as soon as the tokens are there, and says so when they will never be."""

    async def one() -> None:
        async with serving(WHOLE) as client:
            stream = client.start(TokenPrompt((1,), 4))
            await stream.reach(2)
            assert not stream.over
            with pytest.raises(RuntimeError, match="after 4 of 5 tokens"):
                await stream.reach(5)

    asyncio.run(one())


def test_a_cancelled_stream_is_over() -> None:
    """Leaving ends the stream with an error, and whoever waits for it goes on."""

    async def one() -> None:
        async with serving((token(7), *[token(8)] * 200)) as client:
            stream = client.start(TokenPrompt((1,), 400))
            await stream.reach(1)
            await stream.cancel()
            assert (await stream.ended()).error == "cancelled"

    asyncio.run(one())


def test_answers_of_a_closed_loop_are_in_order() -> None:
    """Every prompt is asked once and its answer stands in its place."""

    async def all_() -> list[TokenStream]:
        async with serving(WHOLE) as client:
            return await closed_loop(client, [TokenPrompt((i,), 4) for i in range(5)], 2)

    assert [stream.prompt.ids for stream in asyncio.run(all_())] == [(i,) for i in range(5)]
