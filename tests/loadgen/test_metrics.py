"""Figures of a run: definitions and intervals."""

import math

import pytest

from loadgen.metrics import RequestRecord, paired_ratio, percentile, summarise


def record(due: float = 0.0, **changes: float) -> RequestRecord:
    """A request of 10 prompt and 5 answer tokens: first token after 1 s, last after 3 s."""
    values = {"sent": due, "prompt_len": 10, "output_len": 5, "ttft": 1.0, "latency": 3.0, **changes}
    return RequestRecord(due=due, **values)  # type: ignore[arg-type]


def test_definitions_of_the_figures() -> None:
    """TTFT per prompt token, token generation time, time per output token and rates follow from the records."""
    figures = summarise([record(0.0), record(2.0, sent=2.5)])
    assert figures["completed"] == 2
    assert figures["duration"] == 5.0
    assert figures["output_throughput"] == pytest.approx(10 / 5)
    assert figures["p50_normalized_ttft_ms"] == pytest.approx(100.0)
    assert figures["p50_tgt_s"] == pytest.approx(2.0)
    assert figures["p50_tpot_ms"] == pytest.approx(500.0)
    assert figures["p50_ttft_ms"] == figures["median_ttft_ms"] == pytest.approx(1000.0)
    assert figures["p99_queue_time_s"] == pytest.approx(0.495)


def test_failed_requests_count_as_failed_only() -> None:
    """A failed request appears under `failed` and in no latency or rate."""
    broken = RequestRecord(0.0, 0.0, 0, 0, 0.0, 0.0, error="status 503")
    figures = summarise([record(), broken])
    assert (figures["completed"], figures["failed"]) == (1, 1)
    assert figures["p50_ttft_ms"] == pytest.approx(1000.0)
    assert figures["total_output_tokens"] == 5


def test_no_request_gives_no_numbers() -> None:
    """An empty run has rates of 0 and percentiles that are not a number, and does not fail."""
    figures = summarise([])
    assert figures["output_throughput"] == 0.0
    assert math.isnan(figures["p50_ttft_ms"])
    assert math.isnan(percentile([], 50))


def test_one_token_answers_have_no_time_per_token() -> None:
    """Answers of a single token are left out of the time per output token instead of dividing by zero."""
    figures = summarise([record(output_len=1, latency=1.0), record()])
    assert figures["p50_tpot_ms"] == pytest.approx(500.0)


def test_ratio_of_few_pairs_spans_them() -> None:
    """Up to 4 pairs: geometric mean, smallest and largest ratio."""
    ratio = paired_ratio([2.0, 8.0], [1.0, 1.0])
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx((4.0, 2.0, 8.0))
    assert ratio.kind == "min-max"


def test_ratio_of_many_pairs_has_a_bootstrap_interval() -> None:
    """From 5 pairs on the interval contains the mean, is inside the extremes, and is the same every time."""
    numerators = [2.0, 2.2, 1.9, 2.1, 2.4, 1.8]
    ratio = paired_ratio(numerators, [1.0] * 6)
    assert min(numerators) < ratio.low < ratio.mean < ratio.high < max(numerators)
    assert ratio.kind == "bootstrap 95 %"
    assert paired_ratio(numerators, [1.0] * 6) == ratio


def test_pairs_must_match() -> None:
    """Unequal numbers of measurements are refused."""
    with pytest.raises(ValueError, match="2 and 1"):
        paired_ratio([1.0, 2.0], [1.0])
