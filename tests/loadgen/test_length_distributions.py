"""Length generators against published distributions: the traces' quantiles, the paper's table, lognormals (KS)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from loadgen import lengths
from loadgen.workloads.length_models import TIER_BINS, Agents, length_model

DRAWS = 100_000
KS_FAR = 0.012  # of 100,000 draws; the 1 % critical value is 0.005, and the tables themselves are interpolated

#: Every tenth percentile of the Azure traces of 2023, tokens, from the least to the greatest, and the 95th and 99th.
PUBLISHED = {
    ("chat", "prompts"): ((2, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2734, 14050), 4083, 4142),
    ("chat", "answers"): ((7, 54, 77, 90, 103, 129, 182, 387, 404, 424, 1000), 451, 601),
    ("code", "prompts"): ((3, 147, 386, 745, 1075, 1469, 1909, 2433, 3192, 5188, 7437), 7303, 7436),
    ("code", "answers"): ((6, 7, 8, 9, 11, 13, 16, 20, 29, 55, 1899), 90, 251),
}


def drawn(spec: str) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of a model that is not one of sessions."""
    model = length_model(spec)
    assert not isinstance(model, Agents)
    return model.draw(DRAWS, np.random.default_rng(11))


def ks(values: np.ndarray, cdf: Callable[[float], float]) -> float:
    """Largest distance between what was drawn and a distribution function, over whole numbers of tokens."""
    found = 0.0
    for x in np.unique(values):
        found = max(found, abs(float((values <= x).mean()) - cdf(float(x))))
    return found


@pytest.mark.parametrize(("name", "which"), sorted(PUBLISHED))
def test_quantiles_are_those_of_the_trace(name: str, which: str) -> None:
    """At each published quantile the drawn share is within 0.02 of the published one (KS, as far as the table goes)."""
    values = lengths.table(name).sample(DRAWS, np.random.default_rng(11))[which == "answers"]
    deciles, p95, p99 = PUBLISHED[name, which]
    table = [*((0.1 * i, q) for i, q in enumerate(deciles)), (0.95, p95), (0.99, p99)]
    for share, quantile in table:
        # Many requests have the very same length: the published share lies on the step there.
        below, up_to = float((values < quantile).mean()), float((values <= quantile).mean())
        assert below - 0.02 <= share <= up_to + 0.02, (share, quantile, below, up_to)
    assert values.min() >= deciles[0]
    assert values.max() <= deciles[-1]


def test_paper_table_is_uniform_within_its_bins() -> None:
    """Total lengths follow the multi-tier paper's table: its shares, spread evenly over each bin."""
    prompts, answers = drawn("tier-table")
    left = 1 - sum(
        share for _, _, share in TIER_BINS[:-1]
    )  # the paper's shares sum to .99 or 1: the last gets the rest
    shares = [*(share for _, _, share in TIER_BINS[:-1]), left]

    def cdf(x: float) -> float:
        spread = [(min(max(x + 1, low), high) - low) / (high - low) for low, high, _ in TIER_BINS]
        return sum(share * part for share, part in zip(shares, spread, strict=True))

    assert ks(prompts + answers, cdf) < KS_FAR


@pytest.mark.parametrize(("which", "mean", "cv"), [(0, 1268.0, 1.5), (1, 1527.0, 1.0)], ids=["prompts", "answers"])
def test_long_answers_are_lognormal(which: int, mean: float, cv: float) -> None:
    """Prompts and answers of `long-answers` are lognormal with the stated mean and coefficient of variation."""
    sigma = math.sqrt(math.log1p(cv * cv))
    middle = math.log(mean) - sigma * sigma / 2

    def cdf(x: float) -> float:
        return 0.5 * (1 + math.erf((math.log(x + 0.5) - middle) / (sigma * math.sqrt(2))))

    assert ks(drawn("long-answers")[which], cdf) < KS_FAR
