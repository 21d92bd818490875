"""What a scheduling policy may do beyond ordering the queue: it has the method, or it does not.

The engine's adapter looks once, when a policy comes into force, which of these it satisfies; the simulator runs the
same adapter. All are called inside one scheduler step, with that step's frozen context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from policies.types import Request, SchedulerContext


@runtime_checkable
class OrdersRunning(Protocol):
    """Orders the running requests: the front gets tokens first, the tail is preempted first when blocks run out."""

    def running_key(self, request: Request, ctx: SchedulerContext) -> tuple[float | str, ...]:
        """Sort key of a running request, ascending; sorted anew in each step."""


@runtime_checkable
class GatesAdmission(Protocol):
    """Decides whether the head of the queue may enter the batch although it would fit."""

    def admit(self, request: Request, running: Sequence[Request], ctx: SchedulerContext) -> bool:
        """False: the request waits, and with it all behind it. `running` includes those admitted in this step.

        Asked while the request may still not fit, and of batches that are only considered. An engine in which nothing
        runs takes the request whatever the answer: nothing could change it.
        """


@runtime_checkable
class Preempts(Protocol):
    """Preempts by choice, before a step: victims lose their KV cache, go back to the queue and sit this step out."""

    def select_preemptions(
        self, waiting: Sequence[Request], running: Sequence[Request], ctx: SchedulerContext
    ) -> Sequence[Request]:
        """Victims, all from `running`; `waiting` is in queue order. Called only while something waits."""


@runtime_checkable
class HoldsBack(Protocol):
    """Leaves runners out of a step so that its tokens go to the head of the queue; they keep their place and KV."""

    def held_back(self, head: Request, running: Sequence[Request], ctx: SchedulerContext) -> Sequence[Request]:
        """Runners, all from `running`, that get nothing in this step. Called only while something waits."""


@runtime_checkable
class Follows(Protocol):
    """Hears what became of its requests."""

    def on_scheduled(self, request: Request, tokens: int, ctx: SchedulerContext) -> None:
        """The request got `tokens` tokens of this step: its first chunk after waiting, a further one, or a decode."""

    def on_preempted(self, request: Request, ctx: SchedulerContext) -> None:
        """The request lost its place and its KV cache, by choice or for lack of blocks."""

    def on_finished(self, request: Request) -> None:
        """The request ended, however it ended: forget it."""


@runtime_checkable
class BudgetsTokens(Protocol):
    """Bounds the tokens of a step below the engine's own budget."""

    def step_budget(self, ctx: SchedulerContext) -> int:
        """Tokens of this step, at least 1; more than the engine's budget means the engine's budget."""


@runtime_checkable
class PrefillsFirst(Protocol):
    """Runs whole prompts in steps of their own, and decodes only in steps without an admission."""

    def admits_now(self, head: Request, ctx: SchedulerContext) -> bool:
        """Whether this step is one of prompts; `head` is the first waiting request that could begin now."""
