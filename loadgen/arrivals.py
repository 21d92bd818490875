"""Arrival times: renewal gaps (Poisson or gamma) under any rate curve, by time change.

Gaps of unit mean are cumulated to counts of "expected requests so far" and mapped to seconds through the inverse of
the cumulated rate. One vectorised line serves every curve exactly: no thinning, and no renewal process restarted at
the edges of a window. A request is at `start` seconds or later; times come out sorted, float64 seconds.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]
EVEN = 1e-3  # below this the gamma's shape grows beyond what floats can draw, and no figure would show it


def unit_gaps(n: int, cv: float, rng: np.random.Generator) -> Times:
    """n gaps of mean 1 and coefficient of variation `cv` (1 is Poisson, 0 is a metronome), gamma distributed."""
    if cv < 0 or not math.isfinite(cv):
        raise ValueError(f"cv: {cv} is not a coefficient of variation; give a number >= 0 (1 is Poisson)")
    if cv < EVEN:
        return np.ones(n)
    shape = 1.0 / (cv * cv)
    return rng.gamma(shape, 1.0 / shape, n)


def gamma(n: int, rate: float, cv: float, rng: np.random.Generator) -> Times:
    """n arrivals at a constant `rate` (requests/s) whose gaps have coefficient of variation `cv`."""
    return under_rate(n, [(math.inf, rate)], rng, cv=cv)


def poisson(n: int, rate: float, rng: np.random.Generator) -> Times:
    """n arrivals of a Poisson process of `rate` requests/s."""
    return gamma(n, rate, 1.0, rng)


def burst(
    n: int, rate: float, peak: float, start: float, seconds: float, rng: np.random.Generator, cv: float = 1.0
) -> Times:
    """n arrivals at `rate`, but at `peak` (requests/s) from `start` on for `seconds`."""
    return under_rate(n, [(start, rate), (seconds, peak), (math.inf, rate)], rng, cv=cv)


def under_rate(n: int, curve: list[tuple[float, float]], rng: np.random.Generator, cv: float = 1.0) -> Times:
    """n arrivals under a piecewise constant rate: `curve` is [(duration s, rate requests/s), ...].

    The last piece must last for ever (duration `inf`) and have a rate above 0, so that every request arrives.
    ValueError names what is wrong with the curve.
    """
    if not curve or not math.isinf(curve[-1][0]) or curve[-1][1] <= 0:
        raise ValueError(f"curve: {curve!r} must end with a piece of infinite duration and a rate above 0")
    if any(duration < 0 or rate < 0 or not math.isfinite(rate) for duration, rate in curve):
        raise ValueError(f"curve: {curve!r} has a negative duration, or a rate below 0 or not finite")
    expected = np.cumsum(unit_gaps(n, cv, rng))
    if n == 0:
        return expected
    durations = np.array([duration for duration, _ in curve[:-1]])
    rates = np.array([rate for _, rate in curve])
    starts = np.concatenate([[0.0], np.cumsum(durations)])
    before = np.concatenate([[0.0], np.cumsum(durations * rates[:-1])])  # requests expected before each piece
    # The last piece that starts at or below the count: pieces of rate 0 expect nothing and are skipped.
    piece = np.searchsorted(before, expected, side="right") - 1
    times: Times = starts[piece] + (expected - before[piece]) / rates[piece]
    return times


def dispersion(times: Times, window: float) -> float:
    """Index of dispersion: variance over mean of the counts in windows of `window` seconds (1 for Poisson)."""
    edges = np.arange(0.0, float(times[-1]) + window, window)
    counts, _ = np.histogram(times, edges)
    return float(counts[:-1].var() / counts[:-1].mean())
