"""`bench tiers` without a fleet: its requests, its figures by tier, and what its checks find."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from loadgen.bench import tiers
from loadgen.metrics import RequestRecord


def served(ttft: float) -> RequestRecord:
    """A request answered with 5 tokens, 0.1 s each after the first."""
    return RequestRecord(0.0, 0.0, 10, 5, ttft, ttft + 0.4, status=200)


def refused(reason: str = "queue_full", retry_after: float | None = 2.0) -> RequestRecord:
    """A request that was turned away."""
    return RequestRecord(
        0.0, 0.0, 0, 0, 0.0, 0.0, error="status 429", status=429, reason=reason, retry_after=retry_after
    )


def verdicts(p99_s: list[float], unloaded_s: float, others: list[RequestRecord]) -> list[bool]:
    """Which checks are met by tiers whose requests all waited so long."""
    by_tier = [tiers.of_tier([served(wait)] * 3, 10.0, 1.0) for wait in p99_s]
    return [check["met"] for check in tiers.checks(by_tier, unloaded_s * 1e3, others)]


def test_requests_carry_their_tier_and_fit_the_window() -> None:
    """Each request has its tier in the header, and text and answer fit the engine's window."""
    asked = tiers.prompts([3, 0, 1] * 50, np.random.default_rng(0))
    assert [p.headers["X-Vllm-Priority"] for p in asked[:3]] == ["3", "0", "1"]
    assert all(len(p.text.split()) + p.output_len <= tiers.ENGINE["max_model_len"] for p in asked)


def test_figures_of_a_tier() -> None:
    """Goodput counts first tokens in time, refusals are by reason, and an admitted one that broke is counted."""
    broken = replace(served(1.0), error="cut")
    records = [served(1.0), served(3.0), broken, refused(), refused("shed"), refused("shed")]
    figures = tiers.of_tier(records, slo_s=2.0, seconds=10.0)
    assert (figures["asked"], figures["admitted"], figures["completed"], figures["broken"]) == (6, 3, 2, 1)
    assert figures["goodput_rps"] == pytest.approx(0.1)
    assert figures["within_slo"] == pytest.approx(1 / 6)
    assert figures["refused"] == {"queue_full": 1, "shed": 2}
    assert figures["other_failures"] == 0


def test_capacity_leaves_the_ramps_out() -> None:
    """The steady rate is that between the quarters: slow first and last requests do not count."""
    ends = [10.0, *(20.0 + i for i in range(20)), 90.0]
    assert tiers.steady_rate([replace(served(0.0), latency=end) for end in ends]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("p99_s", "unloaded_s", "others", "expected"),
    [
        pytest.param([1.0, 2.0, 3.0, 9.0], 0.7, [refused()], [True, True, True, True, True], id="all"),
        pytest.param([1.0, 2.0, 1.5, 9.0], 0.7, [refused()], [False, True, True, True, True], id="order"),
        pytest.param([1.3, 2.0, 3.0, 9.0], 0.7, [refused()], [True, False, True, True, True], id="top"),
        pytest.param(
            [1.0, 2.0, 3.0, 9.0], 0.7, [refused(retry_after=None)], [True, True, True, False, True], id="wait"
        ),
        pytest.param([1.0, 2.0, 3.0, 9.0], 0.7, [refused(reason="")], [True, True, True, False, True], id="reason"),
        pytest.param([1.0, 2.0, 3.0, 9.0], 0.7, [served(0.1)], [True, True, True, False, True], id="nothing refused"),
        pytest.param(
            [1.0, 2.0, 3.0, 9.0], 0.7, [replace(refused(), sent=0.2)], [True, True, True, True, False], id="late"
        ),
    ],
)
def test_checks_find_what_is_missed(
    p99_s: list[float], unloaded_s: float, others: list[RequestRecord], expected: list[bool]
) -> None:
    """Order, the top tier's bound (1.5 unloaded + a step of 0.1 s), mute refusals and a late client are told apart."""
    assert verdicts(p99_s, unloaded_s, others) == expected


def test_a_lowest_tier_that_does_not_end_is_missed() -> None:
    """One broken background answer, or none admitted at all, misses the check."""
    good = [tiers.of_tier([served(1.0)], 10.0, 1.0)] * 3
    for lowest in ([served(2.0), replace(served(1.0), error="cut")], [refused()]):
        found = tiers.checks([*good, tiers.of_tier(lowest, 10.0, 1.0)], 1e3, [refused()])
        assert not found[2]["met"]
