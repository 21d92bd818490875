"""What decisions are made from: frozen snapshots and the attributes a request must have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Hints:
    """What is known of a request beyond its own fields; lengths in generated tokens, None where nobody knows.

    `output_tokens` is the true length (an oracle: evaluation only), `predicted_tokens` a learned predictor's guess,
    `ttft_slo_s` and `tpot_slo_s` the seconds that the request's tier promises (to the first token, per further one).
    """

    output_tokens: int | None = None
    predicted_tokens: float | None = None
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None


class Request(Protocol):
    """A request of one engine: the attributes of vLLM's v1 Request that policies may read, and our `hints`.

    `arrival_time` is wall-clock seconds, `num_tokens` includes the generated ones, `num_computed_tokens` are those in
    the KV cache, lengths are tokens. `priority` is the tier: 0 is the highest.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def arrival_time(self) -> float: ...
    @property
    def priority(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def hints(self) -> Hints: ...


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """One replica at the start of a scheduler step.

    `now` is wall-clock seconds; `num_*` count requests; `*_blocks` are KV blocks of `block_size` tokens each;
    `max_model_len` and `token_budget` (of this step) are tokens. `grace_s`: seconds from its arrival that a request of
    a higher tier waits before runners are sent back to the queue for it, as they may be moved away instead.
    """

    now: float
    num_waiting: int
    num_running: int
    total_blocks: int
    free_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    token_budget: int
    grace_s: float = 0.0

    def blocks(self, tokens: int) -> int:
        """KV blocks that `tokens` tokens occupy: the last one may be partly filled."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class Call:
    """A request on its way to a replica: prompt length in tokens, tier (0 is the highest), monotonic seconds.

    `session` is a stable number of the client's session, or of the prompt's first tokens; None: no affinity.
    """

    prompt_tokens: int
    tier: int = 0
    now: float = 0.0
    session: int | None = None


class EmptyFleetError(LookupError):
    """No replica can take a request now: wait until one joins or is serving again."""
