"""The admin HTTP server: page, JSON, actions. ASGI, so that tests need no port and no fleet.

GET  /status              the page; it holds no facts and takes them from
GET  /status.json         app.admin.status.Status (needs the token where other machines reach the port)
GET  /status.schema.json  its JSON schema
GET  /health              200 while this server runs
POST /actions/drain       {"replica": ID}, /actions/undrain likewise
POST /actions/migration   {"paused": true or false}: moves by policy
POST /actions/settings    {"scheduling": {...}, "balancing": {...}}: as in user_config

A POST needs `Authorization: Bearer TOKEN`, which no other site can make a browser send, a JSON body, and, where the
browser names an origin, our own. Nothing changes by GET. Errors are {"error": {"code", "message", "field"}}.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from app.admin.fleet import AwayError, FleetView, RefusedError
from app.admin.status import Status
from app.config.keys import is_loopback

LARGEST_BODY = 16_384  # bytes
_HEADERS = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),  # the page has its own
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)


class _Error(Exception):
    def __init__(self, status: int, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.content = {"error": {"code": code, "message": message, "field": field}}


@cache
def page() -> tuple[str, str]:
    """The page and its Content-Security-Policy, which allows its own style and script by their hashes and no more."""
    folder = Path(__file__).parent
    text = (folder / "page.html").read_text("utf-8")
    for part in ("page.css", "page.js"):
        text = text.replace(f"/* {part} */", (folder / part).read_text("utf-8"))

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() for body in found)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    policy = (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy


def make_app(fleet: FleetView, token: str | None, public: bool) -> Starlette:
    """The ASGI app. `token` None: no actions; `public`: other machines reach it, so reading needs the token too."""
    orders: dict[str, Callable[[dict[str, Any]], Awaitable[None]]] = {
        "drain": lambda body: fleet.drain(_text(body, "replica")),
        "undrain": lambda body: fleet.undrain(_text(body, "replica")),
        "migration": lambda body: fleet.pause(_flag(body, "paused")),
        "settings": fleet.change,
    }

    async def show(_: Request) -> Response:
        text, policy = page()
        return HTMLResponse(text, headers={"Content-Security-Policy": policy})

    async def status(request: Request) -> Response:
        if public:
            _authenticate(request, token)
        # pydantic writes null where JSON has no number (infinity as a policy's default)
        return Response((await fleet.status()).model_dump_json(), media_type="application/json")

    async def schema(_: Request) -> Response:
        return JSONResponse(Status.model_json_schema())

    async def act(request: Request) -> Response:
        _same_origin(request)
        _authenticate(request, token)
        name = request.path_params["action"]
        if name not in orders:
            raise _Error(404, "unknown_action", f"no such action: {name!r}. There are: {', '.join(orders)}")
        try:
            await orders[name](await _body(request))
        except RefusedError as error:
            raise _Error(409, "refused", str(error), error.field) from error
        except AwayError as error:
            raise _Error(503, "away", str(error)) from error
        return JSONResponse({"done": name})

    async def failed(_: Request, error: Exception) -> Response:
        assert isinstance(error, _Error)
        headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "5"}}.get(error.status)
        return JSONResponse(error.content, error.status, headers)

    async def wrong_route(request: Request, error: Exception) -> Response:
        code = getattr(error, "status_code", 500)
        name, what = {
            404: ("not_found", f"there is no {request.url.path} here; the page is /status"),
            405: ("method_not_allowed", f"{request.method} does not go with {request.url.path}"),
        }.get(code, ("internal", "the server failed; its log says why"))
        return JSONResponse({"error": {"code": name, "message": what, "field": None}}, code)

    return Starlette(
        routes=[
            Route("/", lambda _: RedirectResponse("/status")),
            Route("/status", show),
            Route("/status.json", status),
            Route("/status.schema.json", schema),
            Route("/health", lambda _: JSONResponse({"status": "ok"})),
            Route("/actions/{action}", act, methods=["POST"]),
        ],
        middleware=[Middleware(_Guard, public=public)],
        exception_handlers={_Error: failed, 404: wrong_route, 405: wrong_route, 500: wrong_route},
    )


class _Guard:
    """Says with each answer what a browser may do with it, and answers to our own names only.

    A name that a foreign site has pointed at 127.0.0.1 (DNS rebinding) is not ours.
    """

    def __init__(self, app: Any, public: bool) -> None:
        self._app = app
        self._public = public

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message["headers"]}
                more = [(name, value) for name, value in _HEADERS if name not in given]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        if scope["type"] == "http" and not self._public:
            host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
            if not _is_ours(host):
                message = "this server answers to the names of the loopback interface only"
                content = {"error": {"code": "wrong_host", "message": message, "field": None}}
                return await JSONResponse(content, 421)(scope, receive, sending)
        await self._app(scope, receive, sending)


def _is_ours(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is not None and is_loopback(name)


def _authenticate(request: Request, token: str | None) -> None:
    if token is None:
        raise _Error(403, "read_only", "no token is set, so nothing can be changed here: set `admin.token_file`")
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if not hmac.compare_digest(given.encode(), token.encode()):
        what = "the token is wrong" if given else "this needs the header `Authorization: Bearer TOKEN`"
        raise _Error(401, "unauthorized", what)


def _same_origin(request: Request) -> None:
    origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site")
    host = request.headers.get("host", "")
    if (origin is not None and origin.partition("://")[2] != host) or site not in (None, "same-origin", "none"):
        raise _Error(403, "cross_origin", "requests from other sites change nothing here")


async def _body(request: Request) -> dict[str, Any]:
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise _Error(415, "not_json", "the body must be JSON, with the header `Content-Type: application/json`")
    text = b""
    async for chunk in request.stream():
        text += chunk
        if len(text) > LARGEST_BODY:
            raise _Error(413, "too_large", f"the body may have {LARGEST_BODY} bytes at most")
    try:
        body = json.loads(text)
    except ValueError as error:
        raise _Error(400, "not_json", f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise _Error(400, "invalid", "the body must be a JSON object")
    return body


def _text(body: dict[str, Any], field: str) -> str:
    value = body.get(field)
    if not isinstance(value, str) or not value:
        raise _Error(400, "invalid", f"`{field}` must be a text that is not empty", field)
    return value


def _flag(body: dict[str, Any], field: str) -> bool:
    value = body.get(field)
    if not isinstance(value, bool):
        raise _Error(400, "invalid", f"`{field}` must be true or false", field)
    return value
