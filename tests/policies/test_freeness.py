"""Freeness: the formulas against a literal second reading of them, in blocks, and what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.wire import ReplicaReport, ReplicaState
from policies.freeness import (
    freeness,
    freeness_column,
    freeness_of,
    headroom,
    normal_freeness,
    normalised,
    present,
    virtual_usage,
)
from policies.tiers import SINGLE, Tiers, decaying_headroom

FOUR = Tiers(decaying_headroom(4), (math.inf,) * 4)


def report(
    *,
    free: int = 128,
    total: int = 128,
    head: int = 0,
    running: tuple[int, ...] = (),
    waiting: tuple[int, ...] = (),
    state: ReplicaState = "serving",
    seqs: int = 64,
) -> ReplicaReport:
    """A load report; `running` and `waiting` by tier."""
    return ReplicaReport(
        *("a", 1, 0.0, state, free, total, 16, sum(running), sum(waiting), 0, head, 512, seqs, 0, []),
        running_by_tier=list(running),
        waiting_by_tier=list(waiting),
    )


TIERS = st.integers(1, 6).flatmap(
    lambda k: st.builds(
        lambda h_max, decay: Tiers(decaying_headroom(k, h_max, decay), (30.0,) * k), st.floats(0, 1), st.floats(0, 3)
    )
)


@st.composite
def reports(draw: st.DrawFn) -> ReplicaReport:
    """Any load report, of up to 6 tiers."""
    total = draw(st.integers(1, 5000))
    return report(
        free=draw(st.integers(0, total)),
        total=total,
        head=draw(st.integers(0, 300)),
        running=tuple(draw(st.lists(st.integers(0, 5), max_size=6))),
        waiting=tuple(draw(st.lists(st.integers(0, 5), max_size=6))),
        state=draw(st.sampled_from(["serving", "serving", "serving", "draining", "dead"])),
        seqs=draw(st.integers(1, 512)),
    )


@given(reports(), TIERS)
def test_formulas_equal_a_literal_count(usage: ReplicaReport, tiers: Tiers) -> None:
    """Virtual usage, F, F_normal and phi are what adding everything up, one request at a time, gives."""
    blocks = float(usage.total_blocks - usage.free_blocks) + usage.head_blocks
    kept = 0.0
    for p in range(len(tiers)):
        here = 0
        for by_tier in (usage.running_by_tier, usage.waiting_by_tier):
            for tier, requests in enumerate(by_tier):
                if min(tier, len(tiers) - 1) == p:
                    here += requests
        if here > 0:
            kept += usage.total_blocks * tiers.headroom[p]
    per_request = usage.running if usage.running > 0 else 1
    if usage.state != "serving":
        used, full, normal = math.inf, -math.inf, -math.inf
    elif usage.running + usage.waiting == 0:
        used, full, normal = blocks + kept, math.inf, math.inf
    else:
        used = blocks + kept
        full = (usage.total_blocks - blocks - kept) / per_request
        normal = (usage.total_blocks - blocks) / per_request
    assert virtual_usage(usage, tiers) == pytest.approx(used)
    assert freeness(usage, tiers) == pytest.approx(full, abs=1e-9)
    assert normal_freeness(usage) == pytest.approx(normal, abs=1e-9)
    assert normalised(full, usage) == pytest.approx(full * usage.max_num_seqs / usage.total_blocks, abs=1e-9)


@given(reports(), TIERS)
def test_headroom_only_takes_away(usage: ReplicaReport, tiers: Tiers) -> None:
    """F <= F_normal, equal where nothing is kept free; a replica that does not serve is freer than none."""
    full, normal = freeness(usage, tiers), normal_freeness(usage)
    assert full <= normal
    assert freeness(usage, SINGLE) == normal
    if usage.state != "serving":
        assert full == normal == -math.inf
        assert virtual_usage(usage, tiers) == math.inf


def test_example_of_the_papers_scale() -> None:
    """128 blocks, 4 tiers: 40 held, the head wants 8, tiers 0 and 2 here keep 0.2 M and 0.2 M / e^2; 5 run."""
    usage = report(free=88, head=8, running=(2, 0, 3), waiting=(0, 0, 1))
    assert present(usage) == {0, 2}
    kept = 128 * 0.2 * (1 + math.exp(-2))
    assert virtual_usage(usage, FOUR) == pytest.approx(48 + kept)
    assert freeness(usage, FOUR) == pytest.approx((80 - kept) / 5)
    assert normal_freeness(usage) == pytest.approx(16)
    assert normalised(16, usage) == pytest.approx(8)


def test_headroom_is_for_the_tier_not_for_each_request() -> None:
    """However many requests of a tier are here, and whether they run or wait, its headroom counts once."""
    one, many = report(free=0, running=(1,)), report(free=0, running=(7,), waiting=(9,))
    assert virtual_usage(one, FOUR) == virtual_usage(many, FOUR) == pytest.approx(128 * 1.2)
    assert headroom(128, 0, FOUR) == pytest.approx(25.6)
    assert headroom(128 * 16, 0, FOUR) == pytest.approx(25.6 * 16)


def test_only_the_head_of_the_queue_wants_blocks() -> None:
    """Queued requests behind the head count nothing; a head that does not fit makes a replica less than full."""
    assert freeness(report(free=10, head=30, running=(2,), waiting=(50,)), SINGLE) == -10


def test_idle_is_infinitely_free_and_a_queue_is_not_idle() -> None:
    """Nothing running and nothing waiting: inf. A queue that nothing runs beside counts as one request."""
    assert freeness(report(), FOUR) == math.inf
    assert freeness(report(waiting=(1,), head=3), SINGLE) == 125
    assert freeness(report(state="draining"), FOUR) == -math.inf


@given(
    st.lists(
        st.tuples(st.floats(-1e6, 1e6), st.floats(0, 1e5), st.floats(0, 1e5), st.integers(0, 500), st.integers(0, 900)),
        max_size=40,
    )
)
def test_columns_equal_scalars(figures: list[tuple[float, float, float, int, int]]) -> None:
    """The vectorised freeness is the scalar one to the last bit, and may overwrite the column of headroom."""
    free, head, kept, running, requests = np.array(figures, dtype=np.float64).reshape(-1, 5).T.copy()
    expected = [freeness_of(*row) for row in figures]
    assert freeness_column(free, head, kept, running, requests, kept).tolist() == expected


@given(reports(), TIERS)
def test_parts_give_the_reports_freeness(usage: ReplicaReport, tiers: Tiers) -> None:
    """From its parts in tokens F is that of the report times the block size: iterations until the cache is full."""
    if usage.state != "serving":
        return
    size = usage.block_size
    kept = sum(headroom(usage.total_blocks * size, p, tiers) for p in {tiers.clamp(p) for p in present(usage)})
    parts = freeness_of(
        usage.free_blocks * size, usage.head_blocks * size, kept, usage.running, usage.running + usage.waiting
    )
    assert parts == pytest.approx(freeness(usage, tiers) * size, abs=1e-6)
