"""Errors of the fleet and the one table that maps them to HTTP.

    FleetError                      what the client should do
    ├── Unauthorized         401    send a valid API key
    ├── Overloaded           429    wait `retry_after` seconds, then try again
    ├── Shed                 429    the same: a request of a higher tier took its place before its first token
    ├── RateLimited          429    the same: the key or the tier has used up its requests or tokens per minute
    ├── NoReplicaAvailable   503    wait `retry_after` seconds, then try again
    ├── ReplicaLost          503    the answer was cut by a crash after its first token: ask again
    ├── ClientGone           503    nothing: it left, nobody reads this
    ├── RequestTimeout       504    it took longer than `ingress.request_timeout_s`: ask for less
    ├── BodyTooLarge         413    send less
    ├── RouteNotFound        404    use a documented path
    └── MethodNotAllowed     405    use a method from the Allow header

They are `GracefulHTTPError`s, which vLLM's serving classes turn into OpenAI-shaped answers (or in-band stream errors)
with our status. Never raise vLLM's EngineDeadError for one lost replica: its handler stops the whole server.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from app.vllm_compat import GracefulHTTPError


class FleetError(GracefulHTTPError):
    """Base of all errors that the fleet raises towards a client.

    `reason` is for machines: it becomes the header `x-tidegate-reason` and, where `code` is None, the error's `code`.
    `headers` are further ones of the answer.
    """

    status = HTTPStatus.INTERNAL_SERVER_ERROR
    reason: str | None = None
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        retry_after: int | None = None,
        reason: str | None = None,
        headers: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        super().__init__(message, self.status)
        self.retry_after = retry_after
        self.reason = reason or self.reason
        self.headers = headers or []


class Unauthorized(FleetError):
    """No API key, or one that is not known."""

    status = HTTPStatus.UNAUTHORIZED
    code = "invalid_api_key"


class Overloaded(FleetError):
    """Too many requests wait already."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    reason = "queue_full"


class Shed(FleetError):
    """The request waited, without a token, and had to make room for one of a higher tier."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    reason = "shed"


class RateLimited(FleetError):
    """The key or the tier is over its requests or tokens per minute."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    code = "rate_limit_exceeded"


class NoReplicaAvailable(FleetError):
    """No engine replica can take the request: all are starting, draining or dead."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    reason = "no_replica"


class ReplicaLost(FleetError):
    """The replica that produced the first part of an answer is gone."""

    status = HTTPStatus.SERVICE_UNAVAILABLE


class ClientGone(FleetError):
    """The client left, and Serve cancelled what ran for it."""

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
    401: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def error_code(error: Exception) -> str | None:
    """The machine-readable `code` of an error's answer, None where the status has to do."""
    return error.code or error.reason if isinstance(error, FleetError) else None


def error_body(status: int, message: str, *, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """The OpenAI error object for answers that do not come from vLLM's own handlers."""
    kind = _TYPES.get(status, "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}
