"""Our metrics: nothing without Ray, bounded labels, one definition each, exactly what they are told."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.util.metrics import Counter, Gauge, Histogram, Metric

from deployments import metric_series, metrics

ROOT = Path(__file__).parents[2]


class Recorded:
    """Stands for Ray's metrics: remembers what each series was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float, dict[str, str]]] = []

    def make(self, metric: metric_series.Metric) -> SimpleNamespace:
        """What Ray would have made."""

        def tell(amount: float, tags: dict[str, str]) -> None:
            assert set(tags) == set(metric.labels)
            self.told.append((metric.name, amount, dict(tags)))

        return SimpleNamespace(inc=tell, observe=tell, set=tell, _record=tell)


def _forget_all() -> None:
    metric_series.forget()
    for metric in metrics.METRICS:
        metric._series.clear()
        metric._made.clear()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    """The metrics as in a process with Ray."""
    made = Recorded()
    monkeypatch.setattr(metric_series.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(metric_series, "_make", made.make)
    _forget_all()
    yield made
    _forget_all()


def test_without_ray_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that never joined a cluster may call all of it: no series is made, nothing fails."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("a series was made without Ray")

    monkeypatch.setattr(metric_series, "_make", refuse)
    metrics.moved("balance", "done", "moved", stages=2, blocks=8, bytes=1 << 20, park_s=0.1)
    metrics.paused(0.1)
    metrics.failed_over("stalled")


def test_a_move_is_counted_with_its_figures(recorded: Recorded) -> None:
    """Reason, outcome and why label the count; bytes and blocks the reason; stages and the park time nothing."""
    metrics.moved("drain", "done", "moved", stages=2, blocks=8, bytes=1024, park_s=0.25)
    assert sorted(recorded.told) == sorted(
        [
            ("tidegate_migrations_total", 1, {"reason": "drain", "outcome": "done", "why": "moved"}),
            ("tidegate_migration_bytes_total", 1024, {"reason": "drain"}),
            ("tidegate_migration_blocks_total", 8, {"reason": "drain"}),
            ("tidegate_migration_stages_total", 2, {}),
            ("tidegate_migration_park_seconds", 0.25, {}),
        ]
    )


def test_a_refused_move_is_counted_alone(recorded: Recorded) -> None:
    """What never copied or parked leaves no bytes and no time."""
    metrics.moved("tier", "aborted", "no_blocks")
    assert [name for name, _, _ in recorded.told] == ["tidegate_migrations_total"]


def test_pause_and_failover(recorded: Recorded) -> None:
    """The ingress's two figures of moves."""
    metrics.paused(0.4)
    metrics.failed_over("draining")
    assert recorded.told == [
        ("tidegate_migration_pause_seconds", 0.4, {}),
        ("tidegate_failovers_total", 1, {"reason": "draining"}),
    ]


def test_label_values_are_words_and_few(recorded: Recorded) -> None:
    """What looks like an id or a message, and what comes after 64 values of a label, is counted as `other`."""
    for value in ("chatcmpl-8f3a", "EngineDeadError: it broke", "", "x" * 40):
        assert metric_series.bounded("why", value) == "other"
    words = [f"w{i}" for i in range(metric_series.MAX_VALUES)]
    assert [metric_series.bounded("why", word) for word in words] == words
    assert metric_series.bounded("why", "late") == "other"
    assert metric_series.bounded("why", "w0") == "w0"
    assert metric_series.bounded("outcome", "late") == "late"


def test_outside_names_must_be_allowed(recorded: Recorded) -> None:
    """Tenants and models are shown by name only if the process was told of them; a tier's name may be any text."""
    metric_series.allow("tenant", ["Acme Inc"])
    metrics.TENANT_SEQUENCES.at("Acme Inc").inc()
    metrics.TENANT_SEQUENCES.at("somebody").inc()
    metrics.QUEUED.at("Tier-1").set(3)
    assert [tags for _, _, tags in recorded.told] == [{"tenant": "Acme Inc"}, {"tenant": "other"}, {"tier": "Tier-1"}]


def test_a_counter_can_begin_with_zero() -> None:
    """Ray's own `inc` refuses 0; the private `Metric._record(value, tags)`, which we use instead, is still there."""
    with pytest.raises(ValueError, match="must be >0"):
        Counter("tidegate_test_total").inc(0)
    assert Metric._record.__code__.co_varnames[:3] == ("self", "value", "tags")
    Counter("tidegate_test_total", "", ("a",))._record(0.0, {"a": "b"})


@pytest.mark.parametrize("metric", metrics.METRICS, ids=lambda metric: metric.name)
def test_a_definition_follows_the_rules(metric: metric_series.Metric) -> None:
    """One prefix, Prometheus' suffixes, base units, help, rising buckets, an id on gauges only; Ray accepts it."""
    assert re.fullmatch(r"tidegate_[a-z0-9_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.help
    assert all(metric.labels.values())
    assert not re.search(r"_(ms|milliseconds|kib|mib|percent)(_|$)", metric.name)
    if metric.unit in ("seconds", "bytes", "tokens"):
        assert f"_{metric.unit}" in metric.name
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert metric.kind == "gauge" or not metric_series.IDS & set(metric.labels)
    made = metric_series._make(metric)
    assert isinstance(made, {"counter": Counter, "gauge": Gauge, "histogram": Histogram}[metric.kind])
    assert not made._discard_metric


def test_names_are_unique() -> None:
    """No two definitions share a series."""
    names = [name for metric in metrics.METRICS for name in metric.exported]
    assert len(names) == len(set(names))


def test_no_metric_is_made_elsewhere() -> None:
    """All code of ours records through the registry: nobody else imports a metrics library."""
    for package in ("app", "deployments", "policies"):
        for path in (ROOT / package).rglob("*.py"):
            if path.name == "metric_series.py":
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
                module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                assert "prometheus_client" not in (module, *names), path
                assert not (module == "ray.util" and "metrics" in names), path
                assert module not in ("ray.util.metrics", "ray.serve.metrics"), path


def test_every_metric_is_recorded_somewhere() -> None:
    """Each definition is used by code outside the registry or by one of its functions."""
    text = "\n".join(p.read_text(encoding="utf-8") for r in ("app", "deployments") for p in (ROOT / r).rglob("*.py"))
    unused = [
        name
        for name, value in vars(metrics).items()
        if isinstance(value, metric_series.Metric) and not re.search(rf"\b{name}(\.at\(|,|\b\))", text)
    ]
    assert not unused
