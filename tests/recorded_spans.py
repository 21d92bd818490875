"""Spans of this process, kept in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from deployments import tracing
from deployments.settings import TracingSettings
from deployments.spans import Spans

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT = "00f067aa0ba902b7"


class Recorded:
    """What `spans` has recorded."""

    def __init__(self, sample_ratio: float = 1.0) -> None:
        self._kept = InMemorySpanExporter()
        settings = TracingSettings("console", sample_ratio=sample_ratio)
        self.spans = Spans(settings, "Test", "test", self._kept)

    def all(self) -> list[ReadableSpan]:
        """All spans that are over, by start."""
        self.spans.flush()
        return sorted(self._kept.get_finished_spans(), key=lambda span: span.start_time or 0)

    def named(self, name: str) -> list[ReadableSpan]:
        """Those of a name."""
        return [span for span in self.all() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        """The only one of a name."""
        (span,) = self.named(name)
        return span

    def tree(self) -> Any:
        """Names as nested lists: each span's name and what hangs under it, by start."""
        known = {span.context.span_id for span in self.all()}

        def below(parent: int | None) -> list[Any]:
            of_parent = [span for span in self.all() if above(span) == parent]
            return [[span.name, *below(span.context.span_id)] for span in of_parent]

        def above(span: ReadableSpan) -> int | None:
            return span.parent.span_id if span.parent is not None and span.parent.span_id in known else None

        return below(None)

    def text(self) -> str:
        """Everything that is recorded, as text."""
        return "\n".join(json.dumps(json.loads(span.to_json())) for span in self.all())


@contextmanager
def recording(sample_ratio: float = 1.0) -> Iterator[Recorded]:
    """Record in this process until the block ends."""
    recorded = Recorded(sample_ratio)
    tracing.use(recorded.spans)
    try:
        yield recorded
    finally:
        tracing.stop(5.0)


def hex_of(span: ReadableSpan) -> tuple[str, str]:
    """Trace id and span id as headers have them."""
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


def traceparent(span: ReadableSpan) -> str:
    """The header that makes a span its child."""
    return "-".join(["00", *hex_of(span), f"{span.context.trace_flags:02x}"])


def seconds(span: ReadableSpan) -> float:
    """How long it took."""
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9
