"""The number of replicas: bounds, no NaN, nothing swings, and a toy fleet that follows its load up and down."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.autoscaling.decision import Decision
from policies.autoscaling.demand import Fleet, Load
from policies.autoscaling.freeness import FreenessScaling
from policies.autoscaling.windows import Trough, Windows
from policies.registry import PolicyError

BLOCKS, BLOCK, SEQS = 728, 16, 32  # the default replica on CPU: 11,648 tokens
HELD = 320  # tokens of one request
SCALING = FreenessScaling()

figure = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True), st.floats(0, 2e4), st.integers(0, 2000).map(float), st.just(0.0)
)
any_load = st.builds(
    Load,
    age_s=figure,
    free_blocks=figure,
    total_blocks=figure,
    block_size=figure,
    running=figure,
    waiting=figure,
    queued_tokens=figure,
    head_blocks=figure,
    max_num_seqs=figure,
    wait_s=figure,
    first_tokens=figure,
    late=figure,
    prompt_rate=figure,
    due_tokens=figure,
    full_rate=figure,
    draining=st.booleans(),
)


def load(running: int = 0, waiting: int = 0, **told: Any) -> Load:
    """A replica with so many requests of HELD tokens each."""
    free = BLOCKS - running * HELD // BLOCK
    head = HELD // BLOCK if waiting else 0
    told = {"age_s": 0.5, "head_blocks": head, "queued_tokens": waiting * HELD, **told}
    return Load(
        free_blocks=free,
        total_blocks=BLOCKS,
        block_size=BLOCK,
        running=running,
        waiting=waiting,
        max_num_seqs=SEQS,
        **told,
    )


def prompts(rate: float, running: int = 8, **told: Any) -> Load:
    """A replica to which so many prompt tokens/s come, of 1000 that it computes."""
    return load(running, prompt_rate=float(rate), full_rate=1000.0, **told)


def fleet(*loads: Load, target: int | None = None, least: int = 1, most: int = 8, queued: float = 0.0) -> Fleet:
    """Replicas that run; the target is their number unless given."""
    return Fleet(loads, len(loads) if target is None else target, least, most, queued)


def decided(*loads: Load, **others: Any) -> tuple[int, str]:
    """Replicas and reason."""
    decision = SCALING.decide(fleet(*loads, **others))
    return decision.replicas, decision.reason


@given(st.lists(any_load, max_size=6), st.integers(0, 10), st.integers(0, 4), st.integers(1, 9), figure)
@settings(max_examples=100, deadline=None)
def test_whatever_replicas_say_the_answer_is_a_number_within_bounds(
    loads: list[Load], target: int, least: int, more: int, queued: float
) -> None:
    """NaN, infinite, negative and absurd figures, no replicas, no figures: a whole number between least and most."""
    decision = SCALING.decide(Fleet(loads, target, least, least + more, queued))
    assert isinstance(decision.replicas, int)
    assert least <= decision.replicas <= least + more
    assert not math.isnan(decision.freeness)


@given(
    st.lists(
        st.tuples(st.integers(0, SEQS), st.integers(0, 60), st.floats(0, 3000), st.floats(0, 3e4)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 12),
    st.sampled_from([0.0, 1000.0]),
)
@settings(max_examples=200, deadline=None)
def test_constant_demand_never_turns_it_round(
    per_replica: list[tuple[int, int, float, float]], target: int, full_rate: float
) -> None:
    """What a step up leads to calls for no step down, and the reverse, whatever the load was."""
    loads = [
        load(running, waiting, prompt_rate=rate, due_tokens=due, full_rate=full_rate)
        for running, waiting, rate, due in per_replica
    ]
    first = SCALING.decide(fleet(*loads, target=target, least=0, most=1000))
    then = SCALING.decide(fleet(*loads, target=first.replicas, least=0, most=1000))
    assert (then.replicas - first.replicas) * (first.replicas - target) >= 0


@pytest.mark.parametrize(
    ("loads", "others", "expected"),
    [
        ([load()], {}, (1, "idle")),
        ([load(), load(), load()], {}, (1, "idle")),
        ([load(), load()], {"least": 0}, (0, "idle")),
        ([load(8)], {}, (1, "steady")),
        ([load(29)], {}, (2, "busy")),
        ([load(29), load(29)], {}, (4, "busy")),
        ([load(32, 100)] * 4, {"most": 6}, (6, "busy")),
        ([load(29)], {"target": 3}, (3, "steady")),  # those that start are counted
        ([load(20, 3, wait_s=9.0)], {}, (2, "queue_wait")),
        ([load(20, 3, wait_s=9.0)], {"target": 2}, (2, "starting")),
        ([load(20, 0, wait_s=9.0)], {}, (1, "steady")),  # it is in prefill: nobody waits
        ([load(20, first_tokens=20, late=4)], {}, (2, "ttft")),
        ([load(20, first_tokens=20, late=1)], {}, (1, "steady")),
        ([load(20, first_tokens=3, late=3)], {}, (1, "steady")),  # too few to tell
        ([load(1, first_tokens=20, late=20)], {}, (1, "steady")),  # free: no other replica would be faster
        ([prompts(900)], {}, (2, "saturated")),  # 900 of 1000 tokens/s; two compute 1000 at a utilization of 0.5
        ([prompts(700)], {}, (1, "steady")),
        ([prompts(2000)], {"target": 3}, (3, "steady")),
        ([prompts(400, due_tokens=3e4)], {}, (3, "saturated")),  # and 1000 for the queue to be gone in 30 s
        ([prompts(400, due_tokens=3e4)], {"target": 2}, (2, "steady")),  # when help has come it will be
        ([prompts(1e6)], {"most": 100}, (5, "saturated")),  # four more at most, or twice as many
        ([prompts(9e4)] * 10, {"most": 100}, (20, "saturated")),
        ([prompts(900), load(8, prompt_rate=900.0)], {}, (4, "saturated")),  # one has yet to find out its rate
        ([load(8, prompt_rate=1e5, due_tokens=1e5)], {}, (1, "steady")),  # nobody knows
        ([prompts(600, running=1, first_tokens=20, late=20)], {}, (2, "ttft")),
        ([prompts(300, running=1, first_tokens=20, late=20)], {}, (1, "steady")),
        ([load(2), load(2), load(2)], {}, (2, "free")),
        ([prompts(330, running=2)] * 3, {}, (2, "free")),
        ([prompts(600, running=2)] * 3, {}, (3, "steady")),  # two would have a utilization of 0.9
        ([prompts(300, running=2, due_tokens=3000.0)] * 3, {}, (3, "steady")),  # a queue: two would be slow with it
        ([load(1)] * 8, {}, (4, "free")),  # a step at most halves it
        ([load(2, age_s=60.0), load(2), load(2)], {}, (3, "stale")),
        ([load(29, age_s=60.0)], {}, (1, "stale")),
        ([load(age_s=60.0), load()], {}, (2, "stale")),
        ([load(29, age_s=60.0), load(29), load(29)], {}, (6, "busy")),
        ([], {"target": 0, "least": 0}, (0, "idle")),
        ([], {"target": 0, "least": 0, "queued": 2.0}, (1, "cold_start")),
        ([], {"target": 2, "least": 0, "queued": 2.0}, (2, "cold_start")),
        ([], {"target": 2, "least": 0}, (2, "starting")),
        ([Load(age_s=1.0)], {"least": 0}, (1, "starting")),
        ([Load(age_s=60.0)], {"least": 0}, (1, "stale")),
        ([load(4, draining=True), load(4)], {}, (2, "steady")),
        ([load(20, draining=True), load(20)], {}, (4, "busy")),  # three that serve, and the one that drains
    ],
)
def test_each_reason(loads: Sequence[Load], others: dict[str, Any], expected: tuple[int, str]) -> None:
    """The table of the module: what is wanted when, and why."""
    assert decided(*loads, **others) == expected


def test_a_fleet_that_is_free_for_its_memory_keeps_slots() -> None:
    """On replicas with much memory the sequence slots decide how many can go."""
    large = replace(load(), total_blocks=1e5, free_blocks=9e4, running=float(SEQS))
    assert decided(large, large, large, target=3) == (3, "steady")
    assert decided(*[replace(large, running=4.0)] * 3) == (2, "free")


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"scale_up_steps": 0}, "scale_up_steps"),
        ({"scale_up_steps": 960}, "scale_down_steps"),
        ({"scale_down_steps": math.nan}, "scale_down_steps"),
        ({"queue_wait_s": -1}, "queue_wait_s"),
        ({"late_share": 2}, "late_share"),
        ({"target_utilization": 1.0}, "target_utilization"),
        ({"stale_s": 0}, "stale_s"),
    ],
)
def test_parameters_are_checked(parameters: dict[str, Any], field: str) -> None:
    """A parameter that cannot be used is refused by name."""
    with pytest.raises(PolicyError) as refused:
        FreenessScaling(**parameters)
    assert refused.value.field == field


class ToyFleet:
    """Replicas that share `requests(t)` evenly: what exceeds their slots or memory waits; a new one starts slowly."""

    def __init__(self, requests: Callable[[float], int], windows: Windows, replicas: int = 1, least: int = 1) -> None:
        self.requests, self.windows, self.least = requests, windows, least
        self.running, self.starting, self.trough = replicas, deque[float](), Trough()
        self.steps: list[tuple[float, int]] = []  # when, and by how many

    def run(self, until: float, tick_s: float = 0.5, start_s: float = 8.0) -> list[Decision]:
        """Decide every tick."""
        decisions, now = [], 0.0
        while now < until:
            while self.starting and self.starting[0] <= now:
                self.starting.popleft()
                self.running += 1
            target = self.running + len(self.starting)
            decision = self.trough.apply(SCALING.decide(self.fleet(self.requests(now), target)), target)
            decisions.append(decision)
            new = self.windows.apply(decision.replicas, target, self.running, now)
            if new != target:
                self.steps.append((now, new - target))
            self.starting.extend(now + start_s for _ in range(new - target))
            for _ in range(target - new):
                if self.starting:
                    self.starting.pop()
                else:
                    self.running -= 1
            now += tick_s
        return decisions

    def fleet(self, requests: int, target: int) -> Fleet:
        """What the replicas tell."""
        if not self.running:
            return Fleet((), target, self.least, 8, queued=requests)
        fit = min(SEQS, BLOCKS * BLOCK // HELD)
        loads = []
        for i in range(self.running):
            share = requests // self.running + (i < requests % self.running)
            running = min(share, fit)
            loads.append(load(running, share - running, wait_s=10.0 if share > running else 0.0))
        return Fleet(loads, target, self.least, 8)

    def reversals(self) -> list[tuple[float, int]]:
        """Time since the step before, and the way, of each step that goes back."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return [(t - before, step) for (before, last), (t, step) in pairs if last * step < 0]


@given(st.integers(0, 150), st.integers(0, 150), st.integers(1, 8), st.sampled_from([0.0, 5.0, 20.0]))
@settings(max_examples=15, deadline=None)
def test_a_step_of_load_reverses_nothing(before: int, after: int, replicas: int, up_s: float) -> None:
    """Load that changes once, upwards or downwards: after it the fleet goes one way only, and comes to rest."""
    toy = ToyFleet(lambda t: after if t >= 200 else before, Windows(up_s, 60.0), replicas)
    toy.run(700, tick_s=1.0)
    last = [step for t, step in toy.steps if t >= 200]
    assert all(step > 0 for step in last) or all(step < 0 for step in last)
    assert not [t for t, _ in toy.steps if t > 600]


@given(
    st.integers(0, 60),
    st.integers(0, 150),
    st.floats(10, 300),
    st.floats(10, 300),
    st.sampled_from([(0.0, 30.0), (5.0, 60.0), (20.0, 100.0)]),
)
@settings(max_examples=15, deadline=None)
def test_a_square_wave_reverses_at_most_once_per_window(
    low: int, more: int, low_s: float, high_s: float, windows: tuple[float, float]
) -> None:
    """A step down comes down_s or later after the last step up, a step up up_s or later after the last one down."""
    up_s, down_s = windows
    toy = ToyFleet(lambda t: low + (more if t % (low_s + high_s) < high_s else 0), Windows(up_s, down_s))
    toy.run(900, tick_s=1.0)
    assert all(gap >= (up_s if way > 0 else down_s) - 1e-6 for gap, way in toy.reversals())


def test_lulls_shorter_than_the_window_take_no_replica_away() -> None:
    """A square wave with a low half of 50 s and a window of 60 s: up once, never down."""
    toy = ToyFleet(lambda t: 100 if t % 100 < 50 else 4, Windows(5.0, 60.0))
    toy.run(1000, tick_s=1.0)
    assert toy.steps
    assert all(step > 0 for _, step in toy.steps)


@pytest.mark.parametrize("least", [0, 1, 2])
def test_after_the_load_the_fleet_goes_to_its_least(least: int) -> None:
    """Once nothing runs and nothing waits, the fleet is at min_replicas two windows later, and stays there."""
    toy = ToyFleet(lambda t: 90 if t < 300 else 0, Windows(5.0, 60.0), replicas=2, least=least)
    toy.run(300 + 2 * 60.0 + 10)
    assert toy.running == least
    toy.run(300)  # its clock starts anew, with load
    assert toy.running > 2


def test_a_step_down_leaves_what_the_whole_window_needed() -> None:
    """Four replicas, three are wanted for most of a window and one at its end: one goes, and more in the next one."""
    toy = ToyFleet(lambda t: 34 if t < 50 else 1, Windows(5.0, 60.0), replicas=4)
    toy.run(200)
    assert toy.steps == [(60.0, -1), (120.5, -1), (181.0, -1)]


def test_a_trough_begins_anew_with_each_target() -> None:
    """It lasts until as many as the target are wanted, or the target changes."""
    trough, wanted = Trough(), [(2, 5), (1, 5), (5, 5), (1, 5), (3, 5), (1, 5), (1, 3), (4, 3), (0, 3)]
    found = [trough.apply(Decision(replicas, "free"), target).replicas for replicas, target in wanted]
    assert found == [2, 2, 5, 1, 3, 3, 1, 4, 0]


def test_the_first_request_starts_a_replica_at_once() -> None:
    """From none the target rises without a window."""
    toy = ToyFleet(lambda t: 1 if t >= 100 else 0, Windows(30.0, 60.0), replicas=0, least=0)
    decisions = toy.run(130)
    assert toy.steps == [(100.0, 1)]
    assert decisions[200].reason == "cold_start"
    assert toy.running == 1


def test_the_same_load_gives_the_same_decisions() -> None:
    """Two runs are alike."""

    def run() -> list[Decision]:
        return ToyFleet(lambda t: int(40 + 40 * math.sin(t / 20)), Windows(5.0, 30.0)).run(300)

    assert run() == run()
