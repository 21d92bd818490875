"""The span `ingress` of a client's request and the span `resume` of a sequence that is sent again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from deployments import tracing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from app.stream import Stream
    from deployments.spans import Spans

_TRACE_CONTEXT = (b"traceparent", b"tracestate")


class RequestSpan:
    """What is recorded of one request; `headers` is what the spans of its sequences hang under.

    `parent` are the client's trace headers, `about` attributes of the request; one `by_handle` came from Python and
    ends with its last sequence.
    """

    def __init__(
        self, spans: Spans, parent: Mapping[str, str], about: Mapping[str, str], *, by_handle: bool = False
    ) -> None:
        self.by_handle = by_handle
        self._span = spans.server(tracing.INGRESS, parent, about)
        self.headers = spans.headers(self._span)
        self._input_tokens = self._output_tokens = 0
        self._outcome: str | None = None

    def admitted(self, model: str, prompt_tokens: int) -> None:
        """A prompt of the request has passed admission."""
        self._input_tokens += prompt_tokens
        self._tell("gen_ai.request.model", model)

    def first_token(self, after_s: float) -> None:
        """The client's first token, so many seconds after the request."""
        self._tell("gen_ai.response.time_to_first_chunk", after_s)

    def _tell(self, name: str, value: str | float) -> None:
        if self._span.is_recording():  # not if it is over: sequences of a background response outlive their request
            self._span.set_attribute(name, value)

    def sequence_ended(self, tokens: int, outcome: str) -> None:
        """A sequence of the request has ended so, after so many tokens; the first that is not `finished` is told."""
        self._output_tokens += tokens
        if self._outcome in (None, "finished"):
            self._outcome = outcome

    def end(self, tier: str | None, tenant: str | None, error: Exception | None, status: int | None = None) -> None:
        """The request is over. `error`: what it failed with; `status`: of the HTTP answer."""
        from deployments.spans import failed, present

        why = None if error is None else getattr(error, "reason", None) or type(error).__name__
        if why is None and self._outcome in ("failed", "timeout"):
            why = self._outcome
        tokens = self._outcome is not None
        self._span.set_attributes(
            present(
                {
                    "http.response.status_code": status,
                    "tidegate.tier": tier,
                    "tidegate.tenant": tenant,
                    "tidegate.outcome": self._outcome,
                    "gen_ai.usage.input_tokens": self._input_tokens if tokens else None,
                    "gen_ai.usage.output_tokens": self._output_tokens if tokens else None,
                    "error.type": why,
                }
            )
        )
        if why is not None and (status is None or status >= 500 or status < 400):  # 4xx: the client's own
            failed(self._span, why)
        self._span.end()


def of_http(scope: Mapping[str, object], route: str | None, request_id: str) -> RequestSpan | None:
    """The span of an HTTP request, None if this process records none or it is not one of the API's."""
    if (spans := tracing.current()) is None or route is None or route.startswith("/health"):
        return None
    headers: Mapping[bytes, bytes] = dict(scope["headers"])  # type: ignore[call-overload]
    parent = {name.decode(): headers[name].decode("latin-1") for name in _TRACE_CONTEXT if name in headers}
    about = {
        "http.request.method": str(scope["method"]),
        "http.route": route,
        "url.path": str(scope["path"]),
        "tidegate.request_id": request_id,
    }
    return RequestSpan(spans, parent, about)


def of_handle(request_id: str) -> RequestSpan | None:
    """The span of a request that came through a Python handle, None if this process records none."""
    if (spans := tracing.current()) is None:
        return None
    return RequestSpan(spans, {}, {"tidegate.request_id": request_id}, by_handle=True)


def resume(stream: Stream, reason: str, attempt: int) -> None:
    """A sequence is about to be sent again because of `reason`; `attempt`: losses since it last got a token further."""
    resumed(stream)
    if stream.request.span is None or (spans := tracing.current()) is None:
        return
    delivered = len(stream.delivered)
    stream.resume = spans.start(
        tracing.RESUME,
        stream.request.span.headers,
        {
            "tidegate.sequence_id": stream.rid,
            "tidegate.epoch": stream.epoch + 1,
            "tidegate.cause": reason,
            "tidegate.attempt": attempt,
            "tidegate.delivered_tokens": delivered,
            "tidegate.silent_s": time.monotonic() - stream.last_at if delivered else None,
        },
    )
    stream.trace = spans.headers(stream.resume)


def resumed(stream: Stream) -> None:
    """End the span `resume` of a sequence, if it has one: at the token with which it went on, or now if none came."""
    if (span := stream.resume) is None:
        return
    from deployments.spans import clock, failed

    stream.resume = None
    if stream.awaited:
        failed(span, "no token came")
        span.end()
    else:
        span.end(clock()(stream.epoch_at))
