"""The replicas of a run: all that there have been, by number, and those that run, by name."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.scheduler import SchedulerSettings
from loadgen.simulator import engine
from loadgen.simulator.fleet import Fleet
from loadgen.simulator.prefixes import hits_of
from loadgen.simulator.replica import Clock, Replica


class Roster:
    """`alive` is in the order in which they began; what one that is gone has counted is kept."""

    def __init__(self, fleet: Fleet, clock: Clock, *, fast: bool, coast: bool) -> None:
        self.replicas: list[Replica] = []
        self.alive: dict[str, Replica] = {}
        self.index: dict[str, int] = {}
        self._fleet, self._clock, self._fast, self._coast = fleet, clock, fast, coast
        self._preemptions: list[int] = []  # before the present process
        self._hits: list[tuple[int, int]] = []  # likewise: prompt tokens looked up, and found
        for replica in self._make(range(fleet.replicas)):
            self._enter(replica)

    def runs(self, index: int) -> bool:
        """Whether the replica's process runs."""
        return self.replicas[index].name in self.alive

    def add(self) -> Replica:
        """One more replica."""
        (replica,) = self._make([len(self.replicas)])
        self._enter(replica)
        return replica

    def restart(self, index: int) -> Replica:
        """A new process of a replica that is gone."""
        before = self.replicas[index]
        (replica,) = self._make([index])
        replica.steps, replica.busy_s = before.steps, before.busy_s
        self.replicas[index] = self.alive[replica.name] = replica
        return replica

    def gone(self, index: int) -> None:
        """A replica's process has ended."""
        self._preemptions[index], self._hits[index] = self._preemptions_of(index), self._hits_of(index)
        del self.alive[self.replicas[index].name]

    def check_idle(self) -> None:
        """RuntimeError unless all requests have left and all KV blocks are back."""
        for replica in self.alive.values():
            replica.check_idle()

    @property
    def preemptions(self) -> list[int]:
        """Of each replica."""
        return [self._preemptions_of(i) for i in range(len(self.replicas))]

    @property
    def hits(self) -> list[tuple[int, int]]:
        """Of each replica: prompt tokens that were looked up in its prefix cache, and those that were found."""
        return [self._hits_of(i) for i in range(len(self.replicas))]

    def _make(self, numbers: Sequence[int]) -> list[Replica]:
        fleet = self._fleet
        settings = SchedulerSettings(fleet.scheduling, None, fleet.tiers)
        schedulers = engine.schedulers(fleet.model, fleet.shape, settings, len(numbers), fast=self._fast)
        asynchronous, coast = fleet.shape.asynchronous, self._coast
        return [
            Replica(f"replica-{i}", one, fleet.cost, self._clock, asynchronous=asynchronous, coast=coast)
            for i, one in zip(numbers, schedulers, strict=True)
        ]

    def _enter(self, replica: Replica) -> None:
        self.index[replica.name] = len(self.replicas)
        self.replicas.append(replica)
        self.alive[replica.name] = replica
        self._preemptions.append(0)
        self._hits.append((0, 0))

    def _preemptions_of(self, index: int) -> int:
        now = self.replicas[index].scheduler.preemptions if self.runs(index) else 0
        return self._preemptions[index] + now

    def _hits_of(self, index: int) -> tuple[int, int]:
        queries, found = self._hits[index]
        if not self.runs(index):
            return queries, found
        more_queries, more_found = hits_of(self.replicas[index].scheduler)
        return queries + more_queries, found + more_found
