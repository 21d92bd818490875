"""What the replicas of a fleet say of their load, and what all of it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from policies.freeness import freeness_of

LARGEST = 1e12  # figure; beyond it, and below 0, the replica does not know what it says
FILL = 0.8  # of the fleet's sequence slots may be taken after a step
DRAIN_S = 30.0  # a queue is to be gone in so long, whatever comes meanwhile


@dataclass(frozen=True, slots=True)
class Load:
    """What one running replica told last; `age_s` is how long ago, `total_blocks` 0 means that it told nothing yet.

    `queued_tokens`: prompt tokens not computed yet. `head_blocks`: KV blocks wanted by the head of its queue. `wait_s`:
    how long the oldest waiting request has had no token. `late` of the last `first_tokens` were later than promised.
    `prompt_rate`: prompt tokens/s that arrived lately. `due_tokens`: prompt tokens of requests without a first token.
    `full_rate`: prompt tokens/s that it computes when it has more than a step can take, 0: unknown.
    """

    age_s: float
    free_blocks: float = 0.0
    total_blocks: float = 0.0
    block_size: float = 1.0
    running: float = 0.0
    waiting: float = 0.0
    queued_tokens: float = 0.0
    head_blocks: float = 0.0
    max_num_seqs: float = 1.0
    wait_s: float = 0.0
    first_tokens: float = 0.0
    late: float = 0.0
    prompt_rate: float = 0.0
    due_tokens: float = 0.0
    full_rate: float = 0.0
    draining: bool = False

    @property
    def tokens(self) -> float:
        """KV cache of the replica in tokens."""
        return self.total_blocks * self.block_size

    @property
    def valid(self) -> bool:
        """Whether all figures are numbers that a replica can have."""
        kv = (self.free_blocks, self.total_blocks, self.block_size, self.head_blocks, self.queued_tokens)
        requests = (self.running, self.waiting, self.max_num_seqs, self.wait_s, self.first_tokens, self.late)
        prompts = (self.prompt_rate, self.due_tokens, self.full_rate)
        figures = (*kv, *requests, *prompts)
        return all(0 <= x <= LARGEST for x in figures) and self.block_size >= 1 and self.max_num_seqs >= 1


@dataclass(frozen=True, slots=True)
class Fleet:
    """The fleet at one moment: a Load of each replica that runs, and the number that the autoscaler wants now.

    `queued`: calls that wait outside for a replica that can take them.
    """

    loads: Sequence[Load]
    target: int
    least: int
    most: int
    queued: float = 0.0


@dataclass(frozen=True, slots=True)
class Demand:
    """What the fleet's requests take, in tokens and requests, and what one replica has."""

    held: float
    wanted: float  # by the heads of the queues
    queued: float  # prompt tokens that still have to be computed, part of them wanted as well
    running: float
    requests: float
    size: float
    slots: float
    prompt_rate: float  # tokens/s that arrive
    due: float  # prompt tokens that wait for their first token
    full_rate: float  # of one replica, 0: unknown

    @classmethod
    def of(cls, told: Sequence[Load], scale: float, queued: float) -> Demand:
        """`scale`: all replicas that bear load, for each of those that tell; `queued` calls wait outside."""
        running = scale * sum(load.running for load in told)
        return cls(
            held=scale * sum(load.tokens - min(load.free_blocks, load.total_blocks) * load.block_size for load in told),
            wanted=scale * sum(load.head_blocks * load.block_size for load in told),
            queued=scale * sum(load.queued_tokens for load in told),
            running=running,
            requests=running + scale * sum(load.waiting for load in told) + queued,
            size=sum(load.tokens for load in told) / len(told),
            slots=sum(load.max_num_seqs for load in told) / len(told),
            prompt_rate=scale * sum(load.prompt_rate for load in told),
            due=scale * sum(load.due_tokens for load in told),
            full_rate=_mean([load.full_rate for load in told if load.full_rate >= 1]),
        )

    def utilization(self, replicas: int) -> float:
        """Share of what so many replicas compute that arrives, or has to, for the queue to be gone in DRAIN_S."""
        if not self.full_rate:
            return 0.0
        return (self.prompt_rate + self.due / DRAIN_S) / (max(replicas, 1) * self.full_rate)

    def computing(self, utilization: float) -> int:
        """The fewest replicas that are utilised no more than that."""
        return max(1, math.ceil(min(self.utilization(1) / utilization, LARGEST)))

    def freeness(self, replicas: int) -> float:
        """F of so many replicas under this demand."""
        return freeness_of(replicas * self.size - self.held, self.wanted, 0.0, self.running, self.requests)

    def replicas(self, steps: float) -> int:
        """The fewest that have F >= steps, and slots to spare, once all that waits runs."""
        tokens = steps * max(self.requests, 1.0) + self.held + max(self.wanted, self.queued)
        return max(1, math.ceil(tokens / self.size), math.ceil(self.requests / (FILL * self.slots)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
