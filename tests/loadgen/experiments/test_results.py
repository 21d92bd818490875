"""Cells in a file, means and ratios with intervals, what a claim is told."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from loadgen.experiments import estimate, page
from loadgen.experiments.experiment import Claim, Condition, Experiment, Figures, grid
from loadgen.experiments.results import Cell, Results, ResultsError


def cell(condition: Condition, seed: int, scale: float) -> Figures:
    """A made-up figure: `slow` waits twice as long as `fast`, more or less."""
    return {"wait": (2.0 if condition["policy"] == "slow" else 1.0) * (10 + seed)}


def experiment(**settings: object) -> Experiment:
    """Two policies on two workloads."""
    return Experiment(
        name="made-up",
        title="Made up",
        source="nothing",
        conditions=grid(workload=("a", "b"), policy=("slow", "fast")),
        cell=cell,
        figures={"wait": "wait, s"},
        settings=settings,
        claims=[
            Claim("fast", "wait", {"workload": "a", "policy": "fast"}, {"workload": "a", "policy": "slow"}, (2, 3))
        ],
    )


def filled(path: Path) -> Results:
    """All cells of three seeds."""
    results = Results(experiment(), path)
    for condition, seed in results.missing((0, 1, 2)):
        results.add(Cell(dict(condition), seed, 0.1, dict(cell(condition, seed, 1.0))))
    return results


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Cells are on disk as soon as they are added; what is missing afterwards is only what was missing before."""
    path = tmp_path / "made-up.json"
    first = Results(experiment(), path)
    condition, seed = first.missing((0, 1))[1]
    first.add(Cell(dict(condition), seed, 0.5, {"wait": 3.0}))
    again = Results.load(experiment(), path)
    assert again.cells == first.cells
    assert len(again.missing((0, 1))) == 7
    assert (condition, seed) not in again.missing((0, 1))
    assert Results.load(experiment(), path, fresh=True).cells == []


def test_other_settings_are_not_mixed(tmp_path: Path) -> None:
    """A file made under other settings or at another scale is refused, and the message says what to do."""
    filled(tmp_path / "made-up.json")
    for other, scale in ((experiment(requests=3), 1.0), (experiment(), 0.1)):
        with pytest.raises(ResultsError, match="--fresh"):
            Results.load(other, tmp_path / "made-up.json", scale)
    (tmp_path / "made-up.json").write_text("{}")
    with pytest.raises(ResultsError, match="delete it"):
        Results.load(experiment(), tmp_path / "made-up.json")


def test_cells_of_conditions_that_are_gone_are_left_out(tmp_path: Path) -> None:
    """A grid that has lost a condition shows nothing of it."""
    path = tmp_path / "made-up.json"
    filled(path)
    found = json.loads(path.read_text())
    found["cells"][0]["condition"]["policy"] = "forgotten"
    path.write_text(json.dumps(found))
    assert len(Results.load(experiment(), path).cells) == 11


def test_one_condition_is_picked(tmp_path: Path) -> None:
    """Figures are asked of exactly one condition: too few axes and unknown values are errors."""
    results = filled(tmp_path / "r.json")
    assert results.values("wait", {"workload": "a", "policy": "slow"}) == {0: 20.0, 1: 22.0, 2: 24.0}
    for where in ({"policy": "slow"}, {"workload": "a", "policy": "middle"}):
        with pytest.raises(ValueError, match="not one"):
            results.mean("wait", where)


def test_means_and_ratios_have_t_intervals() -> None:
    """The interval of 1..5 is that of the t table (2.776 at 4 degrees); equal ratios have no width."""
    found = estimate.mean([1, 2, 3, 4, 5])
    half = 2.776 * math.sqrt(2.5 / 5)
    assert found.mean == 3
    assert found.low == pytest.approx(3 - half, rel=1e-3)
    assert found.high == pytest.approx(3 + half, rel=1e-3)
    twice = estimate.ratio([2, 4, 8], [1, 2, 4])
    assert (twice.mean, twice.low, twice.high) == pytest.approx((2, 2, 2))
    assert estimate.ratio([1, 0, 4], [1, 2, 1]).count == 2
    assert estimate.ratio([1, 3, 200], [1, 1, 1]).median == pytest.approx(3)
    assert math.isnan(estimate.mean([7]).low)
    assert str(estimate.mean([])) == "-"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1234.6, "1235"), (12.34, "12.3"), (0.01234, "0.0123"), (2.0, "2"), (100.0, "100"), (math.nan, "-")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    """Figures are shown with three significant digits and no exponent."""
    assert estimate.number(value) == text


@pytest.mark.parametrize(
    ("low", "mean", "high", "said"),
    [
        (1.9, 2.0, 2.2, "reproduces"),
        (1.9, 2.3, 2.8, "undecided: the paper's is within the interval"),
        (2.4, 2.6, 2.9, "reproduces, and more"),
        (1.2, 1.3, 1.4, "same direction, less"),
        (0.9, 1.0, 1.2, "does not reproduce: no difference"),
        (0.2, 2.0, 9.0, "undecided: the interval has 1 in it"),
        (0.5, 0.6, 0.7, "does not reproduce: the other way round"),
        (math.nan, 2.0, math.nan, "undecided: one seed"),
        (math.nan, math.nan, math.nan, "not run yet"),
    ],
)
def test_what_is_said_of_a_gain(low: float, mean: float, high: float, said: str) -> None:
    """A gain is compared with the paper's range by its interval, and with no gain at all."""
    claim = Claim("", "", {}, {}, (1.8, 2.1))
    count = 0 if math.isnan(mean) else 1 if math.isnan(low) else 5
    assert page.verdict(claim, estimate.Estimate(mean, low, high, count)) == said


def test_no_gain_is_fine_where_the_paper_has_none() -> None:
    """Where the paper's range begins at 1, an interval around 1 is what it says."""
    claim = Claim("", "", {}, {}, (1.0, 1.5))
    assert page.verdict(claim, estimate.Estimate(1.05, 0.95, 1.15, 5)) == "reproduces"
    assert page.verdict(claim, estimate.Estimate(1.3, 0.1, 17.0, 5)).startswith(page.UNDECIDED)
    assert page.verdict(claim, estimate.Estimate(0.98, 0.9, 1.06, 5)).startswith(page.UNDECIDED)


def test_what_is_said_of_a_figure() -> None:
    """A figure itself is within the paper's bounds, above or below; without one of the paper nothing is said."""
    share = Claim("", "", {}, None, (1.0, 2.0))
    assert page.verdict(share, estimate.Estimate(1.5, 1.4, 1.6, 5)) == "reproduces"
    assert page.verdict(share, estimate.Estimate(3.0, 2.5, 3.5, 5)) == "does not reproduce: more"
    assert page.verdict(share, estimate.Estimate(0.5, 0.4, 0.6, 5)) == "does not reproduce: less"
    assert page.verdict(Claim("", "", {}), estimate.Estimate(1, 1, 1, 5)) == page.NOT_KNOWN


def test_page_has_ours_beside_theirs(tmp_path: Path) -> None:
    """The page shows the ratio with its interval, the paper's range, their quotient and the verdict."""
    text = page.render([filled(tmp_path / "r.json")])
    assert "| fast | 2 [2, 2] | 2 | 2-3 | 0.816 | reproduces |" in text
    assert "| b | slow | 22" in text
    assert "12 of 20 | 3 | 1 | 1 | 0 | 0 |" in text
    assert "Not run yet" in page.render([Results(experiment(), tmp_path / "none.json")])
