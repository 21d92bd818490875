"""Figures of a load run: percentiles, rates and ratios with an interval. Key names are those of `vllm bench serve`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 95, 99)
OUTCOMES = ("ok", "shed", "error", "cut", "cancelled", "unfinished")
REFUSED = (429, 503, 529)  # statuses by which servers turn requests away: queue full, over a limit, nobody there


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One finished request. Times in seconds, lengths in tokens.

    `due`: when the load plan wanted it sent, and `sent`: when the client sent it (both since the start of the run);
    `ttft` and `latency` (to the last token) count from `due`, so that a late client cannot flatter the server.
    `status` is the HTTP status (0: no answer); of a refusal `reason` is the server's machine-readable one, and
    `retry_after` the seconds that it asks to wait. `times`: when each piece of the answer came, since the start of the
    run; `text` and, where the server tells them, `token_ids` are the answer. `left` is why the client did not wait for
    the end, `cancelled` or `unfinished`, if it did not.
    """

    due: float
    sent: float
    prompt_len: int
    output_len: int
    ttft: float
    latency: float
    error: str = ""
    status: int = 0
    reason: str = ""
    retry_after: float | None = None
    times: tuple[float, ...] = ()
    text: str = ""
    token_ids: tuple[int, ...] = ()
    left: str = ""

    @property
    def outcome(self) -> str:
        """How it ended, one of OUTCOMES.

        `ok`: to its end. `shed`: the server turned it away (429, 503). `cut`: the answer broke off after its first
        token. `error`: it failed before. `cancelled`: the client left, as planned. `unfinished`: the deadline or the
        end of the run came first.
        """
        if self.left:
            return self.left
        if not self.error:
            return "ok"
        if self.status in REFUSED:
            return "shed"
        return "cut" if self.times else "error"

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: seconds between pieces of the answer."""
        return [b - a for a, b in itertools.pairwise(self.times)]

    @property
    def tgt(self) -> float:
        """Token generation time: seconds from the first to the last token."""
        return self.latency - self.ttft


def percentile(values: Sequence[float], p: float) -> float:
    """p-th percentile (0-100) by linear interpolation; nan for no values."""
    return float(np.percentile(np.asarray(values, float), p)) if len(values) else float("nan")


def summarise(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Figures of one run, named as by `vllm bench serve`.

    Ours besides: `normalized_ttft` (ms of waiting per prompt token), `tgt` (token generation time, s),
    `queue_time` (s between the planned and the real sending: above some ms the client was the bottleneck).
    """
    done = [r for r in records if not r.error]
    duration = max((r.due + r.latency for r in done), default=0.0) - min((r.due for r in done), default=0.0)
    tokens_in, tokens_out = sum(r.prompt_len for r in done), sum(r.output_len for r in done)
    figures: dict[str, Any] = {
        "completed": len(done),
        "failed": len(records) - len(done),
        "duration": duration,
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(done) / duration if duration else 0.0,
        "output_throughput": tokens_out / duration if duration else 0.0,
        "total_token_throughput": (tokens_in + tokens_out) / duration if duration else 0.0,
    }
    series = {
        "ttft_ms": [r.ttft * 1e3 for r in done],
        "tpot_ms": [r.tgt * 1e3 / (r.output_len - 1) for r in done if r.output_len > 1],
        "e2el_ms": [r.latency * 1e3 for r in done],
        "itl_ms": [itl * 1e3 for r in done for itl in r.itls],
        "normalized_ttft_ms": [r.ttft * 1e3 / r.prompt_len for r in done if r.prompt_len],
        "tgt_s": [r.tgt for r in done],
        "queue_time_s": [r.sent - r.due for r in done],
    }
    for name, values in series.items():
        figures[f"mean_{name}"] = float(np.mean(values)) if values else float("nan")
        figures[f"median_{name}"] = percentile(values, 50)
        figures[f"std_{name}"] = float(np.std(values)) if values else float("nan")
        figures.update({f"p{p}_{name}": percentile(values, p) for p in PERCENTILES})
    return figures


@dataclass(frozen=True, slots=True)
class Ratio:
    """Geometric mean of paired ratios, with an interval and how that was found (`bootstrap 95 %` or `min-max`)."""

    mean: float
    low: float
    high: float
    kind: str
    pairs: int

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float], draws: int = 10_000) -> Ratio:
    """Ratio of paired measurements (same seed or round): geometric mean and interval.

    From 5 pairs on a percentile bootstrap over the pairs; fewer pairs cannot carry one, then smallest and largest.
    """
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError(f"pairs: {len(numerators)} and {len(denominators)} measurements do not make pairs")
    logs = np.log(np.asarray(numerators, float) / np.asarray(denominators, float))
    mean = float(np.exp(logs.mean()))
    if len(logs) < 5:
        return Ratio(mean, float(np.exp(logs.min())), float(np.exp(logs.max())), "min-max", len(logs))
    means = np.random.default_rng(0).choice(logs, (draws, len(logs))).mean(axis=1)
    low, high = np.exp(np.percentile(means, [2.5, 97.5]))
    return Ratio(mean, float(low), float(high), "bootstrap 95 %", len(logs))
