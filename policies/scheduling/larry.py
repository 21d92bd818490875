"""LARRY: when the queue is long, let small requests pass; when it is short, be fair.

Source: Kossmann et al., "Is the GPU half-empty or half-full? Practical scheduling techniques for LLMs".
"""

from __future__ import annotations

import math
from collections.abc import Callable

from policies.registry import PolicyError, choice, flag, number
from policies.types import Request, SchedulerContext

BLOCK_TOKENS = 16  # one memory unit of `blocks`: vLLM's KV block on GPUs
MEMORY_UNITS = ("blocks", "tokens", "mib", "fraction")


class Larry:
    """Highest score first, score(r) = alpha * wait(r) - Q * memory(r); running requests are never preempted by choice.

    wait is in seconds, Q the number of waiting requests, memory what r's tokens (generated ones included, they must be
    recomputed after a preemption) occupy in the KV cache. Between two requests `now` cancels, so the order is that of
    alpha * arrival + Q * memory, ascending, and changes only with Q.

    A request that is m memory units smaller is worth Q * m / alpha seconds of waiting. That is also the bound on
    starvation: r is overtaken only by requests that arrive less than Q * (memory(r) - memory(s)) / alpha after it.

    alpha: > 0. In `blocks`, 1 is close to smallest-first under load, 1000 close to FCFS.
    memory_unit: `blocks` (whole KV blocks, counted in blocks of 16 tokens so that alpha means the same whatever the
        engine's block size), `tokens`, `mib` (needs `kv_bytes_per_token`), `fraction` (of the replica's KV cache).
    preempted_first: resume preempted requests before all others, as vLLM does; the score orders them among themselves.
    """

    name = "larry"
    reorders = True

    def __init__(
        self,
        *,
        alpha: float = 1.0,
        memory_unit: str = "blocks",
        kv_bytes_per_token: float | None = None,
        preempted_first: bool = True,
    ) -> None:
        self.alpha = number("alpha", alpha, "1 is the default; larger values come closer to FCFS.", above=0)
        self.memory_unit = choice("memory_unit", memory_unit, MEMORY_UNITS, "`blocks` is the default.")
        self.preempted_first = flag("preempted_first", preempted_first, "true is the default, as vLLM does it.")
        self.memory = self._memory(kv_bytes_per_token)

    def waiting_key(self, request: Request, ctx: SchedulerContext) -> tuple[float, float, float, str]:
        arrival = request.arrival_time
        rank = self.alpha * arrival + ctx.num_waiting * self.memory(request.num_tokens, ctx)
        first = self.preempted_first and request.num_preemptions > 0
        return -math.inf if first else rank, rank, arrival, request.request_id

    def order_epoch(self, ctx: SchedulerContext) -> int:
        return ctx.num_waiting

    def on_step(self, ctx: SchedulerContext) -> None:
        pass

    def _memory(self, kv_bytes_per_token: float | None) -> Callable[[int, SchedulerContext], float]:
        """memory(tokens, ctx) in the chosen unit, chosen once: it is called for each waiting request."""
        if self.memory_unit != "mib":
            if kv_bytes_per_token is not None:
                raise PolicyError(
                    f"kv_bytes_per_token has no effect with memory_unit `{self.memory_unit}`. Remove it, or set"
                    " memory_unit to `mib`.",
                    "kv_bytes_per_token",
                )
            return {"blocks": _blocks, "tokens": _tokens, "fraction": _fraction}[self.memory_unit]
        if kv_bytes_per_token is None:
            raise PolicyError(
                "kv_bytes_per_token must be set when memory_unit is `mib`: only the model knows it. Set it to"
                " 2 * layers * KV heads * head size * bytes per number (all GPUs of a replica together), or choose"
                " `blocks`, which needs nothing.",
                "kv_bytes_per_token",
            )
        remedy = "It is 2 * layers * KV heads * head size * bytes per number."
        per_token = number("kv_bytes_per_token", kv_bytes_per_token, remedy, above=0) / 2**20
        return lambda tokens, ctx: -(-tokens // ctx.block_size) * ctx.block_size * per_token


def _blocks(tokens: int, ctx: SchedulerContext) -> float:
    return -(-tokens // ctx.block_size) * ctx.block_size / BLOCK_TOKENS


def _tokens(tokens: int, ctx: SchedulerContext) -> float:
    return tokens


def _fraction(tokens: int, ctx: SchedulerContext) -> float:
    return -(-tokens // ctx.block_size) / ctx.total_blocks
