"""Spans of one run of a sequence on a replica, made when it is over: `queue`, `prefill`, `decode`.

vLLM counts a request's times in its EngineCore and sends them with its tokens: what ends before its first token is
known to have waited, and no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from deployments.tracing import DECODE, PREFILL, QUEUE
from deployments.wire import Delta, Outcome, Submit

if TYPE_CHECKING:
    from deployments.migration.sequences import Generate
    from deployments.spans import Spans

Emit = Callable[[Delta], None]


class Stats(Protocol):
    """What is read of vLLM's RequestStateStats, which it goes on writing: monotonic seconds, 0 if it did not happen."""

    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    last_token_ts: float
    num_preemptions: int
    num_generation_tokens: int


@dataclass(slots=True)
class Run:
    """A run: `kv_tokens` have their KV from the replica that it comes from; the rest is told with its first output."""

    began: float = field(default_factory=time.monotonic)
    kv_tokens: int = 0
    stats: Stats | None = None
    cached_tokens: int | None = None


class Running(Protocol):
    """`deployments.engine.generate` without its engine."""

    async def __call__(
        self, submit: Submit, entries: dict[str, Any], emit: Emit, run: Run | None = None
    ) -> Outcome: ...


def traced(generate: Running, spans: Spans | None, replica: str, fate: Callable[[Submit], Outcome | None]) -> Generate:
    """The same `generate`, whose runs are recorded unless `spans` is None.

    `fate`: what the ingress was told of a run that was cancelled.
    """
    if spans is None:
        return generate

    async def tracing(submit: Submit, entries: dict[str, Any], emit: Emit) -> Outcome:
        run, outcome = Run(kv_tokens=entries.get("adopt", {}).get("computed", 0)), None
        try:
            outcome = await generate(submit, entries, emit, run)
            return outcome
        finally:
            if submit.trace is not None:
                record(spans, replica, submit, run, outcome or fate(submit))

    return tracing


def record(spans: Spans, replica: str, submit: Submit, run: Run, outcome: Outcome | None) -> None:
    """The spans of a run that has ended so (None: aborted by its client)."""
    from deployments.spans import clock

    epoch, now, stats = clock(), time.monotonic(), run.stats
    failed = outcome.message[:200] if outcome is not None and outcome.fault is not None else None
    whose = {
        "tidegate.sequence_id": submit.rid,
        "tidegate.replica": replica,
        "tidegate.epoch": submit.epoch,
        "tidegate.hop": submit.hop,
        "tidegate.tier": submit.priority,
    }
    ended = {"tidegate.outcome": _word(outcome), "tidegate.destination": outcome and outcome.moved_to}
    if stats is None or stats.first_token_ts == 0:
        spans.record(QUEUE, submit.trace, run.began, now, whose | ended, error=failed, epoch=epoch)
        return
    spans.record(QUEUE, submit.trace, stats.queued_ts, stats.scheduled_ts, whose, epoch=epoch)
    started = stats.scheduled_ts  # a sequence that came here with its KV decodes in its first step
    if not run.kv_tokens:
        started = stats.first_token_ts
        of_prompt = {
            "gen_ai.usage.input_tokens": len(submit.prompt),
            "gen_ai.usage.cache_read.input_tokens": run.cached_tokens,
            "tidegate.recomputed_tokens": len(submit.output),
        }
        spans.record(PREFILL, submit.trace, stats.scheduled_ts, started, whose | of_prompt, epoch=epoch)
    of_answer = {
        "gen_ai.usage.output_tokens": stats.num_generation_tokens,
        "gen_ai.response.finish_reasons": [outcome.finish_reason] if outcome and outcome.finish_reason else None,
        "tidegate.preemptions": stats.num_preemptions,
        "tidegate.kv_tokens": run.kv_tokens or None,
    }
    attributes = whose | of_answer | ended
    spans.record(DECODE, submit.trace, started, stats.last_token_ts, attributes, error=failed, epoch=epoch)


def _word(outcome: Outcome | None) -> str:
    if outcome is None:
        return "aborted"
    if outcome.moved_to is not None:
        return "moved"
    return "finished" if outcome.fault is None else "failed"
