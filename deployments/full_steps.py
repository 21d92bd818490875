"""How many prompt tokens per second an engine computes when it has more of them than a step can take."""

from __future__ import annotations

LEAST_S = 1.0  # of full steps, before they say anything
REMEMBERED_S = 60.0  # of full steps: beyond it, older ones count half


class FullSteps:
    """Measures the rate of prompt tokens in full steps: those that leave prompt tokens behind for the next one.

    Told of every step when it is scheduled. A step's time is that until the next one is scheduled, which for a full
    step follows at once. Of a row of full steps the first does not count: with asynchronous scheduling the second is
    scheduled while the first has yet to begin.
    """

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._at, self._taken = 0.0, 0  # of the step before
        self._full = self._counts = False

    @property
    def rate(self) -> float:
        """Prompt tokens/s, whatever the batch decoded meanwhile; 0 until there was a second of full steps."""
        return self._tokens / self._seconds if self._seconds >= LEAST_S else 0.0

    def step(self, now: float, tokens: int, full: bool) -> None:
        """A step with so many prompt tokens was scheduled at `now` (s)."""
        if self._counts and now > self._at:
            self._tokens += self._taken
            self._seconds += now - self._at
            if self._seconds > REMEMBERED_S:
                self._tokens /= 2
                self._seconds /= 2
        self._counts, self._full = full and self._full, full
        self._at, self._taken = now, tokens
