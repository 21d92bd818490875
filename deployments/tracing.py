"""Whether this process records spans, and their names. Until `start` it does not, and OpenTelemetry is not imported.

Serve ships a router class by value, module globals included, so what it shares with its process lives here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deployments.settings import TracingSettings

if TYPE_CHECKING:
    from deployments.spans import Spans

INGRESS, ROUTE, QUEUE, PREFILL, DECODE = "ingress", "route", "queue", "prefill", "decode"
MIGRATE, RESUME = "migrate", "resume"

_spans: Spans | None = None


def current() -> Spans | None:
    """What this process records spans with; None: it records none."""
    return _spans


def start(settings: TracingSettings | None, process: str, instance: str) -> None:
    """Record spans from now on, unless `settings` is None; `process` is the deployment, `instance` its replica."""
    if settings is not None:
        from deployments.spans import Spans

        use(Spans(settings, process, instance))


def use(spans: Spans | None) -> None:
    """Record with these spans, or (None) no more."""
    global _spans
    _spans = spans


def stop(within_s: float) -> None:
    """Record no more and send what is left, waiting no longer than `within_s` seconds for it."""
    if (spans := current()) is not None:
        use(None)
        spans.close(within_s)
