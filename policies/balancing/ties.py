"""The smallest of many, ties at random: without it every router would pile onto the same first replica."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies.types import EmptyFleetError

FEW = 16  # up to here lists beat numpy, whose price is per call (measured: `python -m loadgen bench router`)


def argmin(loads: NDArray[np.float64] | list[float], rng: np.random.Generator) -> int:
    """Index of the smallest load, each of several equal ones as likely; EmptyFleetError if there is none."""
    if len(loads) == 0:
        raise EmptyFleetError("no replica is eligible: wait until one joins or serves again")
    if isinstance(loads, list):
        least = min(loads)
        if loads.count(least) == 1:
            return loads.index(least)
        equal = [index for index, load in enumerate(loads) if load == least]
        return equal[int(rng.random() * len(equal))]
    first = int(loads.argmin())
    least = loads[first]
    later = loads[first + 1 :]  # argmin finds the first of equals: another can only come after it
    if len(later) == 0 or later[later.argmin()] > least:
        return first
    (tied,) = (loads == least).nonzero()
    return int(tied[int(rng.random() * len(tied))])
