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
Curve = list[tuple[float, float]]  # [(duration s, rate requests/s), ...]
EVEN = 1e-3  # below this the gamma's shape grows beyond what floats can draw, and no figure would show it
MOST_PIECES = 1_000_000  # of a curve: some 100 MB and a second


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


def under_rate(n: int, curve: Curve, rng: np.random.Generator, cv: float = 1.0) -> Times:
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


def drifting(
    n: int,
    mean: float,
    spread: float,
    step: float,
    memory: float,
    low: float,
    high: float,
    rng: np.random.Generator,
    cv: float = 1.0,
) -> Curve:
    """A rate that wanders: the logarithm is an AR(1) process over pieces of `step` seconds.

    `spread` is the rate's coefficient of variation, `memory` (0 to below 1) its correlation from one piece to the next;
    the rate is cut to [low, high] and then scaled to `mean` over the pieces that n arrivals need. `cv` is that of the
    gaps which the curve is for: it must last until they have all come.
    """
    sigma = math.sqrt(math.log1p(spread * spread))
    # Cutting may lower the mean, by at most low/mean: enough pieces even then.
    pieces = _few(_enough(n, cv) / (step * min(mean, max(low, mean / 4)))) + 1
    noise = rng.normal(0.0, sigma, pieces)
    state = np.empty(pieces)
    state[0] = noise[0]
    for i in range(1, pieces):
        state[i] = memory * state[i - 1] + math.sqrt(1.0 - memory * memory) * noise[i]
    rates = np.clip(mean * np.exp(state - sigma * sigma / 2), low, high)
    used = int(np.searchsorted(np.cumsum(rates) * step, n)) + 1
    rates *= mean / rates[:used].mean()
    return [*((step, float(rate)) for rate in rates), (math.inf, mean)]


def on_off(
    n: int, peak: float, on: float, on_spread: float, off: float, off_spread: float, rng: np.random.Generator
) -> Curve:
    """Bursts at `peak` requests/s and silence between them, in turn.

    A burst lasts `on` seconds on average, lognormal, a silence `off`, gamma, each with the coefficient of variation
    given.
    """
    bursts = _few(2 * _enough(n, 1.0) / (peak * on)) + 10
    sigma = math.sqrt(math.log1p(on_spread * on_spread))
    lasting = rng.lognormal(math.log(on) - sigma * sigma / 2, sigma, bursts)
    silent = off * unit_gaps(bursts, off_spread, rng)
    pieces = [piece for o, s in zip(lasting, silent, strict=True) for piece in ((float(o), peak), (float(s), 0.0))]
    return [*pieces, (math.inf, peak)]


def ramp(first: float, last: float, seconds: float, step: float = 1.0) -> Curve:
    """From rate `first` to `last` in `seconds`, in steps, and then `last` for ever."""
    pieces = max(1, min(MOST_PIECES, round(seconds / step)))
    rates = first + (last - first) * (np.arange(pieces) + 0.5) / pieces
    return [*((seconds / pieces, float(rate)) for rate in rates), (math.inf, last)]


def square(n: int, low: float, high: float, period: float, duty: float, cv: float = 1.0) -> Curve:
    """A square wave: the share `duty` of each `period` (s) at rate `high`, the rest at `low`, high first."""
    periods = _few(_enough(n, cv) / (period * (duty * high + (1 - duty) * low))) + 1
    return [*([(period * duty, high), (period * (1 - duty), low)] * periods), (math.inf, high)]


def _few(pieces: float) -> int:
    if pieces > MOST_PIECES:
        raise ValueError(
            f"curve: the rate changes {pieces:.3g} times until all have come; at most {MOST_PIECES} is possible"
        )
    return math.ceil(pieces)


def _enough(n: int, cv: float) -> float:
    """More expected requests than the gaps of n arrivals add up to, almost surely."""
    return n + 6.0 * max(1.0, cv) * math.sqrt(n) + 10.0


def dispersion(times: Times, window: float) -> float:
    """Index of dispersion: variance over mean of the counts in windows of `window` seconds (1 for Poisson).

    Windows begin at 0 and the last, cut one is left out; nan if that leaves fewer than two.
    """
    counts, windows = counts_in(times, window)
    if windows < 2 or not len(counts):
        return math.nan
    mean = counts.sum() / windows
    return float((np.square(counts - mean).sum() + (windows - len(counts)) * mean * mean) / windows / mean)


def counts_in(times: Times, window: float) -> tuple[npt.NDArray[np.int64], float]:
    """Arrivals in each whole window of `window` seconds, beginning at 0, that has any; and how many windows there are.

    Empty windows are counted, not listed: one stamp years away from the others would make a list that fills memory.
    """
    if not len(times):
        return np.zeros(0, np.int64), 0.0
    places = np.floor(np.asarray(times, float) / window)
    last = float(places.max())
    return np.unique(places[places < last], return_counts=True)[1], last
