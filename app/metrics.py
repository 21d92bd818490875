"""What an ingress records of its requests; each tier's series are looked up once, so that a token costs an addition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from app.stream import Stream
from deployments import metrics
from deployments.metric_series import allow

FLUSH_S = 1.0
KEYLESS = "none"

Outcome = Literal["finished", "aborted", "shed", "timeout", "failed"]


@dataclass(frozen=True, slots=True)
class Promise:
    """A tier's name and what it promises, in seconds (None: nothing)."""

    tier: str
    ttft_s: float | None = None
    tpot_s: float | None = None


class _Tier:
    """The series of one tier and its tokens since they were last given to Ray."""

    def __init__(self, promise: Promise) -> None:
        name = promise.tier
        self.promise = promise
        self.ttft, self.tpot, self.tgt = metrics.TTFT.at(name), metrics.TPOT.at(name), metrics.TGT.at(name)
        self.queue, self.engine = metrics.FIRST_TOKEN_QUEUE.at(name), metrics.FIRST_TOKEN_ENGINE.at(name)
        self.framework = metrics.FIRST_TOKEN_FRAMEWORK.at(name)
        self.prompt_tokens, self.good_tokens = metrics.PROMPT_TOKENS.at(name), metrics.GOOD_TOKENS.at(name)
        self.output_tokens, self.queued = metrics.OUTPUT_TOKENS.at(name), metrics.QUEUED.at(name)
        self.slo = {result: metrics.SLO.at(name, result) for result in ("met", "ttft", "tpot", "failed")}
        self.generated = 0


class RequestMetrics:
    """Series of one ingress. `promises` are its tiers, the highest first; `model` is served, `tenants` may call.

    Any other tenant is counted as "other".
    """

    def __init__(self, promises: Sequence[Promise], model: str = "", tenants: Iterable[str] = ()) -> None:
        allow("model", (model,))
        allow("tenant", (*tenants, KEYLESS))
        self._model = model
        self._tiers = [_Tier(promise) for promise in promises]
        self._task: asyncio.Task[None] | None = None

    def start(self, waiting: Callable[[int], int]) -> None:
        """Make every counter appear with 0 and give gauges and tokens to Ray each second from now on.

        `waiting(tier)`: sequences that wait for their first token.
        """
        for tier in self._tiers:
            name = tier.promise.tier
            counters = [tier.prompt_tokens, tier.output_tokens, tier.good_tokens, *tier.slo.values()]
            counters += [metrics.SHEDS.at(name, reason) for reason in metrics.SHED_REASONS]
            counters += [metrics.SEQUENCES.at(name, self._model, outcome) for outcome in metrics.OUTCOMES]
            for series in counters:
                series.inc(0)
        for reason in metrics.FAILOVER_REASONS:
            metrics.FAILOVERS.at(reason).inc(0)
        self._task = asyncio.get_running_loop().create_task(self._flush_for_ever(waiting))

    def close(self) -> None:
        """Stop giving figures to Ray."""
        if self._task is not None:
            self._task.cancel()

    def tokens(self, tier: int, count: int) -> None:
        """Tokens of a delta; called for each."""
        self._of(tier).generated += count

    def first_token(self, stream: Stream, times: Sequence[float] | None, now: float) -> None:
        """The client's first token of a sequence; `times` are the engine's of it (`Delta.times`)."""
        tier, ttft = self._of(stream.request.tier), now - stream.request.began
        tier.ttft.observe(ttft)
        tier.prompt_tokens.inc(len(stream.prompt))
        if times is not None:
            queue, engine = times
            tier.queue.observe(queue)
            tier.engine.observe(engine)
            tier.framework.observe(max(0.0, ttft - engine))

    def ended(self, stream: Stream, outcome: Outcome) -> None:
        """A sequence is off the books."""
        tier, tokens = self._of(stream.request.tier), len(stream.delivered)
        metrics.SEQUENCES.at(tier.promise.tier, self._model, outcome).inc()
        tenant = stream.request.tenant or KEYLESS
        metrics.TENANT_SEQUENCES.at(tenant).inc()
        metrics.TENANT_TOKENS.at(tenant, "prompt").inc(len(stream.prompt))
        metrics.TENANT_TOKENS.at(tenant, "output").inc(tokens)
        if outcome == "finished":
            tgt = stream.last_at - stream.first_at
            tier.tgt.observe(tgt)
            if tokens > 1:
                tier.tpot.observe(tgt / (tokens - 1))
            result = judge(tier.promise, stream)
            tier.slo[result].inc()
            if result == "met":
                tier.good_tokens.inc(tokens)
        elif outcome in ("failed", "timeout"):
            tier.slo["failed"].inc()

    def refused(self, tier: int, reason: str) -> None:
        """A request was turned away."""
        metrics.SHEDS.at(self._of(tier).promise.tier, reason).inc()

    def _of(self, tier: int) -> _Tier:
        return self._tiers[min(tier, len(self._tiers) - 1)]

    async def _flush_for_ever(self, waiting: Callable[[int], int]) -> None:
        while True:
            self.flush(waiting)
            await asyncio.sleep(FLUSH_S)

    def flush(self, waiting: Callable[[int], int]) -> None:
        """Give what was added up to Ray."""
        for number, tier in enumerate(self._tiers):
            tier.queued.set(waiting(number))
            if tier.generated:
                tier.output_tokens.inc(tier.generated)
                tier.generated = 0


def judge(promise: Promise, stream: Stream) -> Literal["met", "ttft", "tpot"]:
    """Which of a tier's promises a finished sequence missed first, if any."""
    if promise.ttft_s is not None and stream.first_at - stream.request.began > promise.ttft_s:
        return "ttft"
    tokens = len(stream.delivered)
    if promise.tpot_s is not None and tokens > 1:
        if (stream.last_at - stream.first_at) / (tokens - 1) > promise.tpot_s:
            return "tpot"
    return "met"
