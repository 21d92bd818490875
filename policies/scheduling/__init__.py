"""Queue order inside one replica: which waiting request the engine admits next."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from policies.registry import Registry
from policies.scheduling.fcfs import FCFS
from policies.scheduling.guarded_larry import GuardedLarry
from policies.scheduling.larry import Larry
from policies.scheduling.larry_preemptive import LarryPreemptive
from policies.scheduling.ltr import LTR
from policies.scheduling.mlfq import MLFQ
from policies.scheduling.no_preempt import NoPreempt
from policies.scheduling.pia import PiA
from policies.scheduling.prefill_first import PrefillFirst
from policies.scheduling.s3 import S3
from policies.scheduling.sarathi import Sarathi
from policies.scheduling.slo_budget import SloBudget
from policies.scheduling.srpt import SRPT
from policies.types import Request, SchedulerContext

__all__ = ["FCFS", "SCHEDULING", "GuardedLarry", "Larry", "SchedulingPolicy"]


class SchedulingPolicy(Protocol):
    """Orders the waiting requests of one replica; the engine admits from the front until one does not fit."""

    @property
    def name(self) -> str: ...

    @property
    def reorders(self) -> bool:
        """False: the engine keeps its own first-come-first-served queue and never asks for keys."""

    def waiting_key(self, request: Request, ctx: SchedulerContext) -> tuple[float | str, ...]:
        """Sort key of a waiting request, ascending: the smallest is next. No two requests have equal keys."""

    def order_epoch(self, ctx: SchedulerContext) -> Hashable:
        """Keys made under an equal epoch stay valid: recompute only when this, or the set of requests, changed."""

    def on_step(self, ctx: SchedulerContext) -> None:
        """Hear that a scheduler step begins."""


SCHEDULING: Registry[SchedulingPolicy] = Registry("scheduling policy")
for _policy in (
    FCFS,
    Larry,
    GuardedLarry,
    LarryPreemptive,
    NoPreempt,
    PrefillFirst,
    Sarathi,
    SRPT,
    LTR,
    MLFQ,
    PiA,
    S3,
    SloBudget,
):
    SCHEDULING.register(_policy.name)(_policy)
