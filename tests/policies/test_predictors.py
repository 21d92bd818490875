"""Predicted lengths: what each predictor believes, and the ranker's arithmetic, bounds and file format."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.predictors import (
    PREDICTORS,
    LearnedPredictor,
    Predicts,
    UsesPredictor,
    predicted_length,
    token_buckets,
)
from policies.registry import PolicyError
from policies.types import Hints
from tests.policies.scheduling_rig import Asked

WEIGHTS = 64
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=60)
SCORES = st.floats(-20, 20, allow_nan=False)


def ranker(**changes: Any) -> LearnedPredictor:
    """A ranker of round numbers: 1 per doubling of the prompt from 2 to 4 tokens, nothing for the limit."""
    arrays: dict[str, Any] = {
        "format": np.asarray(1),
        "intercept": np.asarray(2.0),
        "prompt_knots": np.log([2.0, 4.0]),
        "prompt_values": np.array([0.0, 1.0]),
        "limit_knots": np.log([16.0]),
        "limit_values": np.array([0.0]),
        "weights": np.zeros(WEIGHTS),
        "window": np.asarray(8),
    }
    return LearnedPredictor.from_arrays({**arrays, **changes})


@pytest.mark.parametrize(
    ("predictor", "hints", "expected"),
    [
        ("oracle", Hints(output_tokens=7, predicted_tokens=30.5), 7),
        ("oracle", Hints(predicted_tokens=30.5), 512),
        ("learned", Hints(output_tokens=7, predicted_tokens=30.5), 30.5),
        ("learned", Hints(output_tokens=7), 512),
        ("max_tokens", Hints(output_tokens=7, predicted_tokens=30.5), 512),
    ],
)
def test_what_each_predictor_believes(predictor: str, hints: Hints, expected: float) -> None:
    """Oracle and learned read their own hint, and both fall back to max_tokens where it is missing."""
    assert predicted_length(Asked("r", 0.0, 10, hints=hints), predictor) == expected
    assert predictor in PREDICTORS


@pytest.mark.parametrize(
    ("predictor", "path", "field"),
    [
        ("guess", None, "predictor"),
        (None, None, "predictor"),
        ("learned", None, "predictor_path"),
        ("learned", "", "predictor_path"),
        ("oracle", "ranker.npz", "predictor_path"),
    ],
)
def test_parameters_that_cannot_be_are_refused(predictor: Any, path: str | None, field: str) -> None:
    """A policy takes a known predictor, and a file exactly when it is the learned one."""
    with pytest.raises(PolicyError) as refused:
        Predicts(predictor, path)
    assert refused.value.field == field


def test_a_policy_takes_up_a_ranker() -> None:
    """What has Predicts is seen as a user of predictors, without a ranker until one is handed in."""
    policy = Predicts("learned", "ranker.npz")
    assert isinstance(policy, UsesPredictor)
    assert policy.predictor is None
    policy.use_predictor(ranker())
    assert policy.predictor is not None


def test_the_ranker_is_its_formula() -> None:
    """log(tokens) is the intercept, both curves and the mean weight times the square root of the number of buckets."""
    assert ranker().predict([1, 2], 1000) == pytest.approx(math.exp(2))
    assert ranker().predict([1, 2, 3, 4, 5], 1000) == pytest.approx(math.exp(3))
    assert ranker().predict([1, 2, 3], 1000) == pytest.approx(math.exp(2 + math.log(1.5) / math.log(2)))
    assert ranker(limit_values=np.array([0.5])).predict([1], 1000) == pytest.approx(math.exp(2.5))
    buckets = token_buckets([1, 2], 8, WEIGHTS)
    weighted = ranker(weights=np.full(WEIGHTS, 0.25)).predict([1, 2], 1000)
    assert weighted == pytest.approx(math.exp(2 + 0.25 * math.sqrt(buckets.size)))


@given(TOKENS, st.integers(1, 10_000), SCORES, SCORES)
def test_guesses_are_possible_lengths(tokens: list[int], limit: int, intercept: float, weight: float) -> None:
    """Whatever the weights and the prompt, an empty one included, 1 <= guess <= max_tokens."""
    odd = ranker(intercept=np.asarray(intercept), weights=np.full(WEIGHTS, weight))
    assert 1 <= odd.predict(tokens, limit) <= limit


@given(TOKENS, st.integers(1, 20), st.sampled_from([2, 64, 8192]))
def test_buckets_are_a_set_in_range(tokens: list[int], window: int, count: int) -> None:
    """Buckets are ascending, without repetition, below their number, and only depend on both ends of the prompt."""
    found = token_buckets(tokens, window, count).astype(int).tolist()
    assert found == sorted(set(found))
    assert all(0 <= bucket < count for bucket in found)
    if len(tokens) > 2 * window:
        middle_changed = tokens[:window] + [99] * 50 + tokens[-window:]
        assert token_buckets(middle_changed, window, count).astype(int).tolist() == found


def test_buckets_tell_order_and_tokens_apart() -> None:
    """Other tokens, or the same in another order, fall into other buckets, spread over all of them."""
    one, swapped, other = (set(token_buckets(ids, 8, 8192).tolist()) for ids in ([5, 9], [9, 5], [6, 9]))
    assert len(one | swapped) == 4  # two tokens, two pairs
    assert one != other
    spread = token_buckets(range(20_000), 20_000, 1024)
    assert spread.size == 1024


@given(TOKENS, st.integers(1, 500), st.lists(SCORES, min_size=WEIGHTS, max_size=WEIGHTS))
def test_arrays_carry_the_whole_ranker(tokens: list[int], limit: int, weights: list[float]) -> None:
    """A ranker made from another one's arrays predicts the same."""
    first = ranker(weights=np.array(weights))
    second = LearnedPredictor.from_arrays(first.to_arrays())
    assert second.predict(tokens, limit) == first.predict(tokens, limit)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"format": np.asarray(2)}, "format 2"),
        ({"weights": np.zeros(3)}, "power of two"),
        ({"weights": np.zeros(1)}, "power of two"),
        ({"weights": np.full(4, np.nan)}, "weights must hold finite"),
        ({"weights": np.array(["a", "b"])}, "weights must hold finite"),
        ({"weights": np.zeros((2, 2))}, "weights must hold finite numbers in 1"),
        ({"window": np.asarray(0)}, "window"),
        ({"window": np.asarray(1.5)}, "window"),
        ({"intercept": np.asarray(np.inf)}, "intercept"),
        ({"prompt_knots": np.array([1.0, 1.0])}, "prompt_knots must be ascending"),
        ({"limit_values": np.array([1.0, 2.0])}, "limit_knots must be ascending"),
    ],
)
def test_arrays_that_cannot_be_are_refused(changes: dict[str, Any], complaint: str) -> None:
    """The error names the array, what is wrong, and how to get a good one."""
    with pytest.raises(PolicyError, match=complaint) as refused:
        ranker(**changes)
    assert "train-predictor" in str(refused.value)


def test_missing_arrays_are_named() -> None:
    """A file of something else is refused by the names that it lacks."""
    with pytest.raises(PolicyError, match="no array format, intercept"):
        LearnedPredictor.from_arrays({"weights": np.zeros(2)})
