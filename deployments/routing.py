"""Where a process finds its routers, and the line in which calls wait for a replica.

Serve ships a router class by value, module globals included, so state shared with the rest of the process lives here.
"""

from __future__ import annotations

import asyncio
import itertools
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deployments.wire import ReplicaReport

if TYPE_CHECKING:
    from deployments.router import FleetRouter

_routers: dict[str, FleetRouter] = {}


class NoReplicaError(RuntimeError):
    """No replica can take the request: none runs, all are draining or dead, or the wanted one is gone."""


def register_router(deployment: str, router: FleetRouter) -> None:
    """Make a router findable by the name of the deployment that it routes to."""
    _routers[deployment] = router


def find_router(deployment: str) -> FleetRouter | None:
    """This process's router to a deployment, once a handle has made one."""
    return _routers.get(deployment)


@dataclass(frozen=True, slots=True)
class Heard:
    """A replica's last report and when it came, in monotonic seconds."""

    report: ReplicaReport
    at: float


@dataclass(order=True, slots=True)
class _Waiter:
    tier: int
    arrival: int
    wake: asyncio.Future[None] | None = field(default=None, compare=False)


class WaitingLine:
    """Calls that wait until `is_open()`, released one after the other: the highest tier first, then by arrival."""

    def __init__(self, is_open: Callable[[], bool]) -> None:
        self._is_open = is_open
        self._line: list[_Waiter] = []
        self._arrivals = itertools.count()

    async def turn(self, tier: int, timeout_s: float) -> None:
        """Return when it is this call's turn, at once if nobody waits; TimeoutError after `timeout_s` seconds.

        What the caller does before it awaits again is done before the next call's turn.
        """
        if not self._line and self._is_open():
            return
        waiter = _Waiter(tier, next(self._arrivals))
        insort(self._line, waiter)
        try:
            async with asyncio.timeout(timeout_s):
                while self._line[0] is not waiter or not self._is_open():
                    waiter.wake = asyncio.get_running_loop().create_future()
                    await waiter.wake
        finally:
            self._line.remove(waiter)
            self.advance()

    def advance(self) -> None:
        """Wake the first of the line if it is open now."""
        if self._line and self._is_open():
            wake = self._line[0].wake
            if wake is not None and not wake.done():
                wake.set_result(None)
