"""The admission queue: its bounds, who is shed for whom, and the wait that it tells."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.admission import AdmissionQueue

TIERS = 3
#: tier, sequences, what happens first: 0 nothing, 1 a waiting sequence starts, 2 a request leaves
ARRIVALS = st.lists(st.tuples(st.integers(0, TIERS - 1), st.integers(1, 4), st.integers(0, 2)), max_size=60)


class Model:
    """The queue as a plain list of [name, tier, waiting sequences, begun], in the order of arrival."""

    def __init__(self, total: int, per_tier: list[int | None]) -> None:
        self.queue: AdmissionQueue[int] = AdmissionQueue(total, per_tier)
        self.requests: list[list[int]] = []

    def waiting(self, tier: int | None = None) -> int:
        return sum(r[2] for r in self.requests if tier in (None, r[1]))

    def enter(self, name: int, tier: int, sequences: int) -> None:
        self.requests.append([name, tier, sequences, 0])
        for _ in range(sequences):
            self.queue.enter(name, tier, 0.0)

    def drop(self, request: list[int]) -> None:
        self.requests.remove(request)
        self.queue.leave(request[0], request[2])

    def start_first(self) -> None:
        request = self.requests[0]
        self.queue.start(request[0], 0.0)
        request[2], request[3] = request[2] - 1, 1
        if not request[2]:
            self.requests.remove(request)


@given(st.integers(1, 8), st.lists(st.none() | st.integers(1, 5), min_size=TIERS, max_size=TIERS), ARRIVALS)
def test_bounds_and_shedding(total: int, per_tier: list[int | None], arrivals: list[tuple[int, int, int]]) -> None:
    """Bounds hold for what may wait; shed are the newest whole requests of the lowest tiers below, no more than needed;
    a request is refused only if shedding all of them would not do, and the highest tier never for lower ones.
    """
    model = Model(total, per_tier)
    for name, (tier, sequences, before) in enumerate(arrivals):
        if before == 1 and model.requests:
            model.start_first()
        elif before == 2 and model.requests:
            model.drop(model.requests[len(model.requests) // 2])
        verdict = model.queue.decide(tier, sequences)
        bound = per_tier[tier]
        over_tier = bound is not None and model.waiting(tier) + min(sequences, bound) > bound
        missing = model.waiting() + min(sequences, total) - total
        sheddable = sorted((r for r in model.requests if r[1] > tier and not r[3]), key=lambda r: (-r[1], -r[0]))
        if over_tier:
            assert (verdict.reason, verdict.shed) == ("tier_queue_full", ())
        elif missing > sum(r[2] for r in sheddable):
            assert (verdict.reason, verdict.shed) == ("queue_full", ())
        else:
            expected = []
            for request in sheddable:
                if missing <= 0:
                    break
                expected.append(request)
                missing -= request[2]
            assert verdict.reason is None
            assert list(verdict.shed) == [r[0] for r in expected]
            for request in expected:
                model.drop(request)
            model.enter(name, tier, sequences)
        assert len(model.queue) == model.waiting()
        assert [model.queue.waiting(p) for p in range(TIERS)] == [model.waiting(p) for p in range(TIERS)]
    for request in list(model.requests):
        model.drop(request)
    assert len(model.queue) == 0


@given(st.integers(1, 9), st.lists(st.integers(0, TIERS - 1), max_size=30))
def test_a_higher_tier_is_admitted_wherever_a_lower_one_is(total: int, waiting: list[int]) -> None:
    """What admits a tier admits every higher one: admission is monotone in the tier."""
    model = Model(total, [None] * TIERS)
    for name, tier in enumerate(waiting[:total]):
        model.enter(name, tier, 1)
    admitted = [model.queue.decide(tier).reason is None for tier in range(TIERS)]
    assert admitted == sorted(admitted, reverse=True)


def test_a_request_with_a_token_is_not_shed() -> None:
    """Of two background requests the one that has begun stays, although its other sequence waits."""
    queue: AdmissionQueue[str] = AdmissionQueue(3, [None, None])
    for name, sequences in (("whole", 1), ("begun", 2)):
        for _ in range(sequences):
            queue.enter(name, 1, 0.0)
    queue.start("begun", 1.0)
    assert queue.decide(0, 2).shed == ("whole",)
    assert queue.decide(0, 3).reason == "queue_full"
    queue.leave("whole")
    queue.enter("again", 1, 2.0, whole=False)
    assert queue.decide(0, 3).reason == "queue_full"


def test_retry_after_counts_those_ahead() -> None:
    """The wait is that of one's own and higher tiers at the pace of first tokens, between 1 and 60 seconds."""
    queue: AdmissionQueue[int] = AdmissionQueue(1000, [None, None])
    now = 100.0
    for name in range(300):
        queue.enter(name, name % 2, now)
    for name in range(100):  # one each half second
        now += 0.5
        queue.start(name, now)
    low, high = queue.retry_after(1), queue.retry_after(0)
    assert high == pytest.approx(50, abs=2)
    assert low == 60
    for name in range(100, 290):
        queue.leave(name)
    assert (queue.retry_after(1), queue.retry_after(0)) == (6, 3)


def test_idle_time_is_no_slow_drain() -> None:
    """A queue that was empty for an hour tells the pace from before, not an hour for each request."""
    queue: AdmissionQueue[int] = AdmissionQueue(10, [None])
    for name in range(50):
        queue.enter(name, 0, name * 3600.0)
        queue.start(name, name * 3600.0 + 0.1)
    queue.enter(99, 0, 1e6)
    assert queue.retry_after(0) == 1
