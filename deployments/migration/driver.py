"""Runs one machine of the hand-shake in real time: events in, deadlines kept, actions carried out in order."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from policies.migration.events import Timeout

logger = logging.getLogger(f"ray.serve.{__name__}")

Step = Coroutine[Any, Any, None]


class Machine(Protocol):
    """Either side of the hand-shake (policies/migration/)."""

    def handle(self, event: Any, now: float) -> tuple[Any, ...]: ...
    def deadline(self) -> float: ...


class Driver:
    """Feeds `machine` and carries out its actions by `perform`, which returns a coroutine for those that take time.

    An action waits for those before it, events wait for none. `failed` is told of an action that raised; the ones
    after it are carried out all the same. Make it in the running loop, whose time is the machine's.
    """

    def __init__(
        self, machine: Machine, perform: Callable[[Any], Step | None], failed: Callable[[Exception], None]
    ) -> None:
        self._machine = machine
        self._perform = perform
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._actions: deque[Any] = deque()
        self._performing = False
        self._step: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def now(self) -> float:
        """Seconds of the machine's clock."""
        return self._loop.time()

    def feed(self, event: Any) -> None:
        """An event for the machine."""
        if not self._closed:
            self.carry_out(self._machine.handle(event, self.now))

    def carry_out(self, actions: tuple[Any, ...]) -> None:
        """Actions of the machine, to be done after those under way."""
        self._actions += actions
        self._arm()
        self._advance()

    def close(self) -> None:
        """Stop: no more events, actions or deadlines."""
        self._closed = True
        self._actions.clear()
        for ending in (self._timer, self._step):
            if ending is not None:
                ending.cancel()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self._machine.deadline()
        if not self._closed and deadline < math.inf:
            self._timer = self._loop.call_at(deadline, self.feed, Timeout())

    def _advance(self) -> None:
        if self._performing:
            return
        self._performing = True
        while self._actions:
            try:
                step = self._perform(self._actions.popleft())
            except Exception as error:
                self._note(error)
                continue
            if step is not None:
                self._step = self._loop.create_task(self._finish(step))
                self._step.add_done_callback(partial(_close, step))  # it may have been cancelled before it began
                return
        self._performing = False

    async def _finish(self, step: Step) -> None:
        try:
            await step
        except Exception as error:
            self._note(error)
        self._step = None
        self._performing = False
        self._advance()

    def _note(self, error: Exception) -> None:
        if not self._closed:
            self._failed(error)


def _close(step: Step, _: asyncio.Task[None]) -> None:
    step.close()
