"""One configuration tried in the simulator: which share of each tier's requests keeps its promise."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deployments.step_content import Step
from loadgen.metrics import RequestRecord, percentile
from loadgen.run.slo import Slos, slo_of
from loadgen.simulator.cluster import Cluster, Fleet, Job
from loadgen.simulator.step_cost import StepCost

ORACLE = ("predictor", "oracle")  # what a policy gets that asks for lengths and names no other predictor


@dataclass(frozen=True, slots=True)
class Pair:
    """A scheduling and a balancing policy, each as `{"name": ..., **parameters}`."""

    scheduling: dict[str, Any]
    balancing: dict[str, Any]

    def __str__(self) -> str:
        return f"{written(self.scheduling)} + {written(self.balancing)}"


def written(policy: Mapping[str, Any]) -> str:
    """The policy as it is written on a command line: `larry:alpha=2`."""
    parameters = ",".join(f"{key}={value}" for key, value in policy.items() if key != "name" and (key, value) != ORACLE)
    return ":".join(filter(None, (policy["name"], parameters)))


@dataclass(frozen=True, slots=True)
class Slower:
    """Step times of another model of them, times a factor."""

    cost: StepCost
    factor: float

    def seconds(self, step: Step) -> float:
        """Seconds of the step."""
        return self.factor * self.cost.seconds(step)


@dataclass(frozen=True, slots=True)
class TierOutcome:
    """Of one tier in one run: requests judged, share of them within the bounds; seconds, at the 95th percentile."""

    judged: int
    within: float
    p95_ttft: float
    p95_tpot: float
    p95_e2el: float


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation: outcome of each tier with bounds, seconds until the last request ended, answer tokens.

    `played`: the share of the requests that had ended when it was clear that the target is missed, and the run was
    given up; 1: it went on to its end. One that was given up says no more than that.
    """

    tiers: dict[int, TierOutcome]
    seconds: float
    output_tokens: int
    preemptions: int
    played: float = 1.0

    @property
    def worst(self) -> float:
        """The share within bounds of the tier that is worst off; nan if the run was given up."""
        if self.played < 1:
            return math.nan
        return min((tier.within for tier in self.tiers.values()), default=1.0)


@dataclass(frozen=True, slots=True)
class Trial:
    """A pair on so many replicas, and its runs on one seed each."""

    pair: Pair
    replicas: int
    runs: tuple[Run, ...]

    @property
    def played(self) -> float:
        """How many of its runs were played; the last one may have been given up in the middle."""
        return sum(run.played for run in self.runs)

    @property
    def worst(self) -> float:
        """The share within bounds of the tier that is worst off in its worst run; nan if a run was given up."""
        return math.nan if self.played < len(self.runs) else min(run.worst for run in self.runs)

    def within(self, tier: int) -> float:
        """The share of the tier's requests within their bounds, in its worst run."""
        return min((run.tiers[tier].within for run in self.runs if tier in run.tiers), default=1.0)


class Trials:
    """Runs configurations on the workloads of several seeds, each once.

    `fleet` says what all have in common; `target` is the share of each tier that must be within its bounds, in each
    run; `tell` hears of each run before it begins.
    """

    def __init__(
        self,
        fleet: Fleet,
        workloads: Mapping[int, Sequence[Job]],
        slos: Slos,
        target: float,
        tell: Callable[[str], None],
    ) -> None:
        self._fleet, self._workloads, self._slos, self._tell = fleet, workloads, slos, tell
        self.target = target
        self.seeds = tuple(workloads)
        self._pairs: dict[str, Pair] = {}
        self._known: dict[tuple[str, int, int], Run] = {}

    def trial(self, pair: Pair, replicas: int, seeds: Sequence[int], *, whole: bool = False) -> Trial:
        """Runs on these seeds, up to the first that misses the target: later ones could not make up for it.

        That one is given up as soon as it is known to, unless `whole` runs are asked for.
        """
        runs = []
        for seed in seeds:
            runs.append(self._run(pair, replicas, seed, whole))
            if not runs[-1].worst >= self.target:
                break
        return Trial(pair, replicas, tuple(runs))

    def enough(self, pair: Pair, replicas: int, seeds: Sequence[int]) -> bool:
        """Whether each tier reaches the target on each seed."""
        return self.trial(pair, replicas, seeds).worst >= self.target

    def ran(self) -> list[Trial]:
        """All that was run, by pair and replicas."""
        runs: dict[tuple[str, int], list[Run]] = {}
        for (name, replicas, _), run in sorted(self._known.items()):
            runs.setdefault((name, replicas), []).append(run)
        return [Trial(self._pairs[name], replicas, tuple(each)) for (name, replicas), each in runs.items()]

    def slower(self, factor: float) -> Trials:
        """Trials of the same with steps that take so many times as long."""
        fleet = replace(self._fleet, cost=Slower(self._fleet.cost, factor))
        return Trials(fleet, self._workloads, self._slos, self.target, self._tell)

    def of(self, workload: Sequence[Job]) -> Trials:
        """Trials of the same fleet on another workload."""
        return Trials(self._fleet, {self.seeds[0]: workload}, self._slos, self.target, self._tell)

    def _run(self, pair: Pair, replicas: int, seed: int, whole: bool) -> Run:
        key = (str(pair), replicas, seed)
        if key not in self._known or (whole and self._known[key].played < 1):
            jobs = self._workloads[seed]
            self._tell(f"{pair}, {replicas} replicas, {len(jobs)} requests, seed {seed}")
            self._pairs[str(pair)] = pair
            fleet = replace(
                self._fleet, scheduling=pair.scheduling, balancing=pair.balancing, replicas=replicas, seed=seed
            )
            if fleet.tiers is not None and len(fleet.tiers["headroom"]) == 1 and not asks_promises(pair):
                fleet = replace(fleet, tiers=None)  # the same, and faster
            if replicas == 1:
                fleet = replace(fleet, migration=None)  # nowhere to go, and nobody need look for it all the time
            self._known[key] = _played(fleet, jobs, self._slos, None if whole else Watch(jobs, self._slos, self.target))
        return self._known[key]


class GivenUpError(Exception):
    """A run cannot reach the target any more."""


class Watch:
    """Counts the requests of a run that end (`ended`) and miss their bounds; GivenUpError when a tier has too many."""

    def __init__(self, jobs: Sequence[Job], slos: Slos, target: float) -> None:
        self.ended = 0
        self._slos = slos
        # Clients that leave are not judged, so that fewer may miss: then this gives up late, never wrongly.
        self._spare = {tier: (1 - target) * count + 1e-9 for tier, count in Counter(job.tier for job in jobs).items()}

    def __call__(self, job: Job, record: RequestRecord) -> None:
        self.ended += 1
        slo = slo_of(self._slos, job.tier)
        if slo is not None and record.outcome != "cancelled" and not slo.met(record):
            self._spare[job.tier] -= 1
            if self._spare[job.tier] < 0:
                raise GivenUpError


def _played(fleet: Fleet, jobs: Sequence[Job], slos: Slos, watch: Watch | None) -> Run:
    cluster = Cluster(fleet)
    try:
        outcome = cluster.run(jobs, watch)
    except GivenUpError:
        assert watch is not None
        return Run({}, cluster.clock.now, 0, 0, played=min(watch.ended / len(jobs), 1 - 1e-9))
    return Run(
        outcomes(jobs, outcome.records, slos),
        outcome.duration,
        sum(r.output_len for r in outcome.records if r.outcome == "ok"),
        sum(outcome.preemptions),
    )


def asks_promises(pair: Pair) -> bool:
    """Whether the order of requests depends on what their tier promises."""
    return str(pair.scheduling["name"]) == "slo_budget"


def outcomes(jobs: Sequence[Job], records: Sequence[RequestRecord], slos: Slos) -> dict[int, TierOutcome]:
    """Outcome of each tier that has bounds; requests whose client left on purpose are not judged."""
    found = {}
    for tier in sorted({job.tier for job in jobs}):
        slo = slo_of(slos, tier)
        judged = [r for r, job in zip(records, jobs, strict=True) if job.tier == tier and r.outcome != "cancelled"]
        if slo is None or not judged:
            continue
        done = [r for r in judged if r.outcome == "ok"]
        found[tier] = TierOutcome(
            judged=len(judged),
            within=sum(slo.met(r) for r in judged) / len(judged),
            p95_ttft=percentile([r.ttft for r in done], 95),
            p95_tpot=percentile([r.tgt / (r.output_len - 1) for r in done if r.output_len > 1], 95),
            p95_e2el=percentile([r.latency for r in done], 95),
        )
    return found


def busiest(jobs: Sequence[Job], count: int) -> list[Job]:
    """The `count` jobs in a row with the most tokens per second, the first of them due at 0; all if there are fewer."""
    if len(jobs) <= count:
        return list(jobs)
    tokens = [job.prompt_tokens + job.output_tokens for job in jobs]
    inside, best, begin = sum(tokens[:count]), -1.0, 0
    for first in range(len(jobs) - count + 1):
        if first:
            inside += tokens[first + count - 1] - tokens[first - 1]
        rate = inside / max(jobs[first + count - 1].due - jobs[first].due, 1e-9)
        if rate > best:
            best, begin = rate, first
    start = jobs[begin].due
    return [replace(job, due=job.due - start) for job in jobs[begin : begin + count]]


def alone(jobs: Sequence[Job], count: int, apart: float = 1e5) -> list[Job]:
    """Up to `count` jobs of each tier, `apart` seconds from each other: an idle replica serves each of them."""
    chosen: list[Job] = []
    for tier in sorted({job.tier for job in jobs}):
        of_tier = [job for job in jobs if job.tier == tier]
        chosen += of_tier[:: max(1, len(of_tier) // count)][:count]
    return [replace(job, due=i * apart) for i, job in enumerate(chosen)]
