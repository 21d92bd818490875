"""ASGI wrapper around vLLM's app: what may be reached, how large it may be, and which status a failure gets."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ray.exceptions import TaskCancelledError

from app.blame import blame
from app.errors import BodyTooLarge, FleetError, MethodNotAllowed, RouteNotFound, error_body, error_code
from app.incoming import Incoming, incoming
from app.reception import Reception
from app.request_span import of_http
from app.vllm_compat import openai_error
from deployments import metrics

logger = logging.getLogger("ray.serve.tidegate.access")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

#: The public API: path template -> methods. Everything else is 404, whatever vLLM's app would answer.
ROUTES: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("POST",),
    "/v1/completions": ("POST",),
    "/v1/responses": ("POST",),
    "/v1/responses/{id}": ("GET",),
    "/v1/responses/{id}/cancel": ("POST",),
    "/v1/messages": ("POST",),
    "/v1/messages/count_tokens": ("POST",),
    "/v1/models": ("GET",),
    "/tokenize": ("POST",),
    "/detokenize": ("POST",),
    "/version": ("GET",),
    "/health": ("GET",),
    "/health/live": ("GET",),
    "/health/ready": ("GET",),
}
#: Those that make the engines work: a tier is chosen for them, and rate limits hold.
GENERATES = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
_PATTERNS = [(re.compile("^" + path.replace("{id}", "resp_[^/]+") + "$"), path) for path in ROUTES if "{" in path]
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Gate:
    """Allow-list, keys, tiers, body limit, request ids, health, and real status codes for streams that fail early.

    `ready` answers /health/ready; `max_body_bytes` bounds request bodies (413); `reception` knows keys and tiers.
    """

    def __init__(self, app: App, ready: Callable[[], bool], max_body_bytes: int, reception: Reception) -> None:
        self._app = app
        self._ready = ready
        self._max_body_bytes = max_body_bytes
        self._reception = reception

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return  # no websockets: the server closes the connection
        started = time.monotonic()
        request_id = _request_id(scope)
        answer = _Answer(send)
        route = _route(scope["path"])
        request = Incoming(self._reception.tiers.default, span=of_http(scope, route, request_id))
        token = incoming.set(request)
        try:
            await self._serve(scope, _until_gone(receive), answer, request, route)
        except FleetError as error:
            request.error = error
            await answer.fail(error)
        except Exception as error:
            request.error = error
            logger.exception("request %s failed", request_id)
            if answer.started:
                raise
            await answer.json(500, error_body(500, f"internal error ({type(error).__name__}), request {request_id}"))
        finally:
            incoming.reset(token)
            elapsed = time.monotonic() - started
            status, who = answer.status or "closed", f" {request.tenant}" if request.tenant else ""
            metrics.HTTP_RESPONSES.at(route or "other", str(status)).inc()
            logger.info("%s %s %s %s %.3fs%s", request_id, scope["method"], scope["path"], status, elapsed, who)
            if request.span is not None:
                tier = self._reception.tiers.names[request.tier] if route in GENERATES else None
                request.span.end(tier, request.tenant, request.error, answer.status)

    async def _serve(
        self, scope: Message, receive: Receive, answer: _Answer, request: Incoming, route: str | None
    ) -> None:
        path = scope["path"]
        if route is None:
            raise RouteNotFound(f"there is no {path} here; the API is: {', '.join(ROUTES)}")
        methods = ROUTES[route]
        if scope["method"] not in methods and not (scope["method"] == "HEAD" and "GET" in methods):
            answer.headers.append((b"allow", ", ".join(methods).encode()))
            raise MethodNotAllowed(f"{path} takes {' or '.join(methods)}, not {scope['method']}")
        if path == "/health/live":
            return await answer.json(200, {"status": "live"})
        if path in ("/health", "/health/ready"):
            if self._ready():
                return await answer.json(200, {"status": "ready"})
            answer.headers.append((b"retry-after", b"5"))
            return await answer.json(503, error_body(503, "no engine replica is ready"))
        key = self._reception.authenticate(scope["headers"])
        request.tenant = None if key is None else key.tenant
        body = await _bounded_body(scope, receive, self._max_body_bytes)
        if path in GENERATES:
            body = self._reception.choose_tier(request, scope["headers"], body, key)
            answer.headers.append((b"x-tidegate-tier", self._reception.tiers.names[request.tier].encode()))
            self._reception.limit(request, key)
            answer.request = request
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # vLLM's routes know no HEAD; the server sends no body for it
        await self._app(scope, _replay(body, receive), answer.hold(path, request))


def _route(path: str) -> str | None:
    """The template in ROUTES that a path belongs to."""
    if "{" not in path and path in ROUTES:
        return path
    return next((route for pattern, route in _PATTERNS if pattern.match(path)), None)


def _until_gone(receive: Receive) -> Receive:
    """A receive that reports a client's leaving as ASGI wants it: Serve sometimes raises instead."""

    async def receive_or_gone() -> Message:
        try:
            return await receive()
        except TaskCancelledError:
            return {"type": "http.disconnect"}

    return receive_or_gone


async def _bounded_body(scope: Message, receive: Receive, limit: int) -> bytes:
    """Read the body, refusing one over `limit` bytes, announced or not."""
    length = dict(scope["headers"]).get(b"content-length", b"0")
    announced = int(length) if length.isdigit() else 0
    body, more = bytearray(), True
    while True:
        if max(announced, len(body)) > limit:
            raise BodyTooLarge(f"the request body is larger than {limit / 2**20:g} MiB (ingress.max_body_mib)")
        if not more:
            return bytes(body)
        message = await receive()
        if message["type"] != "http.request":  # the client left
            return bytes(body)
        body += message.get("body", b"")
        more = message.get("more_body", False)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive that gives the body whole, then what the server's says."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


class _Answer:
    """The response of one request: adds our headers, those of its rate limits too, and remembers its status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None
        self.started = False
        self.finished = False
        self.headers: list[tuple[bytes, bytes]] = []
        self.request: Incoming | None = None

    async def __call__(self, message: Message) -> None:
        if self.finished:
            return
        if message["type"] == "http.response.start":
            self.started = True
            self.status = message["status"]
            names = {name.lower() for name, _ in message["headers"]}
            if self.request is not None and self.request.charge is not None:
                self.headers += self.request.charge.headers()
            extra = [(name, value) for name, value in self.headers if name not in names]
            if self.status in (429, 503) and b"retry-after" not in names | {name for name, _ in extra}:
                extra.append((b"retry-after", b"1"))
            message = {**message, "headers": [*message["headers"], *extra]}
        await self._send(message)

    async def json(self, status: int, body: dict[str, Any]) -> None:
        """Send a whole JSON answer."""
        data = json.dumps(body).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await self({"type": "http.response.start", "status": status, "headers": headers})
        await self({"type": "http.response.body", "body": data})
        self.finished = True

    async def fail(self, error: FleetError) -> None:
        """Answer with an error of ours, or end the connection if the answer has begun."""
        if self.started:
            raise error
        self._explain(error)
        await self.json(error.status, error_body(error.status, error.message, code=error_code(error)))

    def _explain(self, error: Exception) -> None:
        """Add what an error of ours says in headers."""
        if not isinstance(error, FleetError):
            return
        if error.retry_after is not None:
            self._add_header(b"retry-after", str(error.retry_after).encode())
        if error.reason is not None:
            self._add_header(b"x-tidegate-reason", error.reason.encode())
        for name, value in error.headers:
            self._add_header(name, value)

    def _add_header(self, name: bytes, value: bytes) -> None:
        """Add a header to the answer, unless it has one of that name already."""
        if name not in dict(self.headers):
            self.headers.append((name, value))

    def hold(self, path: str, request: Incoming) -> Send:
        """A send that keeps the start of some answers back until their status and body are known.

        An event stream waits for its first byte: an error that `generate()` recorded in `request` before its first
        output becomes a real status. A keep-alive comment releases the 200; after that errors are in-band. An error
        answer is completed to OpenAI's shape (`_mended`).
        """
        held: Message | None = None
        body = bytearray()

        async def send(message: Message) -> None:
            nonlocal held
            if message["type"] == "http.response.start":
                if request.error is not None:
                    self._explain(request.error)
                if message["status"] >= 400 or _is_event_stream(message):
                    held = message
                    return
            elif held is not None:
                if held["status"] >= 400:
                    body.extend(message.get("body", b""))
                    if message.get("more_body", False):
                        return
                    for name, value in held["headers"]:
                        if name.lower() == b"retry-after":
                            self._add_header(b"retry-after", value)
                    return await self.json(held["status"], _mended(path, held["status"], bytes(body), request.error))
                start, held = held, None
                if request.error is not None:
                    self._explain(request.error)
                    status, answer = openai_error(request.error)
                    code = error_code(request.error) or answer["error"]["code"]
                    return await self.json(status, {"error": blame(path, {**answer["error"], "code": code})})
                await self(start)
            await self(message)

        return send


def _is_event_stream(start: Message) -> bool:
    return bool(dict(start["headers"]).get(b"content-type", b"").startswith(b"text/event-stream"))


def _mended(path: str, status: int, body: bytes, cause: Exception | None) -> dict[str, Any]:
    """An error answer of vLLM's app in OpenAI's shape (Anthropic's on its paths), with the field to blame.

    `cause` is what the fleet raised, if it did.
    """
    try:
        answer = json.loads(body)
    except ValueError:
        return error_body(status, body.decode("utf-8", "replace") or "the request failed")
    if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
        if path.startswith("/v1/messages"):
            return answer
        code = None if cause is None else error_code(cause)
        error = answer["error"] if code is None else {**answer["error"], "code": code}
        return {**answer, "error": blame(path, error)}
    detail = answer.get("detail") if isinstance(answer, dict) else None
    return error_body(status, str(detail or "the request failed"))


def _request_id(scope: Message) -> str:
    """The id that Serve took from, or gave to, the request and puts into the response.

    One that is not 1-128 visible ASCII characters is replaced for all that comes after us (answer ids, logs).
    """
    given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    if _REQUEST_ID.fullmatch(given):
        return given
    request_id = uuid.uuid4().hex
    scope["headers"] = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
    scope["headers"].append((b"x-request-id", request_id.encode()))
    return request_id
