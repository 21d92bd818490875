"""The search for the least count that is enough: right, with few questions, and honest about contradictions."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.advisor.search import Found, least


def counted(enough: Callable[[int], bool]) -> tuple[Callable[[int], bool], set[int]]:
    """The question, and the counts that it was asked about."""
    asked: set[int] = set()

    def ask(count: int) -> bool:
        asked.add(count)
        return enough(count)

    return ask, asked


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 300))
def test_finds_the_least_count_from_anywhere(most: int, start: int, needed: int) -> None:
    """Where more is always better the least count is found, from any start, with about 2 log2 questions."""
    start = min(start, most)
    ask, asked = counted(lambda count: count >= needed)
    found = least(ask, most, start)
    assert found == Found(needed if needed <= most else None)
    assert asked <= set(range(1, most + 1))
    far = abs(min(needed, most) - start) + 1
    assert len(asked) <= 2 * math.log2(far) + 6


@given(st.sets(st.integers(1, 40)), st.integers(1, 40))
def test_what_it_finds_is_enough(good: set[int], start: int) -> None:
    """Whatever the answers are: the count found is enough, and neither of the two below it is known to be better."""
    found = least(good.__contains__, 40, start)
    if found.replicas is None:
        assert 40 not in good
        return
    assert found.replicas in good
    assert found.replicas - 1 not in good
    assert found.replicas <= 2 or found.replicas - 2 not in good
    assert found.shaky == (found.replicas < 40 and found.replicas + 1 not in good)


@given(st.integers(1, 40), st.integers(1, 40))
def test_without_neighbours_it_asks_less(start: int, needed: int) -> None:
    """Not to be sure costs fewer questions; from the right count these are two: it, and one below."""
    few, many = counted(lambda count: count >= needed), counted(lambda count: count >= needed)
    assert least(few[0], 40, start, sure=False) == least(many[0], 40, start)
    assert few[1] <= many[1]
    assert start != needed or few[1] == {needed, needed - 1} - {0}


def test_a_hole_is_seen_from_both_sides() -> None:
    """A count that is enough below one that is not is taken, and said to be shaky."""
    assert least({3, 5, 6, 7}.__contains__, 7, 5) == Found(3, shaky=True)


def test_a_start_outside_is_refused() -> None:
    """The start must be one of the counts."""
    with pytest.raises(ValueError, match="not between 1 and 4"):
        least(bool, 4, 5)
