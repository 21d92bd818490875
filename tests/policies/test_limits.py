"""Token buckets with debt: what they let through, and how they tell it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.limits import Bucket, duration

RATES = st.floats(0.1, 10_000)
GAPS = st.lists(st.tuples(st.floats(0, 90), st.floats(0, 500)), max_size=40)


@given(RATES, GAPS)
def test_long_run_rate_holds(per_minute: float, steps: list[tuple[float, float]]) -> None:
    """Who takes only when not in debt gets at most a bucket, the refill of the time, and the last overdraft."""
    bucket, now, taken, last = Bucket(per_minute, 0.0), 0.0, 0.0, 0.0
    for gap, amount in steps:
        now += gap
        if bucket.wait(0, now) == 0:
            bucket.take(amount, now)
            taken, last = taken + amount, max(last, amount)
    assert taken <= bucket.capacity + now * per_minute / 60 + last + 1e-3


@given(RATES, GAPS)
def test_level_is_bounded_and_wait_is_exact(per_minute: float, steps: list[tuple[float, float]]) -> None:
    """The level never exceeds the capacity; after the wait that was told the amount is there, just before it is not."""
    bucket, now = Bucket(per_minute, 5.0), 5.0
    for gap, amount in steps:
        now += gap
        bucket.take(amount, now)
        assert bucket.level(now) <= bucket.capacity
        wait = bucket.wait(1.0, now)
        if wait > 0.01:
            early = Bucket(per_minute, now)
            early.take(early.capacity - bucket.level(now), now)
            assert early.wait(1.0, now + wait * 0.99) > 0
            assert early.wait(1.0, now + wait + 1e-3) == 0
        assert bucket.reset(now) >= 0


def test_debt_makes_the_next_one_wait() -> None:
    """A cost that is known only afterwards may overdraw; the wait then is the debt over the rate."""
    bucket = Bucket(60, 0.0)
    bucket.take(90, 0.0)
    assert bucket.remaining(0.0) == 0
    assert bucket.wait(0, 0.0) == pytest.approx(30.0)
    assert bucket.wait(0, 30.0) == 0
    assert bucket.reset(30.0) == pytest.approx(60.0)


def test_less_than_one_a_minute_still_lets_one_through() -> None:
    """A share below one unit holds a whole unit, refilled as slowly as the share says."""
    bucket = Bucket(0.25, 0.0)
    assert bucket.wait(1, 0.0) == 0
    bucket.take(1, 0.0)
    assert bucket.wait(1, 0.0) == pytest.approx(240.0)


def test_clock_that_goes_back_refills_nothing() -> None:
    """An older `now` neither refills nor moves the bucket's time back."""
    bucket = Bucket(60, 100.0)
    bucket.take(60, 100.0)
    assert bucket.level(50.0) == 0
    assert bucket.level(101.0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0201, "21ms"),
        (0.9995, "1s"),
        (1, "1s"),
        (1.2, "2s"),
        (59.5, "1m0s"),
        (360, "6m0s"),
        (3630, "1h0m30s"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    """Resets are written as OpenAI writes them, rounded up."""
    assert duration(seconds) == text


@given(st.floats(0, 1e6))
def test_duration_is_never_too_short(seconds: float) -> None:
    """Whoever waits the time that is written has waited long enough."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
    told = sum(float(number) * units[unit] for number, unit in re.findall(r"(\d+)(ms|h|m|s)", duration(seconds)))
    assert seconds <= told + 1e-9
    assert told < seconds + 1
