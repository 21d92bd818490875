"""What a running fleet tells of a request: lines of its log, and spans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from examples.tracing.collector import Collector, Span, tree

from .servers import Server, traces_port


def logged(server: Server, text: str) -> list[str]:
    """The messages of Serve's log files that contain a text."""
    assert server.ray_dir is not None
    files = (server.ray_dir / "ray/session_latest/logs/serve").glob("*.log")
    lines = (line for file in files for line in file.read_text(errors="replace").splitlines() if text in line)
    return [line.partition(" -- ")[2] for line in lines]


@contextmanager
def collecting(server: Server) -> Iterator[Collector]:
    """Listen where the fleet sends its spans, which nobody else does."""
    collector = Collector(traces_port(server))
    try:
        yield collector
    finally:
        collector.close()


def check_moved_once(spans: list[Span], source: str, destination: str, tokens: int, moved_after: int) -> None:
    """Fail unless the spans are those of one stream of so many tokens that moved once, after `moved_after` of them."""
    shown = tree(spans)
    wanted = ["decode", "decode", "ingress", "migrate", "prefill", "queue", "queue", "route"]
    assert sorted(span.name for span in spans) == wanted, shown
    of = {(span.name, span.attributes.get("tidegate.hop")): span for span in spans}
    ingress, route, queue, prefill = of["ingress", None], of["route", None], of["queue", 0], of["prefill", 0]
    before, moved, after = of["decode", 0], of["migrate", 1], of["decode", 1]
    assert {span.parent_id for span in spans if span is not ingress} == {ingress.span_id}, shown
    assert route.process["tidegate.process"] == ingress.process["tidegate.process"] == "Ingress"
    assert route.attributes["tidegate.replica"] == source, shown
    for span, replica in ((queue, source), (prefill, source), (before, source), (moved, source), (after, destination)):
        assert span.process["service.instance.id"] == span.attributes["tidegate.replica"] == replica, shown
    assert (before.attributes["tidegate.outcome"], after.attributes["tidegate.outcome"]) == ("moved", "finished"), shown
    assert before.attributes["tidegate.destination"] == moved.attributes["tidegate.destination"] == destination, shown
    assert ingress.attributes["gen_ai.usage.output_tokens"] == tokens, shown
    assert after.attributes["gen_ai.usage.output_tokens"] == tokens - moved_after, shown
    in_order = [ingress.start, route.end, queue.start, prefill.start, before.start, moved.start]
    in_order += [of["queue", 1].start, after.start, after.end]
    assert in_order == sorted(in_order), shown
    assert (queue.end, prefill.end) == (prefill.start, before.start), shown
    assert prefill.start < prefill.end < before.end <= ingress.end, shown
    assert 0 < moved.attributes["tidegate.pause_s"] < (moved.end - moved.start) / 1e9, shown
    assert not any(span.failed for span in spans), shown
