"""Tiers: their number, the headroom's decay and cap, and aging as a formula."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.registry import PolicyError
from policies.tiers import MAX_TIERS, SINGLE, Tiers, decaying_headroom

COUNTS = st.integers(1, MAX_TIERS)


@given(COUNTS, st.floats(0, 1), st.floats(0, 5), st.floats(0, 1))
def test_headroom_decays_and_keeps_the_cap(count: int, h_max: float, decay: float, cap: float) -> None:
    """Shares fall by exp(-lambda) from tier to tier, start at h_max unless capped, and together keep to the cap."""
    shares = decaying_headroom(count, h_max, decay, cap)
    assert len(shares) == count
    assert sum(shares) <= cap * (1 + 1e-9)
    assert 0 <= shares[0] <= h_max * (1 + 1e-9)
    for higher, lower in pairwise(shares):
        assert lower == pytest.approx(higher * math.exp(-decay), abs=1e-12)
    if h_max * sum(math.exp(-decay * p) for p in range(count)) <= cap:
        assert shares[0] == h_max


def test_automatic_decay_spreads_over_the_tiers() -> None:
    """`auto` is lambda = 2.5 / (K - 1), as in the multi-tier paper's code; one tier has nothing to decay."""
    assert decaying_headroom(6, 0.1, "auto", 1.0)[5] == pytest.approx(0.1 * math.exp(-2.5))
    assert decaying_headroom(1, 0.1, "auto") == (0.1,)


@pytest.mark.parametrize(
    ("arguments", "field"), [((3, 1.5), "h_max"), ((3, 0.2, -1), "lambda"), ((3, 0.2, 1, 2), "cap")]
)
def test_bad_headroom_is_refused(arguments: tuple[float, ...], field: str) -> None:
    """A share beyond the cache, a growing headroom or a cap above 1 name their parameter."""
    with pytest.raises(PolicyError) as refused:
        decaying_headroom(*arguments)  # type: ignore[arg-type]
    assert refused.value.field == field


@pytest.mark.parametrize(("headroom", "aging"), [(0, 0), (MAX_TIERS + 1, MAX_TIERS + 1), (2, 3)])
def test_the_number_of_tiers_is_checked(headroom: int, aging: int) -> None:
    """There is at least one tier, at most 16, and each has both figures."""
    with pytest.raises(PolicyError, match="1 to 16"):
        Tiers((0.0,) * headroom, (1.0,) * aging)


@given(COUNTS, st.integers(-100, 100))
def test_any_tier_can_be_clamped(count: int, tier: int) -> None:
    """What is beyond the ends means the end, the rest means itself."""
    tiers = Tiers((0.0,) * count, (math.inf,) * count)
    assert tiers.clamp(tier) == sorted((0, tier, count - 1))[1]
    assert len(tiers) == count


@given(st.integers(0, 15), st.floats(0.1, 1000), st.floats(0, 1e6))
def test_aging_lifts_by_one_for_each_aging_time(tier: int, aging_s: float, waited_s: float) -> None:
    """Tier p counts for max(0, p - n) once it has waited n * aging_s, so for the highest after p * aging_s."""
    tiers = Tiers((0.0,) * 16, (aging_s,) * 16)
    effective = tiers.effective(tier, waited_s)
    assert 0 <= effective <= tier
    if effective:
        assert (tier - effective) * aging_s <= waited_s * (1 + 1e-9)
        assert waited_s <= (tier - effective + 1) * aging_s * (1 + 1e-9)
    assert tiers.effective(tier, tier * aging_s * (1 + 1e-9)) == 0


@pytest.mark.parametrize("aging_s", [0.0, 1e-300, math.nan, -1.0])
def test_a_wait_shorter_than_a_step_lifts_nobody(aging_s: float) -> None:
    """An aging time that no clock of an engine can follow is refused, by its name."""
    with pytest.raises(PolicyError) as refused:
        Tiers((0.1, 0.1), (30.0, aging_s))
    assert refused.value.field == "aging_s"


def test_a_tier_that_does_not_age_stays() -> None:
    """With an infinite aging time no wait changes the tier."""
    assert SINGLE.effective(0, 1e12) == 0
    assert Tiers((0.0, 0.0), (math.inf, math.inf)).effective(1, 1e12) == 1
