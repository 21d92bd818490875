"""The gate around an ASGI app: what passes, what is refused, and which status a failing stream gets."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from app.config import load_config
from app.errors import Overloaded, ReplicaLost
from app.gate import ROUTES, Gate
from app.incoming import record_early
from app.reception import Reception

from .asgi_client import Answer, ask

LIMIT = 1000
CHAT = "/v1/chat/completions"
HEALTH = {"/health", "/health/live", "/health/ready"}
OPEN = Reception(load_config({}, "cpu"), [])
App = Callable[[Any, Any, Any], Awaitable[None]]


class Inner:
    """An app that answers with what it saw; `answer` replaces its answer."""

    def __init__(self, answer: Callable[[Any, Any], Awaitable[None]] | None = None) -> None:
        self.seen: list[tuple[str, str, bytes]] = []
        self._answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        self.seen.append((scope["method"], scope["path"], message["body"]))
        if self._answer is not None:
            return await self._answer(receive, send)
        await start(send, 200, "application/json")
        await send({"type": "http.response.body", "body": b'{"inner": true}'})


async def start(send: Any, status: int, content_type: str, **headers: str) -> None:
    """Send the start of an answer."""
    pairs = {"content-type": content_type, **{k.replace("_", "-"): v for k, v in headers.items()}}
    raw = [(k.encode(), v.encode()) for k, v in pairs.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


def request(method: str, path: str, inner: App | None = None, *, ready: bool = True, **more: Any) -> Answer:
    """One request through a gate around `inner`."""
    return asyncio.run(ask(Gate(inner or Inner(), lambda: ready, LIMIT, OPEN), method, path, **more))


def error_of(answer: Answer) -> dict[str, Any]:
    """The error object of an answer, which must have OpenAI's shape."""
    error = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert answer.headers["content-type"] == "application/json"
    return dict(error)


@pytest.mark.parametrize("path", sorted(set(ROUTES) - HEALTH))
def test_public_routes_reach_the_app(path: str) -> None:
    """Each public path and method is passed on unchanged, with its body."""
    for method in ROUTES[path]:
        inner = Inner()
        concrete = path.replace("{id}", "resp_1")
        answer = request(method, concrete, inner, body={"a": 1})
        assert answer.status == 200
        assert inner.seen == [(method, concrete, b'{"a": 1}')]


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/docs", "/openapi.json", "/metrics", "/load", "/ping", "/invocations", "/v1", "/v1/", "/v1/models/"),
        *("/V1/models", "//v1/models", "/v1/models/x", "/v1/responses/", "/v1/responses/resp_/b", "/v1/responses/{id}"),
        *(
            "/v1/responses/resp_a/cancel/b",
            "/v1/responses/a",
            "/v1/responses/{id}/cancel",
            "/v1/chat/completions/batch",
            "/health/",
            "/health/x",
        ),
        *("/v1/chat/completions/../../../docs", "/v1/load_lora_adapter", "/v1/responses/resp_a/input_items"),
    ],
)
def test_everything_else_is_404(path: str) -> None:
    """Any other path is 404 in OpenAI's shape and never reaches the app."""
    for method in ("GET", "POST", "DELETE"):
        inner = Inner()
        answer = request(method, path, inner)
        assert answer.status == 404
        assert error_of(answer)["type"] == "invalid_request_error"
        assert inner.seen == []


@pytest.mark.parametrize("path", sorted(ROUTES))
def test_other_methods_are_405(path: str) -> None:
    """A method that the path does not have is 405 with Allow."""
    for method in {"GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"} - set(ROUTES[path]):
        inner = Inner()
        answer = request(method, path.replace("{id}", "resp_1"), inner)
        assert answer.status == 405
        assert answer.headers["allow"].split(", ") == list(ROUTES[path])
        assert error_of(answer)["message"]
        assert inner.seen == []


def test_head_is_allowed_where_get_is() -> None:
    """HEAD works on what can be read and is 405 elsewhere."""
    inner = Inner()
    for path in ("/health", "/health/live", "/v1/models", "/version"):
        assert request("HEAD", path, inner).status == 200
    assert [method for method, _, _ in inner.seen] == ["GET", "GET"]
    assert request("HEAD", CHAT).status == 405


@pytest.mark.parametrize(
    ("sizes", "announced"),
    [
        ([LIMIT + 1], True),
        ([LIMIT + 1], False),
        ([400, 400, 400], False),
        ([10], LIMIT + 1),
        ([1] * (LIMIT + 1), False),
    ],
)
def test_large_body_is_413(sizes: list[int], announced: bool | int) -> None:
    """A body over the limit is 413, announced (then nothing of it is read) or chunked, and never reaches the app."""
    inner = Inner()
    headers = {}
    if announced:
        headers["content-length"] = str(sum(sizes) if announced is True else announced)
    answer = request("POST", CHAT, inner, pieces=[b"x" * size for size in sizes], headers=headers)
    assert answer.status == 413
    assert "max_body_mib" in error_of(answer)["message"]
    assert inner.seen == []


def test_body_at_the_limit_passes_whole() -> None:
    """A chunked body of exactly the limit reaches the app in one piece."""
    inner = Inner()
    assert request("POST", CHAT, inner, pieces=[b"a" * 600, b"", b"b" * 400]).status == 200
    assert inner.seen[0][2] == b"a" * 600 + b"b" * 400


@pytest.mark.parametrize("length", ["many", "-5", ""])
def test_odd_content_length_is_no_excuse(length: str) -> None:
    """A content-length that is no number neither breaks the gate nor lifts the limit."""
    assert request("POST", CHAT, pieces=[b"{}"], headers={"content-length": length}).status == 200
    assert request("POST", CHAT, pieces=[b"x" * (LIMIT + 1)], headers={"content-length": length}).status == 413


def test_app_sees_the_client_leave() -> None:
    """After the body the app's receive is the server's: it hears the disconnect."""

    async def answer(receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.disconnect"

    async def scenario() -> None:
        leave = asyncio.Event()
        leave.set()
        inner = Inner(answer)
        assert (await ask(Gate(inner, lambda: True, LIMIT, OPEN), "POST", CHAT, {}, leave=leave)).status is None
        assert len(inner.seen) == 1

    asyncio.run(scenario())


def test_health() -> None:
    """Live says yes always, ready and health only with a replica; the app is not asked."""
    inner = Inner()
    for ready in (True, False):
        assert request("GET", "/health/live", inner, ready=ready).status == 200
        for path in ("/health", "/health/ready"):
            answer = request("GET", path, inner, ready=ready)
            assert answer.status == (200 if ready else 503)
            if not ready:
                assert int(answer.headers["retry-after"]) >= 1
                assert error_of(answer)["type"] == "service_unavailable_error"
    assert inner.seen == []


def stream(*pieces: bytes, error: Exception | None = None) -> Inner:
    """An event stream whose generator recorded an error before its first byte."""

    async def answer(receive: Any, send: Any) -> None:
        await start(send, 200, "text/event-stream; charset=utf-8")
        if error is not None:
            record_early(error)
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return Inner(answer)


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [(Overloaded("full", retry_after=7), 429, "7"), (ReplicaLost("gone"), 503, "1"), (ValueError("bad"), 400, None)],
)
def test_early_error_of_a_stream_is_a_status(error: Exception, status: int, retry_after: str | None) -> None:
    """An error before the first byte of a stream is a real status with its Retry-After, and nothing of the stream."""
    answer = request("POST", CHAT, stream(b'data: {"error": 1}\n\n', b"data: [DONE]\n\n", error=error))
    assert answer.status == status
    assert answer.headers.get("retry-after") == retry_after
    assert error_of(answer)["message"] == str(error)


def test_keep_alive_releases_the_status() -> None:
    """A stream without an early error is passed on byte for byte; so is one whose keep-alive comment went first."""
    pieces = [b": keep-alive\n\n", b'data: {"a": 1}\n\n', b"data: [DONE]\n\n"]
    answer = request("POST", CHAT, stream(*pieces))
    assert (answer.status, answer.chunks) == (200, pieces)
    assert answer.headers["content-type"].startswith("text/event-stream")

    async def late(receive: Any, send: Any) -> None:
        await start(send, 200, "text/event-stream")
        await send({"type": "http.response.body", "body": pieces[0], "more_body": True})
        record_early(Overloaded("full"))
        await send({"type": "http.response.body", "body": b'data: {"error": {}}\n\n', "more_body": False})

    answer = request("POST", CHAT, Inner(late))
    assert answer.status == 200
    assert len(answer.chunks) == 2


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_always_there(status: int) -> None:
    """Every 429 and 503 of the app says when to come back: its own word if it has one, else a default, once."""
    for headers in ({}, {"retry_after": "9"}):

        async def answer(receive: Any, send: Any, headers: dict[str, str] = headers) -> None:
            await start(send, status, "application/json", **headers)
            await send({"type": "http.response.body", "body": b'{"error": {"message": "m", "code": 1}}'})

        seen: list[Any] = []

        async def scenario(answer: Any = answer, seen: list[Any] = seen) -> None:
            await raw(Gate(Inner(answer), lambda: True, LIMIT, OPEN), seen)

        asyncio.run(scenario())
        names = [v for k, v in seen[0]["headers"] if k.lower() == b"retry-after"]
        assert names == [b"9" if headers else b"1"]


async def raw(app: App, seen: list[Any]) -> None:
    """One POST whose sent messages are kept as they are."""
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        seen.append(message)

    await app(scope, receive, send)


def test_unforeseen_error_is_500() -> None:
    """An exception of the app is 500 in OpenAI's shape, names its type, not its text, and the request's id."""

    async def answer(receive: Any, send: Any) -> None:
        raise RuntimeError("secret /path")

    reply = request("POST", CHAT, Inner(answer), body={}, headers={"x-request-id": "abc-1"})
    assert reply.status == 500
    message = error_of(reply)["message"]
    assert "RuntimeError" in message
    assert "abc-1" in message
    assert "secret" not in message


def test_error_behind_a_held_start_is_500() -> None:
    """An app that fails between a stream's start and its first byte has not started yet for the client: 500."""

    async def answer(receive: Any, send: Any) -> None:
        await start(send, 200, "text/event-stream")
        raise RuntimeError

    assert request("POST", CHAT, Inner(answer), body={}).status == 500


def test_error_after_the_start_breaks_the_connection() -> None:
    """Once bytes are out an error is raised to the server, which cuts the connection: no second answer."""

    async def answer(receive: Any, send: Any) -> None:
        await start(send, 200, "application/json")
        await send({"type": "http.response.body", "body": b"{", "more_body": True})
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        request("POST", CHAT, Inner(answer), body={})


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, b"Bad"),
        (422, b'{"detail": [{"loc": ["body", "n"]}]}'),
        (405, b'{"detail":"no"}'),
        (500, b"\xff"),
        (404, b""),
    ],
)
def test_foreign_error_bodies_get_openais_shape(status: int, body: bytes) -> None:
    """Error answers of the app that are not in OpenAI's shape are put into it, with their status kept."""

    async def answer(receive: Any, send: Any) -> None:
        await start(send, status, "text/plain", content_length=str(len(body)))
        for i in range(len(body)):
            await send({"type": "http.response.body", "body": body[i : i + 1], "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    reply = request("POST", CHAT, Inner(answer), body={})
    assert reply.status == status
    assert error_of(reply)["message"]
    assert reply.headers["content-length"] == str(len(reply.body))


def test_lifespan_passes_and_websockets_do_not() -> None:
    """The app gets its start-up and shut-down; a websocket is not accepted and does not reach it."""
    scopes: list[str] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope["type"])

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def scenario() -> None:
        gate = Gate(app, lambda: True, LIMIT, OPEN)
        await gate({"type": "lifespan"}, receive, send)
        await gate({"type": "websocket", "path": CHAT, "headers": []}, receive, send)

    asyncio.run(scenario())
    assert scopes == ["lifespan"]
    assert not any(message["type"] == "websocket.accept" for message in sent)


def test_request_id_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Each request leaves one line with its id, method, path and status."""
    with caplog.at_level("INFO", logger="ray.serve.tidegate.access"):
        request("POST", CHAT, body={}, headers={"x-request-id": "id-42"})
        request("GET", "/nope", headers={"x-request-id": "id-43"})
    first, second = (record.getMessage() for record in caplog.records if record.name == "ray.serve.tidegate.access")
    assert first.startswith(f"id-42 POST {CHAT} 200 ")
    assert second.startswith("id-43 GET /nope 404 ")


@pytest.mark.parametrize("given", [None, "", "a b", "x" * 129, "line\n", "é"])
def test_unusable_request_id_is_replaced(given: str | None, caplog: pytest.LogCaptureFixture) -> None:
    """An id that could forge log lines or answer ids is replaced by one of ours, for the log and the app alike."""
    ids: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        ids.extend(value for name, value in scope["headers"] if name == b"x-request-id")
        await start(send, 200, "application/json")
        await send({"type": "http.response.body", "body": b"{}"})

    with caplog.at_level("INFO", logger="ray.serve.tidegate.access"):
        request("POST", CHAT, app, body={}, headers={} if given is None else {"x-request-id": given})
    (request_id,) = ids
    assert re.fullmatch(rb"[0-9a-f]{32}", request_id)
    assert caplog.messages[0].startswith(request_id.decode() + " POST ")


def test_anthropic_errors_keep_their_shape() -> None:
    """Errors on Anthropic's paths stay as vLLM shapes them for Anthropic's clients."""
    theirs = {"type": "error", "error": {"type": "invalid_request_error", "message": "m"}}

    async def answer(receive: Any, send: Any) -> None:
        await start(send, 400, "application/json")
        await send({"type": "http.response.body", "body": json.dumps(theirs).encode()})

    assert request("POST", "/v1/messages", Inner(answer), body={}).json() == theirs
