"""What replica, coordinator and router tell of themselves, once a second: values that somebody else made anyway."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray
from numpy.typing import NDArray

from deployments import metrics
from deployments.hints import tiers_of
from deployments.load_page import Figures
from deployments.reports import report_of
from deployments.routing import Heard
from policies.freeness import present
from policies.migration.standing import standing

EVERY_S = 1.0
STATES = ("serving", "draining", "dead")
MAX_AGES = 1000  # of reports, kept between two flushes


def tier_names(spec: dict[str, Any] | None) -> list[str]:
    """The names of a spec's tiers, their numbers where it has none."""
    if spec is None:
        return ["0"]
    return [str(name) for name in spec.get("names") or range(len(spec["headroom"]))]


class ReplicaGauges:
    """Gauges of one engine replica, and its preemptions. `tiers` as in `hints.tiers_of`."""

    def __init__(self, replica: str, tiers: dict[str, Any] | None) -> None:
        self._replica = replica
        self._tiers = tiers_of(tiers)
        self._names = tier_names(tiers)
        self._preemptions = 0
        self._draining_since = math.nan
        metrics.PREEMPTIONS.at().inc(0)
        for reason in metrics.MOVE_REASONS:
            metrics.MIGRATIONS.at(reason, "done", "moved").inc(0)
            metrics.MIGRATION_BYTES.at(reason).inc(0)
            metrics.MIGRATION_BLOCKS.at(reason).inc(0)
        metrics.MIGRATION_STAGES.at().inc(0)

    def look(self, figures: Figures | None, draining: bool, now: float) -> None:
        """Set every gauge; `now` is monotonic seconds, `figures` None before the engine's first step."""
        if not draining:
            self._draining_since = math.nan
        elif math.isnan(self._draining_since):
            self._draining_since = now
        self._set(metrics.DRAINING, now - self._draining_since if draining else 0.0)
        if figures is None:
            return
        size, state = figures.block_size, "draining" if draining else "serving"
        report = report_of(figures, replica=self._replica, seq=0, state="serving", admitted=[])
        here, bare = standing(self._replica, report, self._tiers), standing(self._replica, report)
        running = 0 if state != "serving" else max(figures.running, 1)
        self._set(metrics.CAPACITY, figures.total_blocks * size)
        self._set(metrics.FREE, figures.free_blocks * size)
        self._set(metrics.PREFILL, figures.queued_tokens)
        self._set(metrics.HEADROOM, size * sum(here.kept(tier) for tier in present(report)))
        self._set(metrics.FREENESS, here.left * size / running if running else 0.0)
        self._set(metrics.FREENESS_NORMAL, bare.left * size / running if running else 0.0)
        self._set(metrics.PHI, here.phi if running else 0.0)
        for metric, by_tier, unit in (
            (metrics.RUNNING, figures.running_by_tier, 1),
            (metrics.WAITING, figures.waiting_by_tier, 1),
            (metrics.USED, figures.blocks_by_tier, size),
        ):
            self._by_tier(metric, by_tier, unit)
        if figures.preemptions > self._preemptions:
            metrics.PREEMPTIONS.at().inc(figures.preemptions - self._preemptions)
            self._preemptions = figures.preemptions

    def _set(self, metric: metrics.Metric, value: float) -> None:
        metric.at(self._replica).set(value)

    def _by_tier(self, metric: metrics.Metric, counts: Sequence[int], unit: int) -> None:
        for number, name in enumerate(self._names):
            metric.at(self._replica, name).set(unit * counts[number] if number < len(counts) else 0)

    async def watch(self, figures: Callable[[], Figures | None], draining: Callable[[], bool]) -> None:
        """Look once a second, for ever."""
        while True:
            self.look(figures(), draining(), time.monotonic())
            await asyncio.sleep(EVERY_S)


class FleetGauges:
    """What the coordinator sees of the fleet."""

    def __init__(self) -> None:
        self._looked_at = -math.inf

    def look(self, fleet: Iterable[Heard], moving: int, now: float) -> None:
        """Set every gauge, if the last time is a second ago; `now` is monotonic seconds, `moving` moves are under way.

        Replicas that nobody hears of any more are not set, so that Ray drops their series.
        """
        if now - self._looked_at < EVERY_S:
            return
        self._looked_at = now
        states = dict.fromkeys(STATES, 0)
        for heard in fleet:
            states[heard.report.state] += 1
            metrics.REPORT_AGE.at(heard.report.replica).set(max(0.0, now - heard.at))
        for state, count in states.items():
            metrics.REPLICAS.at(state).set(count)
        metrics.MOVING.at().set(moving)
        metrics.COORDINATOR_UP.at().set(1)


class RouterCounts:
    """Decisions of one router, added up here and given to Ray once a second, as a decision takes microseconds."""

    def __init__(self) -> None:
        self._decisions: Counter[tuple[str, str]] = Counter()
        self._disagreements: Counter[str] = Counter()
        self._ages: list[float] = []
        self._flushed_at = -math.inf

    def chose(self, policy: str, stale: bool, requests: NDArray[Any], column: int, age_s: float) -> None:
        """A policy chose a column; `requests` of each column as the policy saw them, `age_s` of the chosen's report."""
        self._decisions[policy, "stale" if stale else "fresh"] += 1
        if requests[column] > requests.min():
            self._disagreements[policy] += 1
        if age_s < math.inf and len(self._ages) < MAX_AGES:
            self._ages.append(age_s)

    def flush(self, policy: str, now: float) -> None:
        """Give the sums to Ray, if the last time is a second ago; `policy` is the one in force."""
        if now - self._flushed_at < EVERY_S or not ray.is_initialized():
            return
        self._flushed_at = now
        for name, reports in ((policy, "fresh"), ("p2c", "stale")):
            metrics.DECISIONS.at(name, reports).inc(0)
        metrics.DISAGREEMENTS.at(policy).inc(0)
        for (name, reports), count in self._decisions.items():
            metrics.DECISIONS.at(name, reports).inc(count)
        for name, count in self._disagreements.items():
            metrics.DISAGREEMENTS.at(name).inc(count)
        for age in self._ages:
            metrics.REPORT_AGE_AT_USE.at().observe(age)
        self._decisions.clear()
        self._disagreements.clear()
        self._ages.clear()
