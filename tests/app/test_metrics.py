"""What an ingress records of its requests: parts of the first token, promises, ends; tokens cost an addition."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from app.incoming import Incoming
from app.metrics import KEYLESS, Promise, RequestMetrics, judge
from app.stream import Stream
from deployments import metric_series, metrics

PROMISES = [Promise("fast", ttft_s=1.0, tpot_s=0.1), Promise("slow")]
MODEL = "m"


class Told(dict[tuple[str, tuple[str, ...]], list[float]]):
    """What each series was told: (name without prefix, label values) -> values."""

    def of(self, name: str, *labels: str) -> list[float]:
        """The values of one series."""
        return self.get((name, labels), [])


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    """Everything that is recorded from here on."""
    found = Told()

    def record(self: metric_series.Metric, value: float, tags: dict[str, str]) -> None:
        key = (self.name.removeprefix(metrics.PREFIX), tuple(tags.values()))
        found.setdefault(key, []).append(value)

    monkeypatch.setattr(metric_series.Metric, "record", record)
    metric_series.forget()
    for metric in metrics.METRICS:
        metric._series.clear()
    yield found
    metric_series.forget()
    for metric in metrics.METRICS:
        metric._series.clear()


def stream(tier: int = 0, tokens: int = 0, first: float = 0.5, last: float = 0.5, tenant: str | None = None) -> Stream:
    """A stream whose request arrived at 0 s."""
    request = Incoming(tier, tenant=tenant, began=0.0)
    params: Any = None
    made = Stream("r", [1, 2, 3], params, 0.0, request)
    made.delivered = list(range(tokens))
    made.first_at, made.last_at = first, last
    return made


def test_the_first_token_is_told_in_parts(told: Told) -> None:
    """TTFT is from the arrival here; queue and engine are the engine's figures, the framework is the rest."""
    RequestMetrics(PROMISES, MODEL).first_token(stream(), (0.1, 0.3), 0.5)
    assert told.of("time_to_first_token_seconds", "fast") == [0.5]
    assert told.of("queue_wait_seconds", "fast") == [0.1]
    assert told.of("first_token_engine_seconds", "fast") == [0.3]
    assert told.of("first_token_framework_seconds", "fast") == [pytest.approx(0.2)]
    assert told.of("prompt_tokens_total", "fast") == [3]


def test_without_the_engines_times_there_are_no_parts(told: Told) -> None:
    """A first token that comes from a replica that took the request over is a TTFT without parts."""
    RequestMetrics(PROMISES, MODEL).first_token(stream(), None, 0.5)
    assert told.of("time_to_first_token_seconds", "fast") == [0.5]
    assert not told.of("first_token_engine_seconds", "fast")


@pytest.mark.parametrize(
    ("tier", "tokens", "first", "last", "result"),
    [
        (0, 11, 0.5, 1.5, "met"),
        (0, 11, 1.1, 1.2, "ttft"),
        (0, 11, 1.1, 9.0, "ttft"),
        (0, 11, 0.5, 1.6, "tpot"),
        (0, 1, 0.5, 0.5, "met"),
        (1, 11, 99.0, 999.0, "met"),
    ],
)
def test_promises(told: Told, tier: int, tokens: int, first: float, last: float, result: str) -> None:
    """A finished sequence is judged by its tier's promises, TTFT first; only what keeps both is goodput."""
    RequestMetrics(PROMISES, MODEL).ended(stream(tier, tokens, first, last), "finished")
    name = PROMISES[tier].tier
    assert judge(PROMISES[tier], stream(tier, tokens, first, last)) == result
    assert told.of("slo_sequences_total", name, result) == [1.0]
    assert told.of("good_output_tokens_total", name) == ([tokens] if result == "met" else [])
    assert told.of("sequences_total", name, MODEL, "finished") == [1.0]
    assert told.of("token_generation_time_seconds", name) == [last - first]
    expected = [pytest.approx((last - first) / (tokens - 1))] if tokens > 1 else []
    assert told.of("time_per_output_token_seconds", name) == expected


@pytest.mark.parametrize("outcome", ["aborted", "shed", "timeout", "failed"])
def test_what_did_not_finish(told: Told, outcome: Any) -> None:
    """A failure and a timeout break the promise; a client that left and a shed request are not judged."""
    RequestMetrics(PROMISES, MODEL).ended(stream(0, 5), outcome)
    assert told.of("sequences_total", "fast", MODEL, outcome) == [1.0]
    assert told.of("slo_sequences_total", "fast", "failed") == ([1.0] if outcome in ("failed", "timeout") else [])
    assert not told.of("time_per_output_token_seconds", "fast")


def test_tenants_are_those_of_the_list(told: Told) -> None:
    """A tenant of the list and requests without a key are counted by name, others together."""
    figures = RequestMetrics(PROMISES, MODEL, ["acme"])
    for tenant in ("acme", None, "unknown", "unknown too"):
        figures.ended(stream(0, 5, tenant=tenant), "finished")
    assert told.of("tenant_sequences_total", "acme") == [1.0]
    assert told.of("tenant_sequences_total", KEYLESS) == [1.0]
    assert told.of("tenant_sequences_total", "other") == [1.0, 1.0]
    assert told.of("tenant_tokens_total", "acme", "prompt") == [3]
    assert told.of("tenant_tokens_total", "acme", "output") == [5]


def test_tokens_are_added_up(told: Told) -> None:
    """No token is given to Ray by itself: a flush gives what came since the last one."""
    figures = RequestMetrics(PROMISES, MODEL)
    for _ in range(100):
        figures.tokens(0, 2)
    figures.tokens(7, 1)  # beyond the last tier is the last
    assert not told
    figures.flush(lambda tier: 4 + tier)
    figures.flush(lambda tier: 4 + tier)
    assert told.of("output_tokens_total", "fast") == [200]
    assert told.of("output_tokens_total", "slow") == [1]
    assert told.of("queued_sequences", "slow") == [5, 5]


def test_counters_begin_with_zero(told: Told) -> None:
    """After the start each tier has its counters at 0, so that the first event is an increase."""

    async def begin() -> None:
        figures = RequestMetrics(PROMISES, MODEL)
        figures.start(lambda tier: 0)
        await asyncio.sleep(0)
        figures.close()

    asyncio.run(begin())
    for tier in ("fast", "slow"):
        assert told.of("slo_sequences_total", tier, "met") == [0]
        assert told.of("sequences_total", tier, MODEL, "failed") == [0]
        assert told.of("sheds_total", tier, "queue_full") == [0]
        assert told.of("queued_sequences", tier) == [0]
    assert told.of("failovers_total", "actor_died") == [0]
