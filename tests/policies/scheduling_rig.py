"""Requests, snapshots, and a replica that schedules as vLLM does: what the tests of scheduling policies are made of."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from policies.scheduling.capabilities import (
    BudgetsTokens,
    Follows,
    GatesAdmission,
    OrdersRunning,
    Preempts,
    PrefillsFirst,
)
from policies.types import Hints, SchedulerContext

MAX_LEN = 4096
BLOCK = 16


@dataclass(eq=False)
class Asked:
    """What policies read of a request; each is itself, as in vLLM."""

    request_id: str
    arrival_time: float
    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_preemptions: int = 0
    max_tokens: int = 512
    num_computed_tokens: int = 0
    priority: int = 0
    hints: Hints = field(default_factory=Hints)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


def running(name: str, prompt: int, output: int = 1, arrival: float = 1_000_000.0, **more: Any) -> Asked:
    """A request that decodes: all its tokens but the newest are computed."""
    return Asked(name, arrival, prompt, output, num_computed_tokens=prompt + output - 1, **more)


def context(
    q: int,
    block_size: int = BLOCK,
    *,
    now: float = 1_000_100.0,
    run: int = 8,
    total: int | None = None,
    free: int = 100,
    seqs: int = 256,
    budget: int = 2048,
) -> SchedulerContext:
    """A replica at second 1,000,100 with q requests waiting and 64k tokens of KV cache."""
    blocks = 65536 // block_size if total is None else total
    return SchedulerContext(now, q, run, blocks, free, block_size, MAX_LEN, seqs, budget)


def order(policy: Any, requests: Iterable[Asked], ctx: SchedulerContext) -> list[Asked]:
    """The queue as the engine sees it."""
    return sorted(requests, key=lambda request: policy.waiting_key(request, ctx))


class Replica:
    """vLLM's scheduler in few words: running first, whole prompts must fit, the tail is preempted, chunked prefill.

    A request generates `max_tokens` tokens. `choices` and `shortages` are the ids preempted by choice and for lack of
    blocks, `served` those that got tokens, step by step. One step takes `step_s` seconds.
    """

    def __init__(
        self, policy: Any, *, blocks: int = 64, seqs: int = 8, budget: int = 128, step_s: float = 0.05
    ) -> None:
        self.policy, self.blocks, self.seqs, self.budget, self.step_s = policy, blocks, seqs, budget, step_s
        self.now = 0.0
        self.free = blocks
        self._held: dict[str, int] = {}  # KV blocks
        self.waiting: list[Asked] = []
        self.running: list[Asked] = []
        self.finished: list[str] = []
        self.choices: list[str] = []
        self.shortages: list[str] = []
        self.served: list[list[str]] = []

    def context(self) -> SchedulerContext:
        """The snapshot of this moment."""
        return context(
            len(self.waiting),
            now=self.now,
            run=len(self.running),
            total=self.blocks,
            free=self.free,
            seqs=self.seqs,
            budget=self.budget,
        )

    def queue(self, ctx: SchedulerContext) -> list[Asked]:
        """Waiting requests in the policy's order, or in vLLM's own."""
        if self.policy.reorders:
            return order(self.policy, self.waiting, ctx)
        return sorted(self.waiting, key=lambda r: (r.num_preemptions == 0, r.arrival_time, r.request_id))

    def step(self) -> None:
        """Schedule, compute, and let time pass."""
        policy, ctx = self.policy, self.context()
        policy.on_step(ctx)
        left = min(self.budget, policy.step_budget(ctx)) if isinstance(policy, BudgetsTokens) else self.budget
        barred: set[str] = set()
        if isinstance(policy, Preempts) and self.waiting:
            for victim in policy.select_preemptions(self.queue(ctx), list(self.running), ctx):
                self._preempt(victim, ctx, self.choices)
                barred.add(victim.request_id)
        if isinstance(policy, OrdersRunning):
            self.running.sort(key=lambda request: policy.running_key(request, ctx))
        plan: dict[str, tuple[Asked, int]] = {}
        short, place = False, 0
        if isinstance(policy, PrefillsFirst) and self.waiting and policy.admits_now(self.queue(ctx)[0], ctx):
            place = len(self.running)  # they sit this step out
        while place < len(self.running) and left > 0:
            request = self.running[place]
            tokens = min(request.num_tokens - request.num_computed_tokens, left)
            while not self._allocate(request, tokens):
                victim = self.running[-1]
                self._preempt(victim, ctx, self.shortages)
                short = True
                if victim is request:
                    break
            else:
                plan[request.request_id] = request, tokens
                left -= tokens
                place += 1
        for request in [] if short else self.queue(ctx):
            full = len(self.running) >= self.seqs or left <= 0 or self.free < -(-request.num_tokens // BLOCK)
            refused = isinstance(policy, GatesAdmission) and not policy.admit(request, self.running, ctx)
            if full or refused or request.request_id in barred:
                break
            tokens = min(request.num_tokens, left)
            self._allocate(request, tokens)
            self.waiting.remove(request)
            self.running.append(request)
            plan[request.request_id] = request, tokens
            left -= tokens
        self.served.append(list(plan))
        self._compute(plan, ctx)
        self.now += self.step_s

    def _allocate(self, request: Asked, tokens: int) -> bool:
        """Take the blocks for so many tokens more, if they are free."""
        held = self._held.get(request.request_id, 0)
        need = -(-(request.num_computed_tokens + tokens) // BLOCK) - held
        if need > self.free:
            return False
        self.free -= need
        self._held[request.request_id] = held + need
        return True

    def _preempt(self, victim: Any, ctx: SchedulerContext, log: list[str]) -> None:
        self.running.remove(victim)
        self.free += self._held.pop(victim.request_id, 0)
        self.waiting.append(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        log.append(victim.request_id)
        if isinstance(self.policy, Follows):
            self.policy.on_preempted(victim, ctx)

    def _compute(self, plan: dict[str, tuple[Asked, int]], ctx: SchedulerContext) -> None:
        for request, tokens in plan.values():
            if isinstance(self.policy, Follows):
                self.policy.on_scheduled(request, tokens, ctx)
            request.num_computed_tokens += tokens
            if request.num_computed_tokens == request.num_tokens:
                request.num_output_tokens += 1
            if request.num_output_tokens == request.max_tokens:
                self.running.remove(request)
                self.free += self._held.pop(request.request_id)
                self.finished.append(request.request_id)
                if isinstance(self.policy, Follows):
                    self.policy.on_finished(request)

    def run(self, arrivals: Iterable[Asked]) -> None:
        """Play all arrivals (by arrival_time) to the end; AssertionError if nobody ends for as long as four times the
        longest request takes alone: time enough for some evictions.
        """
        todo = sorted(arrivals, key=lambda request: request.arrival_time)
        patience = 4 * max((r.max_tokens + r.num_prompt_tokens // self.budget + 1 for r in todo), default=1)
        ended, last = 0, 0
        for step in itertools.count():
            while todo and todo[0].arrival_time <= self.now:
                self.waiting.append(todo.pop(0))
            if not (todo or self.waiting or self.running):
                return
            if len(self.finished) > ended or not (self.waiting or self.running):
                ended, last = len(self.finished), step
            assert step - last <= patience, "no progress"
            self.step()
