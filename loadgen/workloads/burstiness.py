"""How bursty arrivals are, measured on the times themselves: recorded beside every result."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from loadgen.arrivals import Times, counts_in, dispersion


class Burstiness(msgspec.Struct, frozen=True):
    """Figures of one sequence of arrivals; nan where there are too few.

    `gap_cv`: coefficient of variation of the gaps (1 for Poisson). `iod_1s`, `iod_10s`: index of dispersion, variance
    over mean of the counts in windows of 1 s and 10 s (1 for Poisson). `peak_1s`, `peak_10s`: most arrivals in such a
    window over the mean.
    """

    requests: int
    seconds: float
    rate: float
    gap_cv: float
    iod_1s: float
    iod_10s: float
    peak_1s: float
    peak_10s: float


def measure(times: Times) -> Burstiness:
    """Measure arrival times (s, in any order); the last, cut window is left out."""
    times = np.sort(np.asarray(times, float))
    times = times - times[0] if len(times) else times
    gaps = np.diff(times)
    seconds = float(times[-1]) if len(times) else 0.0
    return Burstiness(
        requests=len(times),
        seconds=seconds,
        rate=len(gaps) / seconds if seconds else math.nan,
        gap_cv=float(gaps.std() / gaps.mean()) if len(gaps) > 1 and seconds else math.nan,
        iod_1s=dispersion(times, 1.0),
        iod_10s=dispersion(times, 10.0),
        peak_1s=_peak(times, 1.0),
        peak_10s=_peak(times, 10.0),
    )


def _peak(times: Times, window: float) -> float:
    counts, windows = counts_in(times, window)
    return float(counts.max() / counts.sum() * windows) if windows > 1 and len(counts) else math.nan
