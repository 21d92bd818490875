"""The rate of prompt tokens that an engine reaches when it has more than it can take."""

from __future__ import annotations

import pytest

from deployments.full_steps import LEAST_S, REMEMBERED_S, FullSteps


def steps(count: int, seconds: float, tokens: int, full: bool = True, to: FullSteps | None = None) -> FullSteps:
    """So many steps of one kind, one after the other."""
    measured = to or FullSteps()
    begin = measured._at
    for i in range(1, count + 1):
        measured.step(begin + i * seconds, tokens, full)
    return measured


def test_the_rate_is_that_of_full_steps() -> None:
    """Tokens of a step over the time until the next is scheduled; nothing is known before a second of them."""
    assert steps(8, 0.2, 2000).rate == pytest.approx(10_000)
    assert steps(5, 0.2, 2000).rate == 0.0
    assert 6 * 0.2 > LEAST_S > 4 * 0.2


def test_other_steps_do_not_count() -> None:
    """Steps that leave nothing behind, and idle time after them, say nothing of what the engine could do."""
    measured = steps(8, 0.2, 2000)
    measured.step(measured._at + 0.2, 10, False)
    steps(50, 0.5, 10, full=False, to=measured)
    assert measured.rate == pytest.approx(10_000)
    assert steps(50, 0.5, 10, full=False).rate == 0.0


def test_a_pipeline_of_two_steps_makes_it_no_faster() -> None:
    """With asynchronous scheduling the second full step is scheduled at once: it is the third that tells the time."""
    measured = FullSteps()
    for row in range(20):
        begin = 10.0 * row
        measured.step(begin, 2000, True)
        for i in range(3):
            measured.step(begin + 0.2 * i, 2000, i < 2)
        measured.step(begin + 5.0, 10, False)
    assert measured.rate == pytest.approx(10_000)


def test_old_steps_are_forgotten() -> None:
    """The rate follows the load: an engine with more to decode computes fewer prompt tokens."""
    measured = steps(round(REMEMBERED_S / 0.2), 0.2, 2000)
    steps(round(3 * REMEMBERED_S / 0.2), 0.2, 1000, to=measured)
    assert 5_000 < measured.rate < 6_500
