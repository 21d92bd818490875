"""What a run of the virtual cluster is given, and what it gives: requests, fleet, outcome."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loadgen.metrics import RequestRecord
from loadgen.simulator import engine
from loadgen.simulator.hardware import Model
from loadgen.simulator.scaling import Autoscaling, Scaled
from loadgen.simulator.step_cost import StepCost
from loadgen.simulator.transfer import Migration


@dataclass(frozen=True, slots=True)
class Job:
    """A request to simulate: due in seconds since the start, lengths in tokens, tier (0 the highest), session.

    The client leaves `patience` seconds after it was due, if its answer is not complete by then, because of `left`:
    `cancelled` or `unfinished` as in loadgen.metrics. `told`: the length of the answer that an oracle tells policies
    that ask for it, tokens; None: the true one. `blocks`: what the prompt consists of, as in loadgen.workloads.
    """

    due: float
    prompt_tokens: int
    output_tokens: int
    tier: int = 0
    session: int | None = None
    patience: float | None = None
    left: str = "unfinished"
    told: int | None = None
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Outage:
    """A replica (by its number) dies at `begin` and serves again at `end`, seconds; inf: it does not come back.

    Its requests go on elsewhere, where their KV cache is computed anew. Start-up time is part of the outage.
    """

    replica: int
    begin: float
    end: float = math.inf


@dataclass(frozen=True, slots=True)
class Drain:
    """A replica (by its number) drains by hand from `begin` on and takes requests again at `end`, seconds.

    With `Fleet.migration` its requests move away; without, they go on to their ends there.
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
    tier. `oracle`: policies that ask for the length of an answer get the true one. `migration` None: nothing moves.
    With `autoscaling` the fleet begins with `replicas`; one that dies is replaced, whenever its outage ends.
    `block_tokens`: prompt tokens that one of a job's `blocks` stands for, needed with prefix caching only.
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
    migration: Migration | None = None
    drains: tuple[Drain, ...] = ()
    autoscaling: Autoscaling | None = None
    block_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """`records[i]` and `replica[i]` (-1: refused) belong to the i-th job; figures of each replica, times in seconds.

    `replica`: where the request ended. `busy_s`: seconds in which a step ran. `duration`: until the last request ended.
    `moves`: reason -> how they ended -> moves. `pauses`: seconds between the last token of a moved request on one
    replica and the next on the other. `moved_bytes`: of KV that was sent. `replica_s`:
    seconds of replicas that were paid for, and `scaling` what the autoscaler decided. `prefix_queries` and
    `prefix_hits`: of each replica, prompt tokens that were looked up in its prefix cache and those that were found
    (loadgen.simulator.prefixes).
    """

    records: list[RequestRecord]
    replica: list[int]
    duration: float
    steps: list[int]
    preemptions: list[int]
    busy_s: list[float]
    moves: dict[str, dict[str, int]] = field(default_factory=dict)
    pauses: list[float] = field(default_factory=list)
    moved_bytes: float = 0.0
    replica_s: float = 0.0
    scaling: list[Scaled] = field(default_factory=list)
    prefix_queries: list[int] = field(default_factory=list)
    prefix_hits: list[int] = field(default_factory=list)


def check(fleet: Fleet, jobs: Sequence[Job], tiers: int) -> None:
    """ValueError for outages, drains and jobs that cannot be played, with what is wrong."""
    free_from: dict[int, float] = {}
    for outage in sorted(fleet.outages, key=lambda each: each.begin):
        if not (0 <= outage.replica < fleet.replicas and 0 <= outage.begin < outage.end):
            raise ValueError(f"{outage}: name a replica below {fleet.replicas}, and an end after the begin")
        if outage.begin < free_from.get(outage.replica, 0.0):
            raise ValueError(f"{outage}: the replica is down already")
        free_from[outage.replica] = outage.end
    for drain in fleet.drains:
        if not (0 <= drain.replica < fleet.replicas and 0 <= drain.begin < drain.end):
            raise ValueError(f"{drain}: name a replica below {fleet.replicas}, and an end after the begin")
    before, longest = 0.0, fleet.shape.longest
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
