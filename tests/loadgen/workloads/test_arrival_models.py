"""Arrival processes by name: rate, burstiness against the published figures, names and errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.workloads.arrival_models import ARRIVALS, arrival_model
from loadgen.workloads.burstiness import measure

SPECS = {
    "poisson": "poisson:rate=20",
    "gamma": "gamma:rate=20,cv=2",
    "chat": "chat:rate=20",
    "code": "code:rate=20",
    "functions": "functions:rate=45",
    "step": "step:rate=5,to=20,at=10",
    "ramp": "ramp:rate=0,to=20,seconds=30",
    "square": "square:low=2,high=20,period=10",
}


def figures(spec: str, n: int, seeds: int = 5) -> dict[str, float]:
    """Medians over seeds of the measured burstiness."""
    found = [measure(arrival_model(spec).times(n, np.random.default_rng(seed))) for seed in range(seeds)]
    return {key: float(np.median([getattr(b, key) for b in found])) for key in found[0].__struct_fields__}


def test_every_process_is_tried() -> None:
    """The specs of these tests cover all names."""
    assert SPECS.keys() == ARRIVALS.keys()


@pytest.mark.parametrize("name", ["poisson", "gamma", "chat", "code", "functions"])
def test_mean_rate_is_the_asked_one(name: str) -> None:
    """Whatever the shape, 20,000 requests come at the asked mean rate, within 15 % at the median of five seeds."""
    asked = float(SPECS[name].partition("rate=")[2].partition(",")[0])
    assert figures(SPECS[name], 20_000)["rate"] == pytest.approx(asked, rel=0.15)


def test_chat_is_as_bursty_as_the_trace() -> None:
    """Gaps, 1 s and 10 s counts of `chat` at the trace's rate: CV 1.09, dispersion 1.39 and 3.9 (data sheet)."""
    found = figures("chat:rate=5.53", 19_366, seeds=9)
    assert found["gap_cv"] == pytest.approx(1.09, abs=0.06)
    assert found["iod_1s"] == pytest.approx(1.39, abs=0.2)
    assert found["iod_10s"] == pytest.approx(3.9, abs=1.2)


def test_code_is_as_bursty_as_the_trace() -> None:
    """Gaps and 1 s counts of `code` at the trace's rate: CV 13.2, dispersion 13.2, 72 in 10 s; within a factor 1.5."""
    found = figures("code:rate=2.57", 8_819, seeds=9)
    for key, published in (("gap_cv", 13.2), ("iod_1s", 13.2), ("iod_10s", 72.0)):
        assert published / 1.5 < found[key] < published * 1.5, (key, found[key])


def test_functions_wander_between_their_bounds() -> None:
    """At 45/s the 30 s means stay near 20-80 and differ by CV .38 (data sheet), gaps have the asked CV of about 2."""
    times = arrival_model("functions:rate=45").times(200_000, np.random.default_rng(0))
    counts = np.bincount((times / 30).astype(int))[:-1] / 30
    assert counts.std() / counts.mean() == pytest.approx(0.38, abs=0.06)
    assert 15 < counts.min() < 30
    assert 65 < counts.max() < 90
    assert measure(times).gap_cv == pytest.approx(2.2, abs=0.15)


def test_steps_and_waves_are_where_they_were_asked_for() -> None:
    """The counts of each stage are those of its rate within 5 standard deviations."""
    rng = np.random.default_rng(1)
    step = arrival_model("step:rate=5,to=50,at=100").times(5_000, rng)
    assert abs((step < 100).sum() - 500) < 5 * math.sqrt(500)
    square = arrival_model("square:low=1,high=50,period=20,duty=0.25").times(5_000, rng)
    phase = square[square < 300] % 20
    assert abs((phase < 5).sum() - 15 * 250) < 5 * math.sqrt(15 * 250)
    assert (phase >= 5).sum() < 15 * 15 + 5 * math.sqrt(15 * 15)
    ramp = arrival_model("ramp:rate=0,to=40,seconds=100").times(5_000, rng)
    assert abs((ramp < 50).sum() - 500) < 5 * math.sqrt(500)
    assert abs((ramp < 100).sum() - 2000) < 5 * math.sqrt(2000)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(SPECS)), n=st.integers(0, 300), seed=st.integers(0, 2**32))
def test_times_are_sorted_finite_and_the_same_for_one_seed(name: str, n: int, seed: int) -> None:
    """Every process gives n sorted finite times >= 0, again the same for the same seed."""
    model = arrival_model(SPECS[name])
    times = model.times(n, np.random.default_rng(seed))
    assert len(times) == n
    assert np.isfinite(times).all()
    assert (times >= 0).all()
    assert (np.diff(times) >= 0).all()
    assert (times == model.times(n, np.random.default_rng(seed))).all()


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("uniform", "choose one of poisson"),
        ("poisson", "needs rate; write poisson:rate=N"),
        ("poisson:rate", "no parameter 'rate'"),
        ("poisson:speed=1", "no parameter 'speed=1'"),
        ("poisson:rate=fast", "rate is 'fast'; give a number"),
        ("poisson:rate=0", "rate is 0; give a finite number > 0"),
        ("gamma:rate=1,cv=nan", "cv is nan"),
        ("square:low=1,high=2,duty=2", "duty is 2; give a finite number > 0 and <= 1"),
        ("step:rate=1,to=0,at=5", "to is 0"),
    ],
)
def test_wrong_specs_are_named(spec: str, complaint: str) -> None:
    """An unknown name or parameter, a missing or an impossible value is named, with how to write it."""
    with pytest.raises(ValueError, match="arrivals") as raised:
        arrival_model(spec)
    assert complaint in str(raised.value)


def test_burstiness_of_almost_nothing() -> None:
    """No, one and equal times give counts and nan, not an error."""
    assert measure(np.zeros(0)).requests == 0
    assert math.isnan(measure(np.array([3.0])).gap_cv)
    assert math.isnan(measure(np.zeros(5)).rate)


def test_burstiness_does_not_depend_on_order_or_start() -> None:
    """Times that begin later and are shuffled give the same figures: only what lies between them counts."""
    times = arrival_model("poisson:rate=10").times(500, np.random.default_rng(2))
    shuffled = np.random.default_rng(3).permutation(times)
    assert measure(shuffled) == measure(times)
    assert measure(times + 64.0).gap_cv == pytest.approx(measure(times).gap_cv)
