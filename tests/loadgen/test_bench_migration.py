"""`bench migration` without a fleet: gaps around a move, the others' pace, and what the checks find."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from loadgen.bench import migration, move_figures
from loadgen.cli import parser


def ticking(until: float, step: float = 0.1, silent: tuple[float, float] = (0.0, 0.0)) -> list[float]:
    """Times of tokens, one each `step` seconds, none in the open interval `silent`."""
    times = [round(i * step, 6) for i in range(round(until / step) + 1)]
    return [t for t in times if not silent[0] < t < silent[1]]


def move(how: str, length: int, pause: float, itl: float = 0.02, outcome: str = "done") -> dict[str, Any]:
    """One move's entry."""
    return {"how": how, "length": length, "outcome": outcome, "itl": itl, "pause": pause, "steps": pause / itl,
            "ordinary": itl, "seconds": 0.1}  # fmt: skip


def copy(ratio: float) -> dict[str, Any]:
    """One move beside others, both sides slowed alike."""
    side = {"during": 0.05 * ratio, "before": 0.05, "earlier": 0.05}
    return {"outcome": "done", "seconds": 0.4, "others": {"source": side, "destination": side}}


def run(
    live: tuple[float, float] = (0.03, 0.03), recompute: float = 5.0, slowed: float = 1.01, late: float = 0.001,
    outcome: str = "done",
) -> list[bool]:  # fmt: skip
    """Which checks are met by such a run of two lengths."""
    moves = [move("live", n, pause, outcome=outcome) for n, pause in zip((128, 4096), live, strict=True)] * 3
    moves += [move("recompute", n, recompute, outcome="recompute") for n in (128, 4096)] * 3
    return [c["met"] for c in move_figures.figures(moves, [copy(slowed)] * 6, [late] * 10)["checks"]]


def test_pause_is_the_longest_gap_that_overlaps_the_move() -> None:
    """The gap counts wherever the command fell in it, and also if it goes on after the answer; others do not."""
    times = ticking(4.0, silent=(2.0, 2.5))
    for began, answered in ((2.1, 2.2), (1.95, 2.05), (1.9, 2.0), (1.0, 3.0)):
        found = move_figures.pause(times, began, answered)
        assert found["pause"] == pytest.approx(0.5)
        assert found["steps"] == pytest.approx(5.0)
    assert move_figures.pause(times, 3.01, 3.3)["pause"] == pytest.approx(0.1)


def test_undisturbed_gaps_are_measured_on_the_same_stream() -> None:
    """`ordinary` is the longest of as many gaps right before the move."""
    times = ticking(4.0, silent=(1.7, 2.0))
    assert move_figures.pause(times, 2.55, 2.85)["ordinary"] == pytest.approx(0.1)
    assert move_figures.pause(times, 2.55, 3.35)["ordinary"] == pytest.approx(0.3)


def test_a_move_outside_the_stream_is_refused() -> None:
    """Without tokens on both sides of the command there is no pause to speak of."""
    for began in (-1.0, 9.0):
        with pytest.raises(ValueError, match="two tokens"):
            move_figures.pause(ticking(4.0), began, began + 0.5)


def test_others_are_compared_with_the_time_just_before() -> None:
    """Streams that slow down during the move show it; the two times before are alike."""
    slow = [*ticking(2.0), *(2.0 + 0.125 * i for i in range(1, 9))]
    found = move_figures.slowdown([slow, slow], 2.0, 3.0)
    assert found["during"] / found["before"] == pytest.approx(1.25)
    assert found["before"] == pytest.approx(found["earlier"])


def test_no_token_is_no_figure() -> None:
    """A window in which nobody got a token has no mean, and such pairs are left out of the ratio."""
    assert math.isnan(move_figures.mean_gap([[1.0, 2.0]], 5.0, 6.0))
    empty = {"during": math.nan, "before": 0.1, "earlier": 0.1}
    assert move_figures._slowdown([empty])["during"]["pairs"] == 0


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        pytest.param({}, set(), id="all"),
        pytest.param({"live": (0.03, 0.045)}, {1, 2, 3}, id="steps and rise"),
        pytest.param({"live": (0.02, 0.035)}, {3}, id="not flat"),
        pytest.param({"recompute": 2.9}, {4}, id="gain"),
        pytest.param({"slowed": 1.03}, {5, 6}, id="slowdown"),
        pytest.param({"late": 0.006}, {7}, id="late client"),
        pytest.param({"outcome": "aborted"}, {0, 1, 2, 3, 4}, id="not moved"),
    ],
)
def test_checks_find_what_is_missed(changed: dict[str, Any], missed: set[int]) -> None:
    """Every promise is checked by itself, and figures that are missing meet none."""
    assert {i for i, met in enumerate(run(**changed)) if not met} == missed


def test_kinds_take_turns() -> None:
    """Over as many rounds as there are kinds, each kind has each place once."""
    rounds = [migration.order(i) for i in range(len(migration.HOWS))]
    assert all(set(column) == set(migration.HOWS) for column in zip(*rounds, strict=True))


def test_lengths_fit_the_window() -> None:
    """Prompts have exactly their length and fit the engine with their answer."""
    args = parser().parse_args(["bench", "migration"])
    assert args.lengths == [128, 512, 1024, 2048, 4096]
    prompt = migration.random_prompt(4096, migration.ANSWER, np.random.default_rng(0), {})
    assert len(prompt.ids) == 4096
    assert max(args.lengths) + migration.ANSWER <= migration.ENGINE["max_model_len"]
    assert migration.BESIDE_TOKENS + migration.BESIDE_ANSWER <= migration.ENGINE["max_model_len"]
