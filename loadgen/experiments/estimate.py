"""Means and ratios of a few seeds, with 95 % intervals by Student's t."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
METHOD = "95 % Student's t over the seeds; of ratios: over their logarithms, paired by seed"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its interval (nan: too few values for one), count and median of the values."""

    mean: float
    low: float
    high: float
    count: int
    median: float = math.nan

    def __str__(self) -> str:
        interval = "" if math.isnan(self.low) else f" [{number(self.low)}, {number(self.high)}]"
        return number(self.mean) + interval


def mean(values: Sequence[float]) -> Estimate:
    """Mean of independent values; values that are nan are left out."""
    known = np.asarray([v for v in values if not math.isnan(v)], float)
    if not len(known):
        return Estimate(math.nan, math.nan, math.nan, 0)
    middle = float(known.mean())
    if len(known) < 2:
        return Estimate(middle, math.nan, math.nan, len(known), middle)
    from scipy import stats  # half a second, which `--help` need not wait for

    half = float(stats.t.ppf((1 + LEVEL) / 2, len(known) - 1)) * float(known.std(ddof=1)) / math.sqrt(len(known))
    return Estimate(middle, middle - half, middle + half, len(known), float(np.median(known)))


def ratio(over: Sequence[float], of: Sequence[float]) -> Estimate:
    """How many times `over` is larger than `of`, paired: geometric mean. Pairs with a value <= 0 have no ratio."""
    logs = [math.log(a / b) for a, b in zip(over, of, strict=True) if a > 0 and b > 0]
    found = mean(logs)
    low, high, median = (math.exp(value) for value in (found.low, found.high, found.median))
    return Estimate(math.exp(found.mean), low, high, found.count, median)


def number(value: float) -> str:
    """Three significant digits, without an exponent; a dash for nan."""
    if math.isnan(value):
        return "-"
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
