"""Queue order inside one replica: which waiting request the engine admits next."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from policies.registry import Registry
from policies.scheduling.fcfs import FCFS
from policies.scheduling.guarded_larry import GuardedLarry
from policies.scheduling.larry import Larry
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
for _policy in (FCFS, Larry, GuardedLarry):
    SCHEDULING.register(_policy.name)(_policy)
