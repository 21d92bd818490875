"""Notices an engine that lives but does nothing: it has requests, and makes no step."""

from __future__ import annotations

LONGEST_LOOK_S = 1.0  # counted between two looks: for longer the watching process itself did not run (SIGSTOP, swap)
FIRST_STEPS = 3  # may compile
PATIENCE = 10  # times as long for those


class StallWatch:
    """Looks at the engine's step counter; `stall_s` seconds without a step, while there is work, are a stall.

    The first steps have ten times as long. None: never. Counted is the time in which the watch itself looked on, so
    that a machine that stood still as a whole is not taken for a stalled engine.
    """

    def __init__(self, stall_s: float | None) -> None:
        self._stall_s = stall_s
        self._steps = 0
        self._looked: float | None = None  # monotonic seconds
        self._still_s = 0.0

    def stalled(self, steps: int, busy: bool, now: float) -> bool:
        """Take a look at `now` (monotonic seconds): steps made so far, and whether the engine has requests."""
        if self._stall_s is None:
            return False
        if self._looked is not None:
            self._still_s += min(now - self._looked, LONGEST_LOOK_S)
        self._looked = now
        if steps != self._steps or not busy:
            self._steps, self._still_s = steps, 0.0
        return self._still_s >= self._stall_s * (PATIENCE if steps <= FIRST_STEPS else 1)
