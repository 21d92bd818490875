"""Mixes of tiers: shares, draws, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import tiers


@given(name=st.sampled_from(sorted(tiers.MIXES)), count=st.integers(1, 16))
def test_shares_are_a_distribution_over_all_tiers(name: str, count: int) -> None:
    """Every named mix gives each of the K tiers a share above 0, and the shares sum to 1."""
    shares = tiers.mix(name, count)
    assert len(shares) == count
    assert min(shares) > 0
    assert math.isclose(sum(shares), 1.0)


def test_enterprise_is_that_of_the_paper() -> None:
    """Four tiers: a tenth at the top, a fifth at the bottom, the middle shares the rest; two: a quarter at the top."""
    assert tiers.mix("enterprise", 4) == pytest.approx((0.10, 0.35, 0.35, 0.20))
    assert tiers.mix("enterprise", 2) == (0.25, 0.75)


def test_gaussian_is_symmetric_about_its_middle() -> None:
    """The middle tier has most, and tiers at equal distance from it have equal shares."""
    shares = tiers.mix("gaussian", 5)
    assert shares == pytest.approx(shares[::-1])
    assert shares[0] < shares[1] < shares[2]


def test_draws_follow_the_shares_and_the_seed() -> None:
    """Drawn counts are within 5 standard deviations of the shares; one seed gives one sequence."""
    shares = tiers.mix("1,2,0,5", 4)
    drawn = tiers.draw(8000, shares, np.random.default_rng(0))
    counts = np.bincount(drawn, minlength=4)
    assert counts[2] == 0
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - 8000 * share) <= 5 * math.sqrt(8000 * share * (1 - share))
    assert np.array_equal(drawn, tiers.draw(8000, shares, np.random.default_rng(0)))


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [("pareto", "uniform, gaussian"), ("1,2", "2 weights for 4"), ("1,-1,1,1", "weights"), ("0,0,0,0", "weights")],
)
def test_impossible_mixes_are_refused(spec: str, complaint: str) -> None:
    """An unknown name, a wrong number of weights, negative and all-zero weights are named."""
    with pytest.raises(ValueError, match=complaint):
        tiers.mix(spec, 4)
