"""Errors of the fleet and the one table that maps them to HTTP.

    FleetError                      what the client should do
    ├── Overloaded           429    wait `retry_after` seconds, then try again
    ├── NoReplicaAvailable   503    wait `retry_after` seconds, then try again
    ├── ReplicaLost          503    the answer was cut by a crash after its first token: ask again
    ├── RequestTimeout       504    it took longer than `ingress.request_timeout_s`: ask for less
    ├── BodyTooLarge         413    send less
    ├── RouteNotFound        404    use a documented path
    └── MethodNotAllowed     405    use a method from the Allow header

They are `GracefulHTTPError`s, which vLLM's serving classes turn into OpenAI-shaped answers (or in-band stream errors)
with our status. Never raise vLLM's EngineDeadError for one lost replica: its handler stops the whole server.
"""

from __future__ import annotations

from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from app.vllm_compat import GracefulHTTPError


class FleetError(GracefulHTTPError):
    """Base of all errors that the fleet raises towards a client."""

    status = HTTPStatus.INTERNAL_SERVER_ERROR

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message, self.status)
        self.retry_after = retry_after


class Overloaded(FleetError):
    """Too many requests wait already."""

    status = HTTPStatus.TOO_MANY_REQUESTS


class NoReplicaAvailable(FleetError):
    """No engine replica can take the request: all are starting, draining or dead."""

    status = HTTPStatus.SERVICE_UNAVAILABLE


class ReplicaLost(FleetError):
    """The replica that produced the first part of an answer is gone."""

    status = HTTPStatus.SERVICE_UNAVAILABLE


class RequestTimeout(FleetError):
    """The request lived longer than `ingress.request_timeout_s`."""

    status = HTTPStatus.GATEWAY_TIMEOUT


class BodyTooLarge(FleetError):
    """The request body exceeds `ingress.max_body_mib`."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class RouteNotFound(FleetError):
    """The path is not part of the public API."""

    status = HTTPStatus.NOT_FOUND


class MethodNotAllowed(FleetError):
    """The path exists, the method does not."""

    status = HTTPStatus.METHOD_NOT_ALLOWED


#: Error type strings as OpenAI's own API uses them, by status; vLLM's names are kept where vLLM answers.
_TYPES = {
    400: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


#: Notes on the current HTTP request: `error` before its first output, for the gate to turn into a status; `admitted`.
early_error: ContextVar[dict[str, Any] | None] = ContextVar("early_error", default=None)


def record_early(error: Exception) -> None:
    """Remember an error of the current HTTP request so that a stream that has not started gets a real status."""
    if (box := early_error.get()) is not None:
        box["error"] = error


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """The OpenAI error object for answers that do not come from vLLM's own handlers."""
    kind = _TYPES.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}
