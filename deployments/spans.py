"""OpenTelemetry spans of one process: W3C context in and out, times, the way to the collector.

What semantic conventions name has their name, the rest begins with `tidegate.`. No attribute holds a prompt, an answer
or a key. Times are monotonic seconds, as everywhere here; `clock` alone turns them into the epoch's nanoseconds.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from deployments.settings import TracingSettings

QUIET_S = 60.0  # between two lines in the log about a collector that does not answer
EXPORT_LOG = "opentelemetry.exporter.otlp.proto.http.trace_exporter"

#: Values are strings, numbers, booleans or lists of one of them; None: the span has no such attribute.
Attributes = Mapping[str, Any]
#: `traceparent` and `tracestate` (W3C Trace Context, section 3).
Headers = dict[str, str]


class Spans:
    """Makes the spans of one process and sends them in the background: no caller ever waits for a collector.

    `process` and `instance` tell whose spans they are; `exporter` replaces the one that `settings` names. What the
    collector does not take waits in a bounded queue, from which the oldest are dropped.
    """

    def __init__(
        self, settings: TracingSettings, process: str, instance: str, exporter: SpanExporter | None = None
    ) -> None:
        whose = {
            "service.name": settings.service_name,
            "service.instance.id": instance,
            "tidegate.process": process,
        }
        self._provider = TracerProvider(
            resource=Resource.create(whose),
            sampler=ParentBased(TraceIdRatioBased(settings.sample_ratio)),
            shutdown_on_exit=False,  # it would wait half a minute for a dead collector
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter or _exporter(settings)))
        self._tracer = self._provider.get_tracer("tidegate")
        self._context = TraceContextTextMapPropagator()

    def start(
        self,
        name: str,
        parent: Mapping[str, str] | None,
        attributes: Attributes,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        at: int | None = None,
    ) -> Span:
        """Begin a span, now or `at` (epoch, ns). `parent`: headers; one that says nothing valid begins a trace."""
        return self._tracer.start_span(
            name,
            context=self._context.extract(parent or {}, context=Context()),
            kind=kind,
            attributes=present(attributes),
            start_time=at,
        )

    def server(self, name: str, parent: Mapping[str, str] | None, attributes: Attributes) -> Span:
        """Begin the span of a client's request."""
        return self.start(name, parent, attributes, kind=SpanKind.SERVER)

    def record(
        self,
        name: str,
        parent: Mapping[str, str] | None,
        began: float,
        ended: float,
        attributes: Attributes,
        *,
        error: str | None = None,
        epoch: Callable[[float], int] | None = None,
    ) -> None:
        """A span that is over. `error`: why it failed; `epoch`: a `clock` shared with spans that it adjoins."""
        epoch = epoch or clock()
        span = self.start(name, parent, attributes, at=epoch(began))
        if error is not None:
            failed(span, error)
        span.end(epoch(max(began, ended)))

    def headers(self, span: Span) -> Headers:
        """What makes the spans of another process, or of vLLM, children of this one."""
        carrier: Headers = {}
        self._context.inject(carrier, context=set_span_in_context(span, Context()))
        return carrier

    def flush(self) -> None:
        """Send what is over now; waits for the collector (tests and examples)."""
        self._provider.force_flush()

    def close(self, within_s: float) -> None:
        """Send what is left, in `within_s` seconds or, as long as the process lives, after them."""
        sending = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        sending.start()
        sending.join(within_s)


def clock() -> Callable[[float], int]:
    """Turns monotonic seconds, of this process or another of this machine, into nanoseconds since the epoch."""
    offset = time.time_ns() - time.monotonic_ns()
    return lambda at: round(at * 1e9) + offset


def present(attributes: Attributes) -> dict[str, Any]:
    """Those attributes that have a value."""
    return {name: value for name, value in attributes.items() if value is not None}


def failed(span: Span, why: str) -> None:
    """Mark a span as failed."""
    span.set_status(StatusCode.ERROR, why)


def _exporter(settings: TracingSettings) -> SpanExporter:
    if settings.exporter == "console":
        return ConsoleSpanExporter(out=sys.stdout, formatter=lambda span: span.to_json(indent=None) + "\n")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    logging.getLogger(EXPORT_LOG).addFilter(_Seldom())
    return OTLPSpanExporter(endpoint=settings.endpoint)


class _Seldom(logging.Filter):
    """Lets one line in `QUIET_S` seconds pass: a collector that is away is retried several times in each."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + QUIET_S
        return True
