"""What a metric of ours is, and its way to Prometheus: Ray's metrics, exported by each node under the prefix `ray_`.

Private name of Ray (contract-tested): `Metric._record`, which takes the 0 that a counter begins with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import ray
from ray.util import metrics as ray_metrics

Kind = Literal["counter", "gauge", "histogram"]

MAX_VALUES = 64  # of one label in one process
OTHER = "other"
EXPORTED = "ray_"  # in front of a name on the metrics port

_WORD = re.compile(r"[a-z][a-z0-9_]{0,31}")
_known: dict[str, dict[str, str]] = {}
#: Labels whose values come from outside: only those that `allow` named are shown.
_allowed: dict[str, set[str]] = {"tenant": set(), "model": set()}
#: Labels whose values come from the config or from a list in the code: any text will do.
_LISTED = frozenset({"tier", "route", "status"})
#: Labels whose values are ids: on gauges only, of the living only, as Ray drops a gauge that is no longer set.
IDS = frozenset({"replica"})


def allow(label: str, values: Iterable[str]) -> None:
    """Show these values of a label whose values come from outside; any other one is "other"."""
    _allowed[label].update(values)


def bounded(label: str, value: str) -> str:
    """The value, or "other" where it is no word, not allowed, or one too many for its label."""
    if label in IDS:
        return value
    known = _known.setdefault(label, {})
    if (shown := known.get(value)) is not None:
        return shown
    allowed = _allowed.get(label)
    fits = value in allowed if allowed is not None else label in _LISTED or _WORD.fullmatch(value)
    if not fits or len(known) >= MAX_VALUES:
        return OTHER
    return known.setdefault(value, value)


def forget() -> None:
    """Forget every value that labels had: a process begins like this."""
    _known.clear()
    for values in _allowed.values():
        values.clear()


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric: what is registered, documented and recorded under `name`.

    `unit` is the unit of its values, `where` the process that records it. `labels` maps each label to what its values
    are; `buckets` are the upper bounds of a histogram.
    """

    name: str
    kind: Kind
    unit: str
    where: str
    help: str
    labels: Mapping[str, str] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    _series: dict[tuple[str, ...], Series] = field(default_factory=dict)
    _made: list[Any] = field(default_factory=list)

    @property
    def exported(self) -> tuple[str, ...]:
        """The names that Prometheus finds."""
        name = EXPORTED + self.name
        return (name, *(f"{name}_{part}" for part in ("bucket", "count", "sum"))) if self.buckets else (name,)

    def at(self, *values: str) -> Series:
        """The series with these label values, in the order of `labels`; look it up once where it is used often."""
        series = self._series.get(values)
        if series is None:
            series = Series(self, dict(zip(self.labels, values, strict=True)))
            if len(self._series) < MAX_VALUES**2:
                self._series[values] = series
        return series

    def record(self, value: float, tags: dict[str, str]) -> None:
        """Give a value to Ray; a process without Ray records nothing."""
        if not ray.is_initialized():
            return
        if not self._made:
            self._made.append(_make(self))
        made = self._made[0]
        if self.kind == "gauge":
            made.set(value, tags)
        elif self.kind == "histogram":
            made.observe(value, tags)
        elif value:
            made.inc(value, tags)
        else:
            made._record(0.0, tags)


def _make(metric: Metric) -> Any:
    labels = tuple(metric.labels)
    if metric.kind == "histogram":
        return ray_metrics.Histogram(metric.name, metric.help, list(metric.buckets), labels)
    kind = ray_metrics.Gauge if metric.kind == "gauge" else ray_metrics.Counter
    return kind(metric.name, metric.help, labels)


class Series:
    """One metric with its label values."""

    __slots__ = ("_metric", "tags")

    def __init__(self, metric: Metric, tags: dict[str, str]) -> None:
        self._metric = metric
        self.tags = {label: bounded(label, value) for label, value in tags.items()}

    def inc(self, amount: float = 1.0) -> None:
        """Add to a counter; 0 makes its series appear, so that the first increase is seen as one."""
        self._metric.record(amount, self.tags)

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._metric.record(value, self.tags)

    def observe(self, value: float) -> None:
        """Add a value to a histogram."""
        self._metric.record(value, self.tags)
