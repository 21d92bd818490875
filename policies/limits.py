"""Rate limits per minute: a token bucket that may go into debt.

Source: the token bucket of Turner, "New Directions in Communications" (1986), with one change. What a request costs is
known only when it has ended (its generated tokens), so costs are charged as they come and may overdraw the bucket; the
next request waits until the debt is paid off. Over any span the amount let through is then at most the refill of that
span plus one bucket plus what was running when the bucket ran dry. (The package `limits` has fixed and moving windows
whose counters cannot be overdrawn.)
"""

from __future__ import annotations

import math

MINUTE_S = 60.0


class Bucket:
    """Holds at most one minute's worth, at least one unit, and refills evenly; `level` below 0 is a debt.

    `per_minute` > 0 in units (requests or tokens); `now` is monotonic seconds everywhere.
    """

    __slots__ = ("_level", "_t", "capacity", "rate")

    def __init__(self, per_minute: float, now: float) -> None:
        self.rate = per_minute / MINUTE_S
        self.capacity = max(1.0, per_minute)
        self._level = self.capacity
        self._t = now

    def level(self, now: float) -> float:
        """Units that are there, negative in debt."""
        if now > self._t:  # a clock that stands still or goes back refills nothing
            self._level = min(self.capacity, self._level + (now - self._t) * self.rate)
            self._t = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Charge so many units, whether they are there or not."""
        self._level = self.level(now) - amount

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` units (at most the capacity) are there; 0 if they are."""
        missing = min(amount, self.capacity) - self.level(now)
        # a millionth of a unit is rounding, not a reason to wait
        return missing / self.rate if missing > 1e-6 else 0.0

    def remaining(self, now: float) -> int:
        """Whole units that are there, 0 in debt."""
        return max(0, math.floor(self.level(now) + 1e-6))

    def reset(self, now: float) -> float:
        """Seconds until the bucket is full again."""
        return (self.capacity - self.level(now)) / self.rate


def duration(seconds: float) -> str:
    """Seconds as OpenAI's `x-ratelimit-reset-*` headers write them, rounded up: `20ms`, `1s`, `6m0s`, `1h0m30s`."""
    if 0 < seconds <= 0.999:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
