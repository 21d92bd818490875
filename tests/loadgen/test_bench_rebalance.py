"""`bench rebalance` without a fleet: its requests, figures, moves, checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from loadgen.bench import rebalance, tiers
from loadgen.bench.fleet_control import SESSION_HEADER
from loadgen.metrics import RequestRecord


def served(ttft: float, tgt: float) -> RequestRecord:
    """A request answered after `ttft` seconds, whole `tgt` seconds later."""
    return RequestRecord(0.0, 0.0, 10, 5, ttft, ttft + tgt, status=200)


def run(
    on: tuple[float, float] = (0.5, 1.0), moves: int = 3, moves_off: int = 0, error: str = "", sent: float = 0.0
) -> dict[str, Any]:
    """Figures of two seeds; with migration off requests wait 1 s and take 2 s."""
    runs = []
    for seed in (0, 1):
        for kind, waits, made in (("off", (1.0, 2.0), moves_off), ("on", on, moves)):
            records = [replace(served(*waits), error=error, sent=sent)] + [served(*waits)] * 4
            by_reason = {"balance": {"done": made}} if made else {}
            runs.append({"seed": seed, "kind": kind, "load_average": 2.0, "moves": by_reason, "records": records})
    return rebalance.figures(1.0, 1.4, runs)


def test_requests_of_a_run_carry_the_session() -> None:
    """All requests name the session, and text and answer fit the engine's window."""
    asked = rebalance.prompts(50, "s", np.random.default_rng(0))
    assert {p.headers[SESSION_HEADER] for p in asked} == {"s"}
    assert all(len(p.text.split()) + p.output_len <= tiers.ENGINE["max_model_len"] for p in asked)


def test_ratios_are_of_the_same_seed() -> None:
    """Half the wait and half the time give ratios of a half; moves are added up over the seeds."""
    found = run()
    assert found["on_over_off"]["p95_ttft_ms"]["mean"] == pytest.approx(0.5)
    assert found["on_over_off"]["p50_tgt_s"]["mean"] == pytest.approx(0.5)
    assert found["off"]["p50_ttft_ms"] == pytest.approx(1000)
    assert found["moves"] == {"off": {}, "on": {"balance": {"done": 6}}}


def test_moves_of_one_run_are_the_difference() -> None:
    """Counts since the state before; reasons and outcomes that did not occur are left out."""
    before = {"balance": {"done": 2, "aborted": 1}}
    after = {"balance": {"done": 5, "aborted": 1}, "tier": {"done": 1}, "drain": {}}
    assert rebalance.difference(after, before) == {"balance": {"done": 3}, "tier": {"done": 1}}


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        pytest.param({}, set(), id="all"),
        pytest.param({"moves": 0}, {0}, id="no moves"),
        pytest.param({"moves_off": 1}, {0}, id="moves while off"),
        pytest.param({"error": "cut"}, {1}, id="failed"),
        pytest.param({"on": (1.1, 1.0)}, {2}, id="ttft"),
        pytest.param({"on": (0.5, 2.2)}, {3}, id="tgt"),
        pytest.param({"sent": 0.2}, {4}, id="late"),
    ],
)
def test_checks_find_what_is_missed(changed: dict[str, Any], missed: set[int]) -> None:
    """Every expectation is checked by itself."""
    assert {i for i, check in enumerate(run(**changed)["checks"]) if not check["met"]} == missed


def test_off_and_on_take_turns() -> None:
    """Each is first in every other seed."""
    assert rebalance.order(0) == tuple(reversed(rebalance.order(1)))
