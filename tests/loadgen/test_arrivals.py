"""Arrival processes: rates, burstiness, order."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import arrivals

N = 40_000


def test_poisson_has_its_rate_and_no_clumps() -> None:
    """Mean gap within 2 %, gap CV within 2 % of 1, index of dispersion of 1 s counts within 5 % of 1."""
    times = arrivals.poisson(N, 20.0, np.random.default_rng(0))
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.02)
    assert arrivals.dispersion(times, 1.0) == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("cv", [0.5, 2.0, 4.0])
def test_gamma_has_the_asked_burstiness(cv: float) -> None:
    """Gap CV within 5 % of the asked one, dispersion of long counts within 20 % of its square, rate within 6 %."""
    times = arrivals.gamma(N, 50.0, cv, np.random.default_rng(1))
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)
    assert arrivals.dispersion(times, 10.0 if cv > 1 else 1.0) == pytest.approx(cv * cv, rel=0.2)
    assert N / times[-1] == pytest.approx(50.0, rel=0.06)


def test_burst_is_where_it_was_asked_for() -> None:
    """Counts before, in and after the burst follow the two rates within 5 standard deviations."""
    times = arrivals.burst(10_000, 10.0, 100.0, start=20.0, seconds=30.0, rng=np.random.default_rng(2))
    before, inside = (times < 20).sum(), ((times >= 20) & (times < 50)).sum()
    after = ((times >= 50) & (times < 90)).sum()
    for count, expected in ((before, 200), (inside, 3000), (after, 400)):
        assert abs(count - expected) < 5 * math.sqrt(expected)


def test_nothing_arrives_while_the_rate_is_zero() -> None:
    """A silent piece of the curve stays silent, and the requests come after it."""
    times = arrivals.under_rate(500, [(10.0, 10.0), (30.0, 0.0), (math.inf, 10.0)], np.random.default_rng(3))
    assert not ((times > 10.0) & (times < 40.0)).any()
    assert len(times) == 500


def test_a_metronome_is_even() -> None:
    """A coefficient of variation of 0 gives equal gaps of 1/rate."""
    times = arrivals.gamma(100, 4.0, 0.0, np.random.default_rng(4))
    assert np.diff(times) == pytest.approx(np.full(99, 0.25))


@given(
    n=st.integers(0, 200),
    cv=st.floats(0, 4),
    seed=st.integers(0, 2**32),
    pieces=st.lists(st.tuples(st.floats(0, 50), st.floats(0, 100)), max_size=5),
    last=st.floats(0.01, 100),
)
def test_times_are_sorted_finite_and_as_many_as_asked(
    n: int, cv: float, seed: int, pieces: list[tuple[float, float]], last: float
) -> None:
    """Whatever the curve, n sorted finite times >= 0 come out."""
    times = arrivals.under_rate(n, [*pieces, (math.inf, last)], np.random.default_rng(seed), cv=cv)
    assert len(times) == n
    assert np.isfinite(times).all()
    assert (np.diff(times) >= 0).all()
    assert (times >= 0).all()


@pytest.mark.parametrize(
    "curve", [[], [(10.0, 5.0)], [(math.inf, 0.0)], [(-1.0, 5.0), (math.inf, 1.0)], [(1.0, -5.0), (math.inf, 1.0)]]
)
def test_impossible_curves_are_refused(curve: list[tuple[float, float]]) -> None:
    """A curve under which not all requests would arrive, or with negative parts, is refused by name."""
    with pytest.raises(ValueError, match="curve"):
        arrivals.under_rate(5, curve, np.random.default_rng(0))


def test_negative_burstiness_is_refused() -> None:
    """A negative coefficient of variation is refused by name."""
    with pytest.raises(ValueError, match="cv"):
        arrivals.gamma(5, 1.0, -1.0, np.random.default_rng(0))


@given(st.lists(st.floats(0, 50), min_size=1, max_size=60), st.sampled_from([0.5, 1.0, 10.0]))
def test_dispersion_is_that_of_the_listed_counts(stamps: list[float], window: float) -> None:
    """Leaving empty windows out of the list changes no figure."""
    times = np.sort(np.asarray(stamps))
    listed = np.bincount((times / window).astype(int))[:-1]
    counts, windows = arrivals.counts_in(times, window)
    assert sorted(counts) == sorted(listed[listed > 0])
    assert windows == len(listed)
    if len(listed) > 1 and listed.any():
        assert arrivals.dispersion(times, window) == pytest.approx(listed.var() / listed.mean())
    else:
        assert math.isnan(arrivals.dispersion(times, window))
