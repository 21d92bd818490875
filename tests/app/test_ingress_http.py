"""The whole ingress over HTTP without engines: gate, vLLM's serving classes, fleet client, scripted replicas."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from app.config.model import DEFAULT_MODEL_ID
from deployments.wire import Outcome

from .asgi_client import Answer, ask
from .scripted_fleet import FleetMaker, Submission, lost_with, says, silent

TEXT = "Rome 🍕 日本語 is — done"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": DEFAULT_MODEL_ID, "messages": [{"role": "user", "content": "Hi"}]},
    COMPLETIONS: {"model": DEFAULT_MODEL_ID, "prompt": "Hi"},
}
PATHS = list(BODIES)


def reasons(answer: Answer) -> list[str]:
    """Finish reasons in a stream."""
    choices = [choice for event in answer.events if isinstance(event, dict) for choice in event.get("choices", [])]
    return [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]


@pytest.mark.parametrize("path", PATHS)
def test_stream_and_whole_agree(run: Any, make_fleet: FleetMaker, path: str) -> None:
    """The same tokens give the same text, finish reason and usage, streamed or not; a stream ends with [DONE]."""

    async def scenario() -> None:
        fleet = await make_fleet(silent)
        fleet.replicas.scripts[:] = [says(fleet.ids(TEXT), per_delta=3)]
        whole = (await fleet.post(path, BODIES[path])).json()
        choice = whole["choices"][0]
        assert (choice["message"]["content"] if path == CHAT else choice["text"]) == TEXT
        options = {"stream": True, "stream_options": {"include_usage": True}}
        answer = await fleet.post(path, {**BODIES[path], **options})
        assert answer.status == 200
        assert answer.text == TEXT
        assert reasons(answer) == [choice["finish_reason"]] == ["stop"]
        assert answer.events[-1] == "[DONE]"
        assert answer.events[-2]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_engines_refusal_is_400(run: Any, make_fleet: FleetMaker, path: str, stream: bool) -> None:
    """What only the engine finds wrong with a request is 400 with its field, before a stream starts too."""

    async def scenario() -> None:
        refusal = Outcome(0, fault="request", message="the regex cannot be compiled", parameter="structured_outputs")
        fleet = await make_fleet(lost_with(refusal))
        answer = await fleet.post(path, {**BODIES[path], "stream": stream})
        assert answer.status == 400
        error = answer.json()["error"]
        assert "cannot be compiled" in error["message"]
        assert error["param"] == "structured_outputs"

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_overload_is_429(run: Any, make_fleet: FleetMaker, path: str, stream: bool) -> None:
    """Beyond `max_queued_requests` waiting sequences: 429 and a Retry-After."""

    async def scenario() -> None:
        fleet = await make_fleet(silent, max_queued=2)
        leave = asyncio.Event()
        waiting = [asyncio.create_task(fleet.post(path, BODIES[path], leave=leave)) for _ in range(2)]
        await asyncio.sleep(0)
        while len(fleet.replicas.calls) < 2:
            await asyncio.sleep(0.01)
        answer = await fleet.post(path, {**BODIES[path], "stream": stream})
        assert answer.status == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.json()["error"]["code"] == answer.headers["x-tidegate-reason"] == "queue_full"
        leave.set()
        await asyncio.gather(*waiting)

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_overload_holds_in_a_burst(run: Any, make_fleet: FleetMaker, stream: bool) -> None:
    """Requests that arrive at once cannot slip past the limit together."""

    async def scenario() -> None:
        fleet = await make_fleet(silent, max_queued=4)
        leave = asyncio.Event()
        body = {**BODIES[CHAT], "stream": stream}
        burst = [asyncio.create_task(fleet.post(CHAT, body, leave=leave)) for _ in range(40)]
        while sum(task.done() for task in burst) < 36:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # no one more
        answers = [task.result() for task in burst if task.done()]
        assert [answer.status for answer in answers] == [429] * 36
        assert all("retry-after" in answer.headers for answer in answers)
        assert len(fleet.replicas.calls) == 4
        leave.set()
        await asyncio.gather(*burst)

    run(scenario())


def test_request_of_many_prompts_is_admitted_whole(run: Any, make_fleet: FleetMaker) -> None:
    """A request that was admitted is not cut short because its own prompts fill the queue."""

    async def scenario() -> None:
        fleet = await make_fleet(silent, max_queued=3)
        fleet.replicas.scripts[:] = [says(fleet.ids("ok"))]
        answer = await fleet.post(COMPLETIONS, {**BODIES[COMPLETIONS], "prompt": ["a", "b", "c", "d", "e"]})
        assert answer.status == 200
        assert [choice["text"] for choice in answer.json()["choices"]] == ["ok"] * 5

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_no_replica_is_503(run: Any, make_fleet: FleetMaker, path: str, stream: bool) -> None:
    """Without a replica, known before or only after sending: 503 and a Retry-After."""

    async def scenario() -> None:
        fleet = await make_fleet(lost_with(ActorDiedError()))
        for has_replica in (False, True):
            fleet.has_replica = has_replica
            answer = await fleet.post(path, {**BODIES[path], "stream": stream})
            assert answer.status == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["message"]
        assert len(fleet.replicas.calls) == 3  # all attempts of the second request

    run(scenario())


@pytest.mark.parametrize("path", PATHS)
def test_loss_in_mid_stream_is_told_in_band(run: Any, make_fleet: FleetMaker, path: str) -> None:
    """A stream that no replica can go on with ends with an error event and [DONE]; a whole answer is 503."""

    async def scenario() -> None:
        fleet = await make_fleet(silent, over_zmq=False)
        fleet.replicas.scripts[:] = [lost_with(ActorDiedError(), *fleet.ids("Rome is")), lost_with(ActorDiedError())]
        answer = await fleet.post(path, {**BODIES[path], "stream": True})
        assert answer.status == 200
        assert answer.text == "Rome is"
        assert answer.events[-1] == "[DONE]"
        error = answer.events[-2]["error"]
        assert error["code"] == 503
        assert "ask again" in error["message"]
        assert reasons(answer) == []
        whole = await fleet.post(path, BODIES[path])
        assert whole.status == 503
        assert "retry-after" in whole.headers

    run(scenario())


@pytest.mark.parametrize("path", PATHS)
def test_what_an_engine_cannot_go_on_with_is_told_in_band(run: Any, make_fleet: FleetMaker, path: str) -> None:
    """A replica whose grammar refuses the tokens so far ends the sequence with an error: in-band, or 500, no retry."""

    async def scenario() -> None:
        fleet = await make_fleet(silent, over_zmq=False)

        async def refuses(call: Submission) -> Outcome:
            call.send(finish="error")
            return Outcome(call.sent, "error")

        fleet.replicas.scripts[:] = [lost_with(ActorDiedError(), *fleet.ids("Rome is")), refuses]
        answer = await fleet.post(path, {**BODIES[path], "stream": True})
        assert (answer.status, answer.text, reasons(answer)) == (200, "Rome is", [])
        assert answer.events[-1] == "[DONE]"
        assert answer.events[-2]["error"]["code"] == 500
        assert len(fleet.replicas.calls) == 2
        fleet.replicas.calls.clear()
        whole = await fleet.post(path, BODIES[path])
        assert whole.status == 500
        assert whole.json()["error"]["message"]

    run(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_timeout_is_504(run: Any, make_fleet: FleetMaker, path: str, stream: bool) -> None:
    """A request without a token within `request_timeout_s` is 504."""

    async def scenario() -> None:
        fleet = await make_fleet(silent, timeout_s=0.1)
        answer = await fleet.post(path, {**BODIES[path], "stream": stream})
        assert answer.status == 504
        assert "request_timeout_s" in answer.json()["error"]["message"]

    run(scenario())


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_client_that_leaves_frees_the_replica(
    run: Any, make_fleet: FleetMaker, path: str, stream: bool, n: int
) -> None:
    """A connection that closes aborts the sequences on their replicas, whether tokens have come or not."""

    async def scenario() -> None:
        async def one_token(call: Submission) -> Outcome:
            call.send(500)
            return await silent(call)

        for script in (silent, one_token):
            fleet = await make_fleet(script)
            leave = asyncio.Event()
            body = {**BODIES[path], "stream": stream, "n": n, "temperature": 1.0}
            request = asyncio.create_task(fleet.post(path, body, leave=leave))
            while len(fleet.replicas.calls) < n:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.02)
            leave.set()
            await request
            assert await fleet.settle() == {}
            assert [call.state for call in fleet.replicas.calls] == ["aborted"] * n

    run(scenario())


def test_keep_alive_keeps_the_stream_open(run: Any, make_fleet: FleetMaker, server_arguments: Any) -> None:
    """With keep-alives on, a stream that waits for its first token sends comments, and errors come in-band then."""

    async def scenario() -> None:
        async def late(call: Submission) -> Outcome:
            await asyncio.sleep(1.5)
            raise ActorDiedError

        fleet = await make_fleet(late)
        arguments = type(server_arguments)(**{**vars(server_arguments), "sse_keep_alive_interval": 1})
        fleet.arguments = arguments
        answer = await fleet.post(CHAT, {**BODIES[CHAT], "stream": True}, on_chunk=lambda a: _stop_retries(fleet, a))
        assert answer.status == 200
        assert answer.chunks[0].startswith(b":")
        assert answer.events[-1] == "[DONE]"
        assert answer.events[-2]["error"]["code"] == 503

    run(scenario())


def _stop_retries(fleet: Any, answer: Answer) -> None:
    fleet.replicas.scripts.append(lost_with(ActorDiedError()))


def test_head_and_models(run: Any, make_fleet: FleetMaker) -> None:
    """The model list names the served model and hides where it lies; HEAD of it is no error."""

    async def scenario() -> None:
        gate = await (await make_fleet(silent)).gate()
        models = await ask(gate, "GET", "/v1/models")
        assert [model["id"] for model in models.json()["data"]] == [DEFAULT_MODEL_ID]
        assert b"/root" not in models.body
        assert b".cache" not in models.body
        assert (await ask(gate, "HEAD", "/v1/models")).status == 200

    run(scenario())
