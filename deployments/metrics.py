"""Counters and histograms of moves and fail-overs, by Ray's metrics: Prometheus finds them as `ray_tidegate_...`.

A process without Ray (a test, a tool) counts nothing. Label values are words of the code, never ids, and few: what
does not look like one, or comes when MAX_VALUES are known, is counted as "other".
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache

import ray
from ray.util.metrics import Counter, Histogram

MAX_VALUES = 64  # of one label in one process
OTHER = "other"
SECONDS = [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0]

_WORD = re.compile(r"[a-z][a-z0-9_]{0,31}")
_known: defaultdict[str, set[str]] = defaultdict(set)


def moved(
    reason: str,
    outcome: str,
    why: str,
    *,
    stages: int = 0,
    blocks: int = 0,
    bytes: int = 0,
    park_s: float | None = None,
) -> None:
    """Count a move that ended, on its source: `outcome` is the hand-shake's last state, `why` what led there.

    `stages`, `blocks` and `bytes` were written on the destination; `park_s`: seconds from Park to Committed, None if
    it never came to that.
    """
    if not ray.is_initialized():
        return
    tags = {"reason": bounded("reason", reason), "outcome": bounded("outcome", outcome), "why": bounded("why", why)}
    _counter("tidegate_migrations_total", "Moves of a request between replicas", *tags).inc(tags=tags)
    for name, unit, amount in (
        ("tidegate_migration_bytes_total", "KV bytes", bytes),
        ("tidegate_migration_blocks_total", "KV blocks", blocks),
    ):
        if amount:
            _counter(name, f"{unit} copied by moves", "reason").inc(amount, {"reason": tags["reason"]})
    if stages:
        _counter("tidegate_migration_stages_total", "Stages copied while the request decoded").inc(stages)
    if park_s is not None:
        _histogram("tidegate_migration_park_seconds", "Time from Park to Committed, on the source").observe(park_s)


def paused(seconds: float) -> None:
    """Count, at the ingress, the gap that a client's stream had over a move."""
    if ray.is_initialized():
        _histogram("tidegate_migration_pause_seconds", "Gap in a client's stream over a move").observe(seconds)


def failed_over(reason: str) -> None:
    """Count a sequence that is sent again because its replica cannot go on (app/calls.py has the reasons)."""
    if ray.is_initialized():
        name = "tidegate_failovers_total"
        _counter(name, "Sequences sent again elsewhere", "reason").inc(tags={"reason": bounded("reason", reason)})


def scaling_wanted(direction: str, reason: str) -> None:
    """Count a new decision of the autoscaler: `up`, `down` or `hold`, before Serve's windows."""
    if ray.is_initialized():
        tags = {"direction": bounded("direction", direction), "reason": bounded("scaling_reason", reason)}
        _counter("tidegate_autoscaling_decisions_total", "Changed decisions of the autoscaler", *tags).inc(tags=tags)


def bounded(label: str, value: str) -> str:
    """The value, or "other" where it is no word or one too many for its label."""
    known = _known[label]
    if value not in known:
        if len(known) >= MAX_VALUES or not _WORD.fullmatch(value):
            return OTHER
        known.add(value)
    return value


@cache
def _counter(name: str, description: str, *labels: str) -> Counter:
    return Counter(name, description, labels)


@cache
def _histogram(name: str, description: str) -> Histogram:
    return Histogram(name, description, SECONDS)
