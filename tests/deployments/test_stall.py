"""StallWatch: an engine with work and no steps is noticed, an idle, slow or starting one is not."""

from __future__ import annotations

import pytest

from deployments.stall import StallWatch


def first_stall(watch: StallWatch, steps: int, busy: bool, *, looks: int, every_s: float = 0.05) -> float | None:
    """Looks at an engine that stands still; the time of the first stall, in seconds from the second look on."""
    for look in range(looks):
        if watch.stalled(steps, busy, look * every_s):
            return look * every_s
    return None


@pytest.mark.parametrize(("steps", "after_s"), [(100, 2.0), (3, 20.0), (1, 20.0)])
def test_work_without_steps_is_a_stall(steps: int, after_s: float) -> None:
    """After `stall_s` of looking, ten times as long for the first steps, which may compile."""
    watch = StallWatch(2.0)
    assert first_stall(watch, steps, True, looks=1000) == pytest.approx(after_s, abs=0.11)


def test_idle_engine_never_stalls() -> None:
    """Without requests no step is expected, and work that comes after a long idle time has its full patience."""
    watch = StallWatch(2.0)
    assert first_stall(watch, 50, False, looks=200) is None
    assert not watch.stalled(50, True, 11.0)
    assert not watch.stalled(50, True, 11.9)


def test_each_step_begins_anew() -> None:
    """Steps that are slow, but shorter than `stall_s`, are no stall, however many there are."""
    watch = StallWatch(2.0)
    looks = range(2000)
    assert not any(watch.stalled(10 + int(i * 0.05 / 1.9), True, i * 0.05) for i in looks)


def test_a_machine_that_stood_still_is_no_stall() -> None:
    """Time in which the watch was not looking either counts one second at most."""
    watch = StallWatch(2.0)
    assert not watch.stalled(50, True, 0.0)
    assert not watch.stalled(50, True, 500.0)
    assert watch.stalled(50, True, 501.0)


def test_none_is_never() -> None:
    """Without a bound an engine may take any time."""
    assert first_stall(StallWatch(None), 50, True, looks=10_000) is None
