"""The least number of replicas that is enough, found with few questions.

That more replicas do better is nearly always true and never certain: ties fall otherwise, a burst meets another queue.
So the search bisects, then, where it has to be sure, looks at the neighbours of what it found, and tells where they
contradict it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Enough = Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class Found:
    """`replicas`: the least number that is enough, None if there is none up to the limit.

    `shaky`: one more replica is not enough, so neither number can be relied on.
    """

    replicas: int | None
    shaky: bool = False


def least(enough: Enough, most: int, start: int = 1, *, sure: bool = True) -> Found:
    """The least count in 1..most that is enough, looked for from `start` outwards: steps of 1, 2, 4, ..., then halves.

    `enough` is asked more than once about the same count: let it remember. To be `sure`, it is also asked about two
    below the count found, which is taken if it is enough though the one between is not, and about one above.
    ValueError unless 1 <= start <= most.
    """
    if not 1 <= start <= most:
        raise ValueError(f"start: {start} is not between 1 and {most}")
    low, high = _bracket(enough, most, start)
    if high is None:
        return Found(None)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    if not sure:
        return Found(high)
    while high > 2 and enough(high - 2):
        high -= 2
        while high > 1 and enough(high - 1):
            high -= 1
    return Found(high, shaky=high < most and not enough(high + 1))


def _bracket(enough: Enough, most: int, start: int) -> tuple[int, int | None]:
    """A count that is not enough (0: none was asked) and a larger one that is, or None."""
    step = 1
    if enough(start):
        high = start
        while high - step > 0 and enough(high - step):
            high, step = high - step, step * 2
        return max(high - step, 0), high
    low = start
    while low < most:
        asked = min(low + step, most)
        if enough(asked):
            return low, asked
        low, step = asked, step * 2
    return low, None
