"""SAL: send a request where it can start soonest, counted in iterations of the engine.

Source: Kossmann et al., "Is the GPU half-empty or half-full? Practical scheduling techniques for LLMs".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies.balancing.affinity import stay
from policies.balancing.ties import FEW, argmin
from policies.fleet import FleetTable
from policies.registry import number
from policies.types import Call


class SAL:
    """Smallest load(s, r) = max(beta * (memory(r) - free(s)), queued(s, r) / max_tokens_per_batch), ties at random.

    memory(r) is the request's prompt and free(s) the replica's free KV cache, both in tokens: until that many more
    are free, requests that decode must end. queued(s, r) counts prompt tokens not computed yet, of requests waiting
    and partly prefilled on s, and r's own. Both terms are iterations until r can start.

    beta = (mean_in + mean_out) / mean_out turns missing memory into iterations; it follows the requests that end by
    exponentially weighted means, and the prior fades at the same pace.

    beta: > 0 pins it; None (default) follows the traffic.
    prior_beta: >= 1, used until requests have ended; 6.47 is SW-Chat (Azure 2023 conversations), 74.4 SW-Code.
    half_life: requests after which an observation counts half, > 0, <= 1e6.
    affinity_tokens: >= 0; a session stays on its replica if that is at most so many prompt tokens behind the best.
    """

    name = "sal"

    def __init__(
        self,
        *,
        beta: float | None = None,
        prior_beta: float = 6.47,
        half_life: float = 512.0,
        affinity_tokens: float = 0.0,
    ) -> None:
        remedy = "Leave it out to follow the traffic; chat is near 6.5, code completion near 74."
        self._pinned = None if beta is None else number("beta", beta, remedy, above=0)
        self._prior = number("prior_beta", prior_beta, "It is (input + output) / output tokens; chat: 6.47.", low=1)
        remedy = "It counts requests; 512 is the default."
        self._decay = 0.5 ** (1 / number("half_life", half_life, remedy, above=0, high=1e6))
        remedy = "0 switches it off; a few thousand favour a prefix cache."
        self._affinity_tokens = number("affinity_tokens", affinity_tokens, remedy, low=0)
        self._prior_weight = 1.0
        self._mean_in = self._mean_out = 0.0  # weighted sums: their common divisor cancels in beta
        self.beta = self._prior if self._pinned is None else self._pinned
        self._prompt, self._beta = np.empty(()), np.empty(())  # 0-d: numpy takes them faster than Python numbers
        self._memory_term = self._queue_term = np.empty(0)

    def choose(self, fleet: FleetTable, call: Call, rng: np.random.Generator) -> int:
        few = len(fleet.ids) <= FEW
        loads = self.few_loads(fleet, call.prompt_tokens) if few else self.loads(fleet, call.prompt_tokens)
        best = argmin(loads, rng)
        if self._affinity_tokens and call.session is not None:
            return stay(loads, best, fleet, call.session, self._affinity_tokens)
        return best

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        """Follow a request that ended; one without output says nothing about output lengths and is left out."""
        if self._pinned is not None or output_tokens < 1:
            return
        keep = self._decay
        self._prior_weight *= keep
        self._mean_in = keep * self._mean_in + (1 - keep) * prompt_tokens
        self._mean_out = keep * self._mean_out + (1 - keep) * output_tokens
        seen = 1 + self._mean_in / self._mean_out
        self.beta = self._prior_weight * self._prior + (1 - self._prior_weight) * seen

    def few_loads(self, fleet: FleetTable, prompt_tokens: int) -> list[float]:
        """Load of each column, iterations: for up to FEW columns."""
        beta, loads = self.beta, []
        columns = fleet.free_tokens.tolist(), fleet.queued_tokens.tolist(), fleet.per_batch.tolist()
        for free, queued, per_batch in zip(*columns, strict=True):
            memory_term, queue_term = beta * (prompt_tokens - free), (queued + prompt_tokens) * per_batch
            loads.append(memory_term if memory_term > queue_term else queue_term)
        return loads

    def loads(self, fleet: FleetTable, prompt_tokens: int) -> NDArray[np.float64]:
        """The same for many columns, in an array that the next call overwrites."""
        if len(self._queue_term) != len(fleet.ids):
            self._memory_term, self._queue_term = np.empty(len(fleet.ids)), np.empty(len(fleet.ids))
        prompt, beta, memory_term, queue_term = self._prompt, self._beta, self._memory_term, self._queue_term
        prompt[()], beta[()] = prompt_tokens, self.beta
        np.subtract(prompt, fleet.free_tokens, memory_term)
        np.multiply(beta, memory_term, memory_term)
        np.add(fleet.queued_tokens, prompt, queue_term)
        np.multiply(queue_term, fleet.per_batch, queue_term)
        return np.maximum(memory_term, queue_term, queue_term)
