"""Shares of the priority tiers in a workload, and seeded draws from them; tier 0 is the highest.

Source of the named mixes: the multi-tier paper, section 5.2, with K = 1-10 tiers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Shares = tuple[float, ...]


def uniform(count: int) -> Shares:
    """1/K each."""
    return (1.0 / count,) * count


def gaussian(count: int) -> Shares:
    """N((K-1)/2, K/4) over bins of one tier, renormalised: the middle tiers have most."""
    middle, sd = (count - 1) / 2, count / 4

    def below(x: float) -> float:
        return 0.5 * (1.0 + math.erf((x - middle) / (sd * math.sqrt(2.0))))

    return custom([below(p + 0.5) - below(p - 0.5) for p in range(count)])


def enterprise(count: int) -> Shares:
    """A tenth at the top, a fifth at the bottom, the rest spread over the middle; two tiers: a quarter at the top."""
    if count < 3:
        return ((1.0,), (0.25, 0.75))[count - 1]
    return (0.10, *((0.70 / (count - 2),) * (count - 2)), 0.20)


def custom(weights: Sequence[float]) -> Shares:
    """Shares in the ratio of `weights`; ValueError if one is negative or not finite, or none is above 0."""
    if not weights or any(w < 0 or not math.isfinite(w) for w in weights) or sum(weights) <= 0:
        raise ValueError(f"weights: {list(weights)} make no shares; give finite numbers >= 0, one of them > 0")
    total = sum(weights)
    return tuple(w / total for w in weights)


MIXES: dict[str, Callable[[int], Shares]] = {"uniform": uniform, "gaussian": gaussian, "enterprise": enterprise}


def mix(spec: str, count: int) -> Shares:
    """Shares of `count` tiers: a name of MIXES, or `count` comma-separated weights; ValueError says what is wrong."""
    if spec in MIXES:
        return MIXES[spec](count)
    try:
        weights = [float(weight) for weight in spec.split(",")]
    except ValueError:
        raise ValueError(f"mix: {spec!r} is none of {', '.join(MIXES)}, and not {count} weights like 1,2,3") from None
    if len(weights) != count:
        raise ValueError(f"mix: {spec!r} has {len(weights)} weights for {count} tiers")
    return custom(weights)


def draw(n: int, shares: Shares, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Tiers of n requests, independent of each other."""
    return rng.choice(len(shares), size=n, p=np.asarray(shares))
