"""An asyncio loop whose clock jumps to the next timer when nothing is left to do: seconds of waiting cost nothing."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.SelectSelector):
    """Looks for events without waiting; the time that it was to wait passes on the loop's clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(0)
        if timeout is None and not events:
            raise RuntimeError("everything waits for something that will never come")
        if not events and timeout is not None and timeout > 0:
            self.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and passes only while everything waits."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._virtual.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a VirtualLoop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
