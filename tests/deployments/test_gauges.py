"""What replica, coordinator and router tell of themselves: the right unit, the living only, at most once a second."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest

from deployments import gauges, metric_series, metrics
from deployments.gauges import FleetGauges, ReplicaGauges, RouterCounts, tier_names
from deployments.load_page import Figures
from deployments.reports import report_of
from deployments.routing import Heard

TIERS: dict[str, Any] = {"names": ["fast", "slow"], "headroom": [0.2, 0.1], "aging_s": [None, None]}
FIGURES = Figures(
    t=0.0,
    free_blocks=60,
    total_blocks=100,
    block_size=16,
    running=4,
    waiting=1,
    queued_tokens=30,
    head_blocks=2,
    batch_tokens=512,
    max_num_seqs=8,
    preemptions=3,
    steps=9,
    running_by_tier=(1, 3),
    waiting_by_tier=(0, 1),
    blocks_by_tier=(10, 30),
)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, ...], float]:
    """Name without prefix and label values -> the last value of a gauge, the sum of a counter."""
    found: dict[tuple[str, ...], float] = {}

    def record(self: metric_series.Metric, value: float, tags: dict[str, str]) -> None:
        key = (self.name.removeprefix(metrics.PREFIX), *tags.values())
        found[key] = value if self.kind != "counter" else found.get(key, 0) + value

    monkeypatch.setattr(metric_series.Metric, "record", record)
    monkeypatch.setattr(gauges.ray, "is_initialized", lambda: True)
    return found


def test_a_replica_tells_tokens(told: dict[tuple[str, ...], float]) -> None:
    """Blocks become tokens; freeness takes headroom of the tiers present and the head of the queue off."""
    ReplicaGauges("r", TIERS).look(FIGURES, False, 5.0)
    assert told["kv_capacity_tokens", "r"] == 1600
    assert told["kv_free_tokens", "r"] == 960
    assert told["kv_headroom_tokens", "r"] == pytest.approx(0.3 * 1600)
    assert told["freeness_tokens", "r"] == pytest.approx((60 - 2 - 30) * 16 / 4)
    assert told["freeness_normal_tokens", "r"] == pytest.approx((60 - 2) * 16 / 4)
    assert told["phi_ratio", "r"] == pytest.approx((60 - 2 - 30) * 8 / 100 / 4)
    assert (told["running_requests", "r", "fast"], told["running_requests", "r", "slow"]) == (1, 3)
    assert (told["waiting_requests", "r", "fast"], told["waiting_requests", "r", "slow"]) == (0, 1)
    assert (told["kv_used_tokens", "r", "fast"], told["kv_used_tokens", "r", "slow"]) == (160, 480)
    assert told["queued_prefill_tokens", "r"] == 30
    assert told["draining_seconds", "r"] == 0


def test_every_gauge_is_a_number(told: dict[tuple[str, ...], float]) -> None:
    """An idle replica and one that drains have finite gauges too; a tier without requests is 0, not missing."""
    idle = FIGURES._replace(running=0, waiting=0, running_by_tier=(), waiting_by_tier=(), blocks_by_tier=())
    for draining in (False, True):
        told.clear()
        ReplicaGauges("r", TIERS).look(idle, draining, 5.0)
        assert all(math.isfinite(value) for value in told.values())
        assert told["running_requests", "r", "slow"] == 0
        assert (told["freeness_tokens", "r"] == 0) == draining


def test_before_the_first_step(told: dict[tuple[str, ...], float]) -> None:
    """A replica whose engine has no figures yet tells only that it does not drain."""
    ReplicaGauges("r", TIERS).look(None, False, 5.0)
    assert {key[0] for key in told if key[1:] == ("r",)} == {"draining_seconds"}


def test_a_drain_is_timed(told: dict[tuple[str, ...], float]) -> None:
    """Seconds since the drain began; 0 again once it was called off, and from there anew."""
    replica, seen = ReplicaGauges("r", TIERS), []
    for now, draining in ((0.0, False), (10.0, True), (25.0, True), (30.0, False), (40.0, True), (41.0, True)):
        replica.look(FIGURES, draining, now)
        seen.append(told["draining_seconds", "r"])
    assert seen == [0, 0, 15, 0, 0, 1]


def test_preemptions_are_counted_once(told: dict[tuple[str, ...], float]) -> None:
    """The engine's sum becomes a counter: what is told again adds nothing."""
    replica = ReplicaGauges("r", TIERS)
    for preemptions in (3, 3, 5):
        replica.look(FIGURES._replace(preemptions=preemptions), False, 1.0)
    assert told[("preemptions_total",)] == 5


def _heard(name: str, state: Any, at: float) -> Heard:
    return Heard(report_of(FIGURES, replica=name, seq=1, state=state, admitted=[]), at)


def test_the_coordinator_tells_ages_of_the_living(told: dict[tuple[str, ...], float]) -> None:
    """Ages by replica, replicas by state, moves under way, once a second; one that is gone is told no more."""
    fleet = FleetGauges()
    fleet.look([_heard("a", "serving", 9.0), _heard("b", "draining", 9.5)], 2, 10.0)
    assert (told["report_age_seconds", "a"], told["report_age_seconds", "b"]) == (1.0, 0.5)
    assert [told["replicas", state] for state in gauges.STATES] == [1, 1, 0]
    assert told[("moves_under_way",)] == 2
    assert told[("coordinator_up",)] == 1
    told.clear()
    fleet.look([_heard("a", "serving", 10.2)], 0, 10.5)
    assert not told
    fleet.look([_heard("a", "serving", 10.9)], 0, 11.0)
    assert ("report_age_seconds", "b") not in told
    assert told["replicas", "draining"] == 0


def test_a_router_counts_what_it_chose(told: dict[tuple[str, ...], float]) -> None:
    """Decisions by policy and freshness; a disagreement is a choice that has more requests than another column."""
    counts, requests = RouterCounts(), np.array([3.0, 1.0, 1.0])
    for column, stale in ((0, False), (1, False), (2, False), (0, True)):
        counts.chose("p2c" if stale else "sal", stale, requests, column, math.inf if stale else 0.01)
    assert not told
    counts.flush("sal", 5.0)
    assert told["router_decisions_total", "sal", "fresh"] == 3
    assert told["router_decisions_total", "p2c", "stale"] == 1
    assert told["router_disagreements_total", "sal"] == 1
    assert told["router_disagreements_total", "p2c"] == 1
    assert told[("router_report_age_seconds",)] == 0.01
    counts.chose("sal", False, requests, 1, 0.02)
    counts.flush("sal", 5.5)
    assert told["router_decisions_total", "sal", "fresh"] == 3
    counts.flush("sal", 6.0)
    assert told["router_decisions_total", "sal", "fresh"] == 4


def test_a_decision_stays_cheap() -> None:
    """Counting a decision costs microseconds, with few replicas and with many, and keeps a bounded memory."""
    for replicas in (2, 512):
        counts, requests = RouterCounts(), np.ones(replicas)
        begin = time.process_time()
        for _ in range(5000):
            counts.chose("sal", False, requests, 1, 0.01)
        assert (time.process_time() - begin) / 5000 < 1e-3
        assert len(counts._ages) == gauges.MAX_AGES


def test_names_of_tiers() -> None:
    """Names of the config; numbers where a spec has none; one tier where there is no spec."""
    assert tier_names(TIERS) == ["fast", "slow"]
    assert tier_names({"headroom": [0, 0, 0], "aging_s": [None] * 3}) == ["0", "1", "2"]
    assert tier_names(None) == ["0"]
