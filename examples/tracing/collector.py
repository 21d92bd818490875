"""A collector for one's own machine: takes spans by OTLP over HTTP and prints each trace as a tree.

    .venv/bin/python examples/tracing/collector.py                                   # here, until ctrl-C
    make serve CONFIG=examples/tracing/serve_config.yaml                             # in another terminal
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
      -d '{"model": "smollm2-135m-instruct", "prompt": "The tide", "max_tokens": 40}'

A trace is printed when nothing has come for it for a while; if more comes it is printed again, whole.
"""

from __future__ import annotations

import argparse
import gzip
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass
class Span:
    """One span as it came; times are nanoseconds since the epoch."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start: int
    end: int
    failed: bool
    attributes: dict[str, Any]
    process: dict[str, Any]  # attributes of the process that made it


@dataclass
class Trace:
    """The spans of one trace, by id; `heard` is when the last of them came, `printed` whether they were shown."""

    spans: dict[str, Span] = field(default_factory=dict)
    heard: float = 0.0
    printed: bool = False


class Collector:
    """Listens on `port` of this machine (0: any that is free) and keeps the newest `most` traces."""

    def __init__(self, port: int = 4318, most: int = 1000) -> None:
        self.traces: dict[str, Trace] = {}
        self._most = most
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self.take))
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, body: bytes) -> None:
        """Take one request of OTLP; ValueError if it is none."""
        with self._lock:
            for span in spans_of(body):
                trace = self.traces.setdefault(span.trace_id, Trace())
                trace.spans[span.span_id] = span
                trace.heard, trace.printed = time.monotonic(), False
            while len(self.traces) > self._most:
                del self.traces[next(iter(self.traces))]

    def quiet(self, seconds: float) -> list[str]:
        """Trees of the traces that were not shown yet and to which nothing was added for so long."""
        with self._lock:
            due = [t for t in self.traces.values() if not t.printed and time.monotonic() - t.heard >= seconds]
            for trace in due:
                trace.printed = True
            return [tree(list(trace.spans.values())) for trace in due]

    def spans(self, trace_id: str) -> list[Span]:
        """The spans of a trace so far, by start."""
        with self._lock:
            found = self.traces.get(trace_id, Trace()).spans.values()
            return sorted(found, key=lambda span: span.start)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def spans_of(body: bytes) -> Iterator[Span]:
    """The spans in a request of OTLP/HTTP, in protobuf."""
    try:
        request = ExportTraceServiceRequest.FromString(body)
    except Exception as error:
        raise ValueError(str(error)) from error
    for resource in request.resource_spans:
        process = attributes_of(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    name=span.name,
                    start=span.start_time_unix_nano,
                    end=span.end_time_unix_nano,
                    failed=span.status.code == 2,
                    attributes=attributes_of(span.attributes),
                    process=process,
                )


def attributes_of(pairs: Any) -> dict[str, Any]:
    """Attributes as Python values."""
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return None if kind is None else getattr(value, kind)


def tree(spans: list[Span]) -> str:
    """The spans of one trace, one a line: when it began, how long it took, in milliseconds, and what it says."""
    known, zero = {span.span_id for span in spans}, min(span.start for span in spans)
    below: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        below.setdefault(span.parent_id if span.parent_id in known else "", []).append(span)

    def lines(parent: str, depth: int) -> Iterator[str]:
        for span in below.get(parent, []):
            began, took = (span.start - zero) / 1e6, (span.end - span.start) / 1e6
            name = "  " * depth + span.name + (" FAILED" if span.failed else "")
            yield f"{name:<22}{began:>10.1f} +{took:>9.1f} ms  {_said(span)}"
            yield from lines(span.span_id, depth + 1)

    return "\n".join([f"trace {spans[0].trace_id}", *lines("", 1)])


def _said(span: Span) -> str:
    """The attributes in short: without prefixes, without the ids that all spans of the trace have in common."""
    short = {name.removeprefix("tidegate."): value for name, value in span.attributes.items()}
    short = {name.removeprefix("gen_ai."): value for name, value in short.items() if name != "sequence_id"}
    return " ".join(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
                    for name, value in short.items())  # fmt: skip


def _handler(take: Any) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status = 200
            try:
                take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            except (ValueError, OSError):
                status = 400
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    return Handler


def main() -> None:
    """Print traces until ctrl-C."""
    parser = argparse.ArgumentParser(description="Print traces that come by OTLP over HTTP.")
    parser.add_argument("--port", type=int, default=4318)
    parser.add_argument("--wait", type=float, default=6.0, help="seconds without a new span (default %(default)s)")
    options = parser.parse_args()
    try:
        collector = Collector(options.port)
    except OSError as error:
        sys.exit(f"port {options.port}: {error.strerror}. Is a collector there already? --port names another one")
    print(f"listening: {collector.endpoint}", flush=True)
    try:
        while True:
            time.sleep(0.1)
            for text in collector.quiet(options.wait):
                print(text, end="\n\n", flush=True)
    except KeyboardInterrupt:
        collector.close()


if __name__ == "__main__":
    main()
