"""Skip-join multi-level feedback queue: short work passes long work without anybody knowing lengths.

Source: FastServe (Wu et al., "Fast Distributed Inference Serving for Large Language Models"), section 4.1, and its
code (LLMServe/FastServe, `fastserve/scheduler.py`), with its constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from policies.registry import number, whole
from policies.scheduling.preemption import make_room
from policies.types import Request, SchedulerContext


@dataclass(slots=True)
class Job:
    """A request's level (0 is the highest), its place there (ascending), since when it waits (seconds; None: it
    runs), and the ms of service it got in this level."""

    level: int
    place: float
    idle_since: float | None
    served_ms: float = 0.0


class MLFQ:
    """Ascending (level, place): a request joins the first level whose quantum covers its prompt, sinks one level
    whenever it got more service there than the quantum, and rises to level 0 after `starvation_s` of waiting.

    The quantum of level i is q0_ms * ratio^i. Service is an estimate of time: tokens of a prompt count prefill_token_ms
    each, a decode decode_token_ms; recomputed tokens count too, for the engine spends the time. Newcomers and risen
    requests queue at the end of their level; one that sinks goes to the front, so that it keeps running unless a higher
    level needs its place. A waiting request preempts only running ones of a lower level.

    It preempts a lot. FastServe swaps the KV cache of such requests to the host ahead of time. Here vLLM's KV
    offloading keeps it, where the backend has that (CUDA and XPU; set `kv_offloading_size` in engine_kwargs). On CPU
    there is none: preempted requests recompute, which made an overload burst take 1.8 times as long although level 0
    lasted 16 decodes. Raise q0_ms there.

    q0_ms: ms, > 0. ratio: > 1. levels: >= 1. starvation_s: seconds, > 0; looked at eight times in that time.
    prefill_token_ms, decode_token_ms: ms, > 0; the defaults are those of an 8B model on one A100. Set them to what
        your engine needs: with a decode as long as q0_ms the first token ends level 0.
    """

    name = "mlfq"
    reorders = True

    def __init__(
        self,
        *,
        q0_ms: float = 10.0,
        ratio: float = 2.0,
        levels: int = 6,
        starvation_s: float = 3.0,
        prefill_token_ms: float = 0.1,
        decode_token_ms: float = 10.0,
    ) -> None:
        first = number("q0_ms", q0_ms, "It is the quantum of level 0 in ms; 10 is the default.", above=0)
        growth = number("ratio", ratio, "Each level's quantum is so many times the last one's; 2 is usual.", above=1)
        count = whole("levels", levels, "It counts queues; 6 is the default.", low=1)
        self.quanta_ms = tuple(first * growth**level for level in range(count))
        self.starvation_s = number("starvation_s", starvation_s, "It is seconds of waiting; 3 is the default.", above=0)
        remedy = "It is the engine's time for one token of a prompt in ms; 0.1 is the default."
        self.prefill_token_ms = number("prefill_token_ms", prefill_token_ms, remedy, above=0)
        remedy = "It is the engine's time for one decode step in ms; 10 is the default."
        self.decode_token_ms = number("decode_token_ms", decode_token_ms, remedy, above=0)
        self._jobs: dict[str, Job] = {}
        self._demotions = 0

    def level(self, request: Request, ctx: SchedulerContext) -> int:
        """The request's level now."""
        return self._rank(self._job(request), ctx)[0]

    def waiting_key(self, request: Request, ctx: SchedulerContext) -> tuple[float, float, float, str]:
        return *self._rank(self._job(request), ctx), request.arrival_time, request.request_id

    running_key = waiting_key

    def order_epoch(self, ctx: SchedulerContext) -> float:
        return self._horizon(ctx)

    def on_step(self, ctx: SchedulerContext) -> None:
        pass

    def on_scheduled(self, request: Request, tokens: int, ctx: SchedulerContext) -> None:
        job = self._job(request)
        if job.idle_since is not None:
            level, job.place = self._rank(job, ctx)
            if level < job.level:
                job.level, job.served_ms = level, 0.0
            job.idle_since = None
        job.served_ms += self.decode_token_ms if tokens == 1 else tokens * self.prefill_token_ms
        if job.served_ms > self.quanta_ms[job.level] and job.level + 1 < len(self.quanta_ms):
            self._demotions += 1
            job.level, job.served_ms, job.place = job.level + 1, 0.0, -self._demotions

    def on_preempted(self, request: Request, ctx: SchedulerContext) -> None:
        self._job(request).idle_since = ctx.now

    def on_finished(self, request: Request) -> None:
        self._jobs.pop(request.request_id, None)

    def select_preemptions(
        self, waiting: Sequence[Request], running: Sequence[Request], ctx: SchedulerContext
    ) -> Sequence[Request]:
        """From the back of the lowest level, each for a request of a higher one."""
        lowest_last = sorted(running, key=lambda request: (request.priority, *self.running_key(request, ctx)))
        return make_room(waiting, running, lowest_last, ctx, lambda s, r: self.level(s, ctx) < self.level(r, ctx))

    def _job(self, request: Request) -> Job:
        job = self._jobs.get(request.request_id)
        if job is None:
            prompt_ms = request.num_prompt_tokens * self.prefill_token_ms
            joins = (i for i, quantum in enumerate(self.quanta_ms) if quantum >= prompt_ms)
            arrival = request.arrival_time
            idle = None if request.num_computed_tokens else arrival  # it may have run under another policy
            job = self._jobs[request.request_id] = Job(next(joins, len(self.quanta_ms) - 1), arrival, idle)
        return job

    def _rank(self, job: Job, ctx: SchedulerContext) -> tuple[int, float]:
        """(level, place), those of a risen request if it is starved now."""
        if job.idle_since is not None and job.idle_since <= self._horizon(ctx):
            return 0, job.idle_since + self.starvation_s
        return job.level, job.place

    def _horizon(self, ctx: SchedulerContext) -> float:
        """Who waits since then or longer is starved."""
        tick = self.starvation_s / 8
        return math.floor(ctx.now / tick) * tick - self.starvation_s
