"""The Python API: the same answers and refusals as HTTP, as dicts and RequestRefused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from app.config.model import DEFAULT_MODEL_ID
from app.python_api import RequestRefused
from deployments.wire import Outcome

from .scripted_fleet import END, FleetMaker, Submission, says, silent

TEXT = "Rome 🍕 is the capital"
CHAT = {"model": DEFAULT_MODEL_ID, "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": DEFAULT_MODEL_ID, "prompt": "Water boils at"}


async def drain(stream: AsyncIterator[Any]) -> None:
    """Read a stream to its end."""
    async for _ in stream:
        pass


def test_chat_and_complete(run: Any, make_fleet: FleetMaker) -> None:
    """Whole and streamed answers carry the same text, finish reason and OpenAI object types."""

    async def scenario() -> None:
        fleet = await make_fleet(silent)
        fleet.replicas.scripts[:] = [says(fleet.ids(TEXT), per_delta=2)]
        api = await fleet.python()
        chat, complete = await api.chat(CHAT), await api.complete({**COMPLETION, "stream": True})
        assert chat["object"] == "chat.completion"
        assert chat["choices"][0]["message"]["content"] == complete["choices"][0]["text"] == TEXT
        assert chat["choices"][0]["finish_reason"] == "stop"
        assert chat["usage"]["completion_tokens"] == len(fleet.ids(TEXT)) + 1
        chunks = [chunk async for chunk in api.chat_stream(CHAT)]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == TEXT
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        pieces = [chunk async for chunk in api.complete_stream(COMPLETION)]
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == TEXT

    run(scenario())


def test_generate_tokens(run: Any, make_fleet: FleetMaker) -> None:
    """Token ids in, token ids out, whole or piece by piece."""

    async def scenario() -> None:
        fleet = await make_fleet(silent)
        ids = fleet.ids(TEXT)
        fleet.replicas.scripts[:] = [says(ids)]
        api = await fleet.python()
        whole = await api.generate_tokens([504, 3575], {"max_tokens": 50})
        assert whole == {"token_ids": [*ids, END], "text": TEXT, "finish_reason": "stop", "stop_reason": None}
        assert fleet.replicas.calls[0].submit.prompt == [504, 3575]
        cut = await api.generate_tokens([504], {"max_tokens": 3})
        assert (cut["token_ids"], cut["finish_reason"]) == (ids[:3], "length")
        pieces = [piece async for piece in api.generate_tokens_stream([504], {"max_tokens": 50})]
        assert [token for piece in pieces for token in piece["token_ids"]] == [*ids, END]
        assert [piece["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["stop"]

    run(scenario())


@pytest.mark.parametrize(
    ("method", "arguments", "status"),
    [
        ("chat", ({**CHAT, "messages": "hello"},), 400),
        ("chat", ({"model": DEFAULT_MODEL_ID},), 400),
        ("chat", ({**CHAT, "temperature": -1},), 400),
        ("chat", ({**CHAT, "model": "nope"},), 404),
        ("complete", ({**COMPLETION, "max_tokens": -1},), 400),
        ("complete", ({**COMPLETION, "prompt": "word " * 3000},), 400),
        ("generate_tokens", ([504], {"n": 2, "temperature": 1.0}), 400),
        ("generate_tokens", ([504], {"max_tokens": 0}), 400),
        ("generate_tokens", ([504], {"no_such": 1}), 400),
        ("generate_tokens", ([10**9], {}), 400),
        ("generate_tokens", ([], {}), 400),
    ],
)
def test_bad_calls_are_refused(
    run: Any, make_fleet: FleetMaker, method: str, arguments: tuple[Any, ...], status: int
) -> None:
    """A caller's mistake is RequestRefused with HTTP's status and OpenAI's error object, streamed or not."""

    async def scenario() -> None:
        fleet = await make_fleet(silent)
        api = await fleet.python()
        with pytest.raises(RequestRefused) as whole:
            await getattr(api, method)(*arguments)
        with pytest.raises(RequestRefused) as streamed:
            await drain(getattr(api, f"{method}_stream")(*arguments))
        for refused in (whole.value, streamed.value):
            assert refused.status == refused.error["code"] == status
            assert refused.error["message"]
        assert fleet.replicas.calls == []

    run(scenario())


def test_fleet_errors_reach_the_caller(run: Any, make_fleet: FleetMaker) -> None:
    """Overload, no replica, and a replica lost before or after the first token have HTTP's status here too."""

    async def scenario() -> None:
        async def dies(call: Submission) -> Outcome:
            if not call.submit.output:
                call.send(500)
                await asyncio.sleep(0.02)
            raise ActorDiedError

        fleet = await make_fleet(dies)
        api = await fleet.python()
        for calls in (api.chat_stream(CHAT), api.generate_tokens_stream([504], {})):
            await anext(calls)  # it has begun
            with pytest.raises(RequestRefused) as refused:
                await drain(calls)
            assert refused.value.status == 503
        with pytest.raises(RequestRefused) as refused:
            await api.chat(CHAT)
        assert refused.value.status == 503
        fleet.has_replica = False
        for call in (api.chat(CHAT), api.generate_tokens([504], {})):
            with pytest.raises(RequestRefused) as refused:
                await call
            assert refused.value.status == 503
        full = await make_fleet(silent, max_queued=1)
        waiting = asyncio.create_task((await full.python()).generate_tokens([504], {}))
        await asyncio.sleep(0.02)
        with pytest.raises(RequestRefused) as refused:
            await (await full.python()).chat(CHAT)
        assert refused.value.status == 429
        waiting.cancel()

    run(scenario())


def test_leaving_a_stream_aborts_it(run: Any, make_fleet: FleetMaker) -> None:
    """A caller that stops reading, as Serve does by closing the generator, frees the replica."""

    async def scenario() -> None:
        async def script(call: Submission) -> Outcome:
            call.send(500)
            return await silent(call)

        fleet = await make_fleet(script)
        api = await fleet.python()
        for stream in (api.chat_stream(CHAT), api.complete_stream(COMPLETION), api.generate_tokens_stream([504], {})):
            async for _ in stream:
                break
            await stream.aclose()  # type: ignore[attr-defined]
            assert await fleet.settle() == {}
        assert [call.state for call in fleet.replicas.calls] == ["aborted"] * 3

    run(scenario())
