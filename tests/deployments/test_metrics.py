"""Counters of moves and fail-overs: nothing without Ray, bounded labels, exactly the series that are documented."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from deployments import metrics


class Recorded:
    """Stands for Ray's metrics: remembers what each series was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float, dict[str, str]]] = []

    def series(self, name: str, description: str, *_: Any) -> SimpleNamespace:
        assert description

        def tell(amount: float = 1, tags: dict[str, str] | None = None) -> None:
            self.told.append((name, amount, tags or {}))

        return SimpleNamespace(inc=tell, observe=tell)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    """The module's functions as in a process with Ray."""
    made = Recorded()
    monkeypatch.setattr(metrics.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(metrics, "_counter", made.series)
    monkeypatch.setattr(metrics, "_histogram", made.series)
    metrics._known.clear()
    yield made
    metrics._known.clear()


def test_without_ray_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that never joined a cluster may call all of it: no series is made, nothing fails."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("a series was made without Ray")

    monkeypatch.setattr(metrics, "Counter", refuse)
    monkeypatch.setattr(metrics, "Histogram", refuse)
    metrics.moved("balance", "done", "moved", stages=2, blocks=8, bytes=1 << 20, park_s=0.1)
    metrics.paused(0.1)
    metrics.failed_over("stalled")


def test_a_move_is_counted_with_its_figures(recorded: Recorded) -> None:
    """Reason, outcome and why label the count; bytes and blocks the reason; stages and the park time nothing."""
    metrics.moved("drain", "done", "moved", stages=2, blocks=8, bytes=1024, park_s=0.25)
    assert recorded.told == [
        ("tidegate_migrations_total", 1, {"reason": "drain", "outcome": "done", "why": "moved"}),
        ("tidegate_migration_bytes_total", 1024, {"reason": "drain"}),
        ("tidegate_migration_blocks_total", 8, {"reason": "drain"}),
        ("tidegate_migration_stages_total", 2, {}),
        ("tidegate_migration_park_seconds", 0.25, {}),
    ]


def test_a_refused_move_is_counted_alone(recorded: Recorded) -> None:
    """What never copied or parked leaves no bytes (Ray refuses to count by 0) and no time."""
    metrics.moved("tier", "aborted", "no_blocks")
    assert [name for name, _, _ in recorded.told] == ["tidegate_migrations_total"]


def test_pause_and_failover(recorded: Recorded) -> None:
    """The ingress's two figures."""
    metrics.paused(0.4)
    metrics.failed_over("draining")
    assert recorded.told == [
        ("tidegate_migration_pause_seconds", 0.4, {}),
        ("tidegate_failovers_total", 1, {"reason": "draining"}),
    ]


def test_label_values_are_words_and_few(recorded: Recorded) -> None:
    """What looks like an id or a message, and what comes after 64 values of a label, is counted as `other`."""
    for value in ("chatcmpl-8f3a", "EngineDeadError: it broke", "", "x" * 40):
        assert metrics.bounded("why", value) == "other"
    words = [f"w{i}" for i in range(metrics.MAX_VALUES)]
    assert [metrics.bounded("why", word) for word in words] == words
    assert metrics.bounded("why", "late") == "other"
    assert metrics.bounded("why", "w0") == "w0"
    assert metrics.bounded("outcome", "late") == "late"
