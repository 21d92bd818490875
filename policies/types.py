"""What decisions are made from: frozen snapshots and the attributes a request must have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Request(Protocol):
    """A request of one engine: the attributes of vLLM's v1 Request that policies may read.

    `arrival_time` is wall-clock seconds, `num_tokens` includes the generated ones, lengths are tokens.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def arrival_time(self) -> float: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """One replica at the start of a scheduler step.

    `now` is wall-clock seconds; `num_*` count requests; `*_blocks` are KV blocks of `block_size` tokens each;
    `max_model_len` and `token_budget` (of this step) are tokens.
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

    def blocks(self, tokens: int) -> int:
        """KV blocks that `tokens` tokens occupy: the last one may be partly filled."""
        return -(-tokens // self.block_size)


class EmptyFleetError(LookupError):
    """No replica can take a request now: wait until one joins or is serving again."""
