"""The smallest of many, ties at random: without it every router would pile onto the same first replica."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from policies.types import EmptyFleetError

Loads = NDArray[np.float64] | list[float]
FEW = 16  # up to here lists beat numpy, whose price is per call (measured: `python -m loadgen bench router`)


def argmin(loads: Loads, rng: np.random.Generator) -> int:
    """Index of the smallest load, each of several equal ones as likely; EmptyFleetError if there is none."""
    if len(loads) == 0:
        raise EmptyFleetError("no replica is eligible: wait until one joins or serves again")
    tied: Sequence[int] | NDArray[np.intp]
    if isinstance(loads, list):
        least = min(loads)
        if loads.count(least) == 1:
            return loads.index(least)
    else:
        first = int(loads.argmin())
        least = loads[first]
        later = loads[first + 1 :]  # argmin finds the first of equals: another can only come after it
        if len(later) == 0 or later[later.argmin()] > least:
            return first
    guess = int(rng.random() * len(loads))
    if loads[guess] == least:  # as likely for each of the equal ones, and a hit when most are: the idle fleet
        return guess
    if isinstance(loads, list):
        tied = [index for index, load in enumerate(loads) if load == least]
    else:
        (tied,) = (loads == least).nonzero()
    return int(tied[int(rng.random() * len(tied))])
