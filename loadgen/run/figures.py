"""Figures of a run: the keys of `vllm bench serve`, and by tier what became of requests and how long they waited."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from loadgen.metrics import OUTCOMES, RequestRecord, percentile, summarise
from loadgen.run.slo import Slos, slo_of
from loadgen.workloads.burstiness import measure
from loadgen.workloads.workload import Request

Sent = tuple[int, Request, RequestRecord]  # number in the workload, what was asked, what came of it
LATE = 0.1  # s at the 99th percentile; a client that is later has measured itself


def known_lengths(sent: Sequence[Sent]) -> list[Sent]:
    """The same with the asked prompt length where the server did not count the prompt."""
    return [
        (i, request, record if record.prompt_len else dataclasses.replace(record, prompt_len=request.prompt_tokens))
        for i, request, record in sent
    ]


def figures(sent: Sequence[Sent], slos: Slos) -> dict[str, Any]:
    """All figures of the requests that were sent.

    The names at the top level are those of `vllm bench serve`, over all tiers; `outcomes`, `within_slo` and `tiers` are
    ours, and `arrivals` is the burstiness of the times at which requests really went out. `lag` is how late they did.
    """
    records = [record for _, _, record in sent]
    found = _group(sent, slos, summarise(records)["duration"])
    found["max_output_tokens_per_s"], found["max_concurrent_requests"] = peaks(records)
    found["rtfx"] = 0.0
    tiers = sorted({request.tier for _, request, _ in sent if request.tier is not None})
    found["tiers"] = {
        str(tier): _group([s for s in sent if s[1].tier == tier], slos, found["duration"]) for tier in tiers
    }
    lags = [record.sent - record.due for record in records]
    found["lag"] = {
        "p50_s": percentile(lags, 50),
        "p99_s": percentile(lags, 99),
        "max_s": max(lags, default=0.0),
        "client_was_late": percentile(lags, 99) > LATE,
    }
    found["arrivals"] = msgspec.structs.asdict(measure(np.asarray([record.sent for record in records])))
    return found


def detail(sent: Sequence[Sent]) -> dict[str, Any]:
    """One entry for each request under the names of `vllm bench serve --save-detailed`; times count from due."""
    records = [record for _, _, record in sent]
    return {
        "input_lens": [r.prompt_len for r in records],
        "output_lens": [r.output_len if r.outcome == "ok" else 0 for r in records],
        "start_times": [r.due for r in records],
        "queue_times": [r.sent - r.due for r in records],
        "ttfts": [r.ttft for r in records],
        "itls": [r.itls for r in records],
        "latencies": [r.latency for r in records],
        "generated_texts": [r.text for r in records],
        "errors": [r.error for r in records],
    }


def _group(sent: Sequence[Sent], slos: Slos, seconds: float) -> dict[str, Any]:
    records = [record for _, _, record in sent]
    outcomes = Counter(record.outcome for record in records)
    found = summarise(records)
    rates = {"request_throughput": found["completed"], "output_throughput": found["total_output_tokens"]}
    if seconds:
        tokens = found["total_input_tokens"] + found["total_output_tokens"]
        found |= {name: count / seconds for name, count in {**rates, "total_token_throughput": tokens}.items()}
    found["asked"] = len(records)
    found["outcomes"] = {outcome: outcomes[outcome] for outcome in OUTCOMES}
    found["shed_by_reason"] = dict(Counter(r.reason or f"status {r.status}" for r in records if r.outcome == "shed"))
    found["errors_by_text"] = dict(
        Counter(r.error[:120] for r in records if r.outcome in ("error", "cut")).most_common(5)
    )
    found["request_goodput"] = found["within_slo"] = None
    if slos:
        good = [slo.met(record) for _, request, record in sent if (slo := slo_of(slos, request.tier)) is not None]
        found["request_goodput"] = sum(good) / seconds if seconds else 0.0
        found["within_slo"] = sum(good) / len(good) if good else None
    return found


def peaks(records: Sequence[RequestRecord]) -> tuple[float, int]:
    """Most answer pieces in a second, and most requests open in one, of those that ended well; by whole seconds."""
    done = [r for r in records if r.outcome == "ok"]
    if not done:
        return 0.0, 0
    first = min(r.due for r in done)
    seconds = int(max(r.due + r.latency for r in done) - first) + 2
    pieces = np.bincount(np.concatenate([np.asarray(r.times) - first for r in done]).astype(int), minlength=seconds)
    edges = np.zeros(seconds + 1, int)
    for r in done:
        edges[int(r.due - first)] += 1
        edges[int(r.due - first + r.latency) + 1] -= 1
    return float(pieces.max()), int(np.cumsum(edges).max())
