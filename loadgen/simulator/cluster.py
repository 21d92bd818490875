"""A fleet in virtual time: arrivals, routers with stale reports, replicas; every request ends exactly once."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from deployments.hints import tiers_of
from deployments.scheduler import SchedulerSettings
from loadgen.metrics import RequestRecord
from loadgen.simulator import engine
from loadgen.simulator.hardware import Model
from loadgen.simulator.lean import Ended
from loadgen.simulator.replica import Clock, Replica
from loadgen.simulator.router import Router
from loadgen.simulator.step_cost import StepCost
from policies.types import EmptyFleetError

# What happens at the same moment happens in this order, and by replica.
STEP_ENDS, REPORTS, LEAVES, DIES, IS_BACK = range(5)


@dataclass(frozen=True, slots=True)
class Job:
    """A request to simulate: due in seconds since the start, lengths in tokens, tier (0 the highest), session.

    The client leaves `patience` seconds after it was due, if its answer is not complete by then, because of `left`:
    `cancelled` or `unfinished` as in loadgen.metrics.
    """

    due: float
    prompt_tokens: int
    output_tokens: int
    tier: int = 0
    session: int | None = None
    patience: float | None = None
    left: str = "unfinished"


@dataclass(frozen=True, slots=True)
class Outage:
    """A replica (by its number) dies at `begin` and serves again at `end`, seconds; inf: it does not come back.

    Its requests go on elsewhere, where their KV cache is computed anew. Start-up time is part of the outage.
    """

    replica: int
    begin: float
    end: float = math.inf


@dataclass(frozen=True, slots=True)
class Fleet:
    """What is simulated.

    `scheduling` and `balancing` are `{"name": ..., **parameters}`, `tiers` as in deployments.scheduler.
    `report_s`: seconds between two reports of a replica, 0: the routers know all that happened. `stale_s`: age of all
    reports at which a router goes by its own calls only. `bounds`: of each ingress's admission queue, in total and per
    tier. `oracle`: policies that ask for the length of an answer get the true one.
    """

    model: Model
    shape: engine.Shape
    cost: StepCost
    replicas: int = 1
    scheduling: dict[str, Any] = field(default_factory=lambda: {"name": "fcfs"})
    balancing: dict[str, Any] = field(default_factory=lambda: {"name": "sal"})
    tiers: dict[str, Any] | None = None
    routers: int = 1
    report_s: float = 0.0
    stale_s: float = 1.0
    bounds: tuple[int, tuple[int | None, ...]] | None = None
    outages: tuple[Outage, ...] = ()
    oracle: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """`records[i]` and `replica[i]` (-1: refused) belong to the i-th job; figures of each replica, times in seconds.

    `busy_s`: seconds in which a step ran. `duration`: until the last request ended.
    """

    records: list[RequestRecord]
    replica: list[int]
    duration: float
    steps: list[int]
    preemptions: list[int]
    busy_s: list[float]


class Cluster:
    """One run: make it, `run` it once. `fast` and `coast` choose short cuts, which change no result."""

    def __init__(self, fleet: Fleet, *, fast: bool = True, coast: bool = True) -> None:
        self.fleet = fleet
        self.clock = Clock()
        self._fast, self._coast = fast, coast
        self.replicas = self._make(range(fleet.replicas))
        self._index = {replica.name: i for i, replica in enumerate(self.replicas)}
        self._tiers = tiers_of(fleet.tiers)
        self.routers = [
            Router(
                fleet.balancing,
                self._tiers,
                np.random.default_rng([fleet.seed, i]),
                self.replicas,
                stale_s=fleet.stale_s,
                bounds=fleet.bounds,
            )
            for i in range(fleet.routers)
        ]
        self._heap: list[tuple[float, int, int]] = []
        self._waits_for: list[float | None] = [None] * fleet.replicas  # the step end that is in the heap
        self._happens = (self._end_step, self._report, self._leave, self._die, self._come_back)
        self._up = [True] * fleet.replicas
        self._preemptions = [0] * fleet.replicas  # of replicas that have died

    def _make(self, numbers: Sequence[int]) -> list[Replica]:
        fleet = self.fleet
        settings = SchedulerSettings(fleet.scheduling, None, fleet.tiers)
        schedulers = engine.schedulers(fleet.model, fleet.shape, settings, len(numbers), fast=self._fast)
        asynchronous, coast = fleet.shape.asynchronous, self._coast
        return [
            Replica(f"replica-{i}", one, fleet.cost, self.clock, asynchronous=asynchronous, coast=coast)
            for i, one in zip(numbers, schedulers, strict=True)
        ]

    def run(self, jobs: Sequence[Job]) -> Outcome:
        """Play the jobs to their ends; ValueError for jobs out of order or too long for the engine."""
        self._check(jobs)
        self.jobs = jobs
        self._first = [math.nan] * len(jobs)
        self._last = [math.nan] * len(jobs)
        self._replica = [-1] * len(jobs)
        self._refused: dict[int, tuple[int, str, float | None]] = {}
        self._cut: dict[int, str] = {}  # why the client left
        self._left = len(jobs)
        if self.fleet.report_s > 0:
            for i in range(len(self.replicas)):
                self._push(i * self.fleet.report_s / len(self.replicas), REPORTS, i)
        for number, outage in enumerate(self.fleet.outages):
            self._push(outage.begin, DIES, number)
            if outage.end < math.inf:
                self._push(outage.end, IS_BACK, number)
        arrived, heap = 0, self._heap
        while self._left:
            if arrived < len(jobs) and (not heap or jobs[arrived].due < heap[0][0]):
                self.clock.now = jobs[arrived].due
                self._arrive(arrived)
                arrived += 1
                continue
            if not heap:
                raise RuntimeError(f"{self._left} requests are left, and nothing happens any more")
            now, kind, index = heapq.heappop(heap)
            self.clock.now = now
            self._happens[kind](index)
        return self._outcome()

    def _check(self, jobs: Sequence[Job]) -> None:
        longest, tiers = self.fleet.shape.longest, len(self._tiers)
        free_from: dict[int, float] = {}
        for outage in sorted(self.fleet.outages, key=lambda each: each.begin):
            if not (0 <= outage.replica < self.fleet.replicas and 0 <= outage.begin < outage.end):
                raise ValueError(f"{outage}: name a replica below {self.fleet.replicas}, and an end after the begin")
            if outage.begin < free_from.get(outage.replica, 0.0):
                raise ValueError(f"{outage}: the replica is down already")
            free_from[outage.replica] = outage.end
        before = 0.0
        for number, job in enumerate(jobs):
            if job.due < before:
                raise ValueError(f"job {number} is due at {job.due} s, before the one ahead of it: sort them by `due`")
            before = job.due
            if job.prompt_tokens < 1 or job.output_tokens < 1:
                raise ValueError(f"job {number} has {job.prompt_tokens} + {job.output_tokens} tokens: give 1 at least")
            if job.prompt_tokens + job.output_tokens > longest:
                raise ValueError(
                    f"job {number} has {job.prompt_tokens} + {job.output_tokens} tokens, the engine takes {longest}: "
                    "scale the workload, or give the engine a longer context or more KV blocks"
                )
            if not 0 <= job.tier < tiers:
                raise ValueError(f"job {number} is of tier {job.tier}, the fleet has {tiers}")

    def _push(self, when: float, kind: int, index: int) -> None:
        heapq.heappush(self._heap, (when, kind, index))

    def _follow(self, index: int) -> None:
        """Put the end of the replica's running step into the heap, once."""
        until = self.replicas[index].busy_until
        if until is not None and until != self._waits_for[index]:
            self._waits_for[index] = until
            self._push(until, STEP_ENDS, index)

    def _arrive(self, number: int) -> None:
        job, router = self.jobs[number], self.routers[number % len(self.routers)]
        verdict = router.decide(job.tier)
        if verdict.reason is not None:
            self._refuse(number, 429, verdict.reason, router.retry_after(job.tier))
            return
        for other in verdict.shed:
            self._abort(other)
            self._refuse(other, 429, "shed", router.retry_after(self.jobs[other].tier))
        self._send(number)
        if job.patience is not None:
            self._push(job.due + job.patience, LEAVES, number)

    def _send(self, number: int, generated: int | None = None) -> None:
        """Send a request to a replica; again, with so many tokens `generated`, if the one before has died."""
        job, now = self.jobs[number], self.clock.now
        router, again = self.routers[number % len(self.routers)], generated is not None
        if self.fleet.report_s == 0:
            for i, replica in enumerate(self.replicas):
                if self._up[i]:
                    router.hear(i, replica, now)
        try:
            name = router.choose(number, job.prompt_tokens, job.tier, job.session, now, again=again)
        except EmptyFleetError:
            router.aborted(number, now)
            self._refuse(number, 503, "no_replica", None)
            return
        index = self._replica[number] = self._index[name]
        self.replicas[index].submit(
            engine.request(
                str(number),
                job.prompt_tokens,
                job.output_tokens,
                job.due,
                tier=job.tier,
                ticket=number,
                oracle=self.fleet.oracle,
                generated=generated or 0,
            )
        )
        self._follow(index)

    def _abort(self, number: int) -> None:
        self.routers[number % len(self.routers)].aborted(number, self.clock.now)
        self.replicas[self._replica[number]].abort(str(number))

    def _leave(self, number: int) -> None:
        if number in self._refused or not math.isnan(self._last[number]):
            return
        self._abort(number)
        self._last[number] = self.clock.now
        self._cut[number] = self.jobs[number].left
        self._left -= 1

    def _die(self, number: int) -> None:
        index = self.fleet.outages[number].replica
        replica = self.replicas[index]
        self._up[index], self._waits_for[index] = False, None
        self._preemptions[index] += replica.scheduler.preemptions
        left = replica.crash()
        for router in self.routers:
            router.lose(index, replica)
        for name in sorted(left, key=int):
            self._send(int(name), left[name])

    def _come_back(self, number: int) -> None:
        index = self.fleet.outages[number].replica
        before = self.replicas[index]
        (replica,) = self._make([index])
        replica.steps, replica.busy_s = before.steps, before.busy_s
        self.replicas[index], self._up[index] = replica, True
        for router in self.routers:
            router.table.join(replica.name)

    def _end_step(self, index: int) -> None:
        if self._waits_for[index] != self.clock.now:
            return  # the replica has died in that step
        self._waits_for[index] = None
        self._note(self.replicas[index].end_step())
        self._follow(index)

    def _note(self, ended: Ended) -> None:
        now, routers = self.clock.now, self.routers
        for name in ended.first:
            number = int(name)
            self._first[number] = now
            routers[number % len(routers)].started(number, now)
        for name in ended.last:
            number = int(name)
            if not math.isnan(self._last[number]):
                raise RuntimeError(f"request {number} ended twice")
            self._last[number] = now
            self._left -= 1
            job = self.jobs[number]
            routers[number % len(routers)].ended(number, job.prompt_tokens, job.output_tokens, now)

    def _report(self, index: int) -> None:
        if self._up[index]:
            for router in self.routers:
                router.hear(index, self.replicas[index], self.clock.now)
        self._push(self.clock.now + self.fleet.report_s, REPORTS, index)

    def _refuse(self, number: int, status: int, reason: str, retry_after: float | None) -> None:
        if number in self._refused:
            raise RuntimeError(f"request {number} was refused twice")
        self._refused[number] = (status, reason, retry_after)
        self._left -= 1

    def _outcome(self) -> Outcome:
        for replica, up in zip(self.replicas, self._up, strict=True):
            if up:
                replica.check_idle()
        return Outcome(
            records=[self._record(number, job) for number, job in enumerate(self.jobs)],
            replica=self._replica,
            duration=self.clock.now,
            steps=[replica.steps for replica in self.replicas],
            preemptions=[
                before + (replica.scheduler.preemptions if up else 0)
                for before, replica, up in zip(self._preemptions, self.replicas, self._up, strict=True)
            ],
            busy_s=[replica.busy_s for replica in self.replicas],
        )

    def _record(self, number: int, job: Job) -> RequestRecord:
        ended = RequestRecord(
            due=job.due,
            sent=job.due,
            prompt_len=job.prompt_tokens,
            output_len=job.output_tokens,
            ttft=first - job.due if not math.isnan(first := self._first[number]) else 0.0,
            latency=self._last[number] - job.due,
            status=200,
        )
        if number in self._refused:
            status, reason, wait = self._refused[number]
            return replace(
                ended, output_len=0, latency=0.0, error=reason, status=status, reason=reason, retry_after=wait
            )
        if number in self._cut:
            why = self._cut[number]
            return replace(ended, output_len=0, error=why, left=why)
        return ended
