"""Fits the ranker and says how well it ranks requests that it has not seen.

A ridge regression of log(output tokens) on the logarithms of both lengths (piecewise linear) and on hashed tokens: for
the order of requests the logarithm is as good as the length, and long answers do not drown short ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import sparse, stats
from sklearn.linear_model import Ridge
from sklearn.model_selection import GroupKFold, KFold

from loadgen.predictor.samples import BadInput, Samples
from policies.predictors import LearnedPredictor

Floats = npt.NDArray[np.float64]

FEWEST = 50  # requests; below, held-out correlations say nothing
KNOTS = 33
PENALTIES = (0.03, 0.1, 0.3, 1.0, 3.0)
FOLDS = 5
ENOUGH = 5000  # requests that suffice to choose the penalty with
RESAMPLES = 300


@dataclass(frozen=True, slots=True)
class Correlation:
    """Rank correlation with the true lengths, -1 .. 1: (value, low, high), a bootstrap interval of 95 %.

    NaN where the score is the same for every request: it ranks nothing.
    """

    kendall: tuple[float, float, float]
    spearman: tuple[float, float, float]


def train(samples: Samples, seed: int = 0, window: int = 1) -> LearnedPredictor:
    """The ranker of all samples; the penalty is the one that ranks best in cross-validation.

    `window`: what the samples' buckets were made with. BadInput if there are fewer than 50 requests.
    """
    _check(samples)
    return _fit(samples, _best_penalty(samples, seed), window)


def held_out(samples: Samples, seed: int, by_kind: bool) -> Floats:
    """Predicted tokens of each request by a ranker that was trained without it: without its fold, or its whole kind."""
    _check(samples)
    predicted = np.empty(len(samples))
    for known, unknown in _folds(samples, seed, by_kind):
        learnt = samples.take(known)
        predicted[unknown] = predict(_fit(learnt, _best_penalty(learnt, seed), 1), samples.take(unknown))
    return predicted


def predict(ranker: LearnedPredictor, samples: Samples) -> Floats:
    """LearnedPredictor.predict of each request, tokens."""
    prompts, limits = np.log(np.maximum(samples.prompt_tokens, 1)), np.log(samples.max_tokens)
    score = ranker.intercept + np.interp(prompts, ranker.prompt_knots, ranker.prompt_values)
    score += np.interp(limits, ranker.limit_knots, ranker.limit_values)
    if samples.buckets.nnz:
        score += samples.buckets @ ranker.weights
    tokens: Floats = np.exp(np.clip(score, 0.0, limits))
    return tokens


def correlation(truth: npt.NDArray[Any], score: npt.NDArray[Any], rng: np.random.Generator) -> Correlation:
    """How well `score` ranks requests of the lengths `truth`."""
    if np.ptp(score) == 0:
        nothing = (float("nan"),) * 3
        return Correlation(nothing, nothing)
    resampled = [rng.integers(len(truth), size=len(truth)) for _ in range(RESAMPLES)]
    return Correlation(
        *(_interval(measure, truth, score, resampled) for measure in (stats.kendalltau, stats.spearmanr))
    )


def _check(samples: Samples) -> None:
    if len(samples) < FEWEST:
        raise BadInput(f"{len(samples)} usable requests are too few to learn from: {FEWEST} are the least")


def _interval(
    measure: Any, truth: npt.NDArray[Any], score: npt.NDArray[Any], resampled: list[npt.NDArray[np.int64]]
) -> tuple[float, float, float]:
    values = [measure(truth[rows], score[rows]).statistic for rows in resampled]
    low, high = np.nanquantile(values, (0.025, 0.975))
    return float(measure(truth, score).statistic), float(low), float(high)


def _folds(
    samples: Samples, seed: int, by_kind: bool, count: int = FOLDS
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """(training, held-out) rows; each request is held out once."""
    split = GroupKFold if by_kind else KFold
    folds = split(count, shuffle=True, random_state=seed)
    yield from folds.split(samples.output_tokens, groups=samples.kinds if by_kind else None)


def _best_penalty(samples: Samples, seed: int) -> float:
    if samples.buckets.nnz == 0:
        return PENALTIES[0]  # two curves through lengths alone: nothing to hold back
    scores = np.zeros(len(PENALTIES))
    chosen = np.random.default_rng(seed).permutation(len(samples))[:ENOUGH]
    samples = samples.take(chosen)
    for known, unknown in _folds(samples, seed, by_kind=False):
        learnt, judged = samples.take(known), samples.take(unknown)
        for i, penalty in enumerate(PENALTIES):
            tau = stats.kendalltau(judged.output_tokens, predict(_fit(learnt, penalty, 1), judged)).statistic
            scores[i] += np.nan_to_num(tau)
    return PENALTIES[int(np.argmax(scores))]


def _fit(samples: Samples, penalty: float, window: int) -> LearnedPredictor:
    prompts, limits = np.log(np.maximum(samples.prompt_tokens, 1)), np.log(samples.max_tokens)
    prompt_knots, limit_knots = _knots(prompts), _knots(limits)
    features = sparse.hstack([_hats(prompts, prompt_knots), _hats(limits, limit_knots), samples.buckets], format="csr")
    target = np.log(samples.output_tokens)
    intercept = float(target.mean())  # the hats add up to 1: a further constant column would say nothing
    ridge = Ridge(penalty, fit_intercept=False, solver="lsqr", tol=1e-5).fit(features, target - intercept)
    prompt, limit, weights = np.split(ridge.coef_, np.cumsum((prompt_knots.size, limit_knots.size)))
    return LearnedPredictor(intercept, prompt_knots, prompt, limit_knots, limit, weights, window)


def _knots(x: Floats) -> Floats:
    """Ascending quantiles of x, each once."""
    knots: Floats = np.unique(np.quantile(x, np.linspace(0, 1, KNOTS), method="nearest"))
    return knots


def _hats(x: Floats, knots: Floats) -> Any:
    """One column per knot, so that columns @ values = interp(x, knots, values)."""
    return sparse.csr_array(np.stack([np.interp(x, knots, unit) for unit in np.eye(knots.size)], axis=1))
