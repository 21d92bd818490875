"""How many replicas the fleet should have: by memory, compute and late first tokens, and windows against swinging.

Source: Llumnix (Sun et al., OSDI 2024), section 4: scale on the average freeness of the serving replicas, up below one
threshold, down above another; its open code has 10 and 60 blocks of 16 tokens per running request, here 160 and 960
tokens. The average is weighted by running requests:

    F(n) = (n * M - held - wanted by the heads of the queues) / max(r, 1)      iterations until the fleet's KV is full

M = KV tokens of a replica, r = running requests of the fleet. F(n) is also what a fleet of n replicas would have under
the same load: replicas that start are counted by n = target, and no step goes where F would call for the way back.

F is room in memory, which a fleet that cannot compute more has for a while. So there is utilization beside it:

    U(n) = (prompt tokens/s that arrive + prompt tokens that wait / 30 s) / (n * R)         1: all that n can compute

R = prompt tokens/s that a replica computes while it has more than a step can take, as replicas measured it; until one
had to, it is unknown and U is 0. Sources: target utilization is the rule of Kubernetes' HPA and of Serve (there by
requests), the queue by its time to drain that of Chiron (Patke et al., arXiv 2501.08090), "twice or four more" is HPA's
default. The other signals and the windows are ours.

| reason | when | target |
|---|---|---|
| `cold_start` | calls wait and no replica runs | 1, or as many as start already |
| `starting` | the replicas that would help start already, or nothing runs yet | as it is |
| `stale` | most replicas are silent, or some are and the rest would allow fewer | as it is |
| `idle` | nothing runs, nothing waits | least |
| `busy` | F < scale_up_steps | enough, at most twice as many or four more |
| `saturated` | U is nearer to 1 than to target_utilization | enough, at most twice as many or four more |
| `queue_wait` | a request waits for its first token for longer than queue_wait_s | one more, once nothing starts |
| `ttft` | more than late_share of the first tokens were later than promised | one more, once nothing starts |
| `free` | F > scale_down_steps and fewer are enough | enough, at least half as many |
| `steady` | none of them | as it is |

Enough: F is at the geometric mean of both thresholds or above, a fifth of the sequence slots stays free, and U is at
target_utilization or below. In rising order of urgency read from the bottom. What comes out is between the least and
the most replicas, never NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from policies.freeness import freeness_of
from policies.registry import PolicyError, number

Reason = Literal["cold_start", "starting", "stale", "idle", "busy", "saturated", "queue_wait", "ttft", "free", "steady"]

FILL = 0.8  # of the fleet's sequence slots may be taken after a step
GROWTH, MORE = 2, 4  # a step up at most doubles the fleet or adds so many; a step down at most halves it
LARGEST = 1e12  # figure; beyond it, and below 0, the replica does not know what it says
DRAIN_S = 30.0  # a queue is to be gone in so long, whatever comes meanwhile
FEW = 5  # first tokens that say nothing of a share yet


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
class Decision:
    """Replicas wanted, why, and of the fleet with its present target F (tokens per request; inf: idle) and U."""

    replicas: int
    reason: Reason
    freeness: float = math.inf
    utilization: float = 0.0


@dataclass(frozen=True, slots=True)
class FreenessScaling:
    """scale_up_steps, scale_down_steps: thresholds of F in iterations. queue_wait_s: seconds. late_share: of the first
    tokens. target_utilization: of compute, after a step. A replica that told nothing for `stale_s` seconds is silent.
    """

    scale_up_steps: float = 160.0
    scale_down_steps: float = 960.0
    queue_wait_s: float = 5.0
    late_share: float = 0.1
    target_utilization: float = 0.5
    stale_s: float = 10.0

    def __post_init__(self) -> None:
        low = number("scale_up_steps", self.scale_up_steps, "160 is the default.", above=0, high=LARGEST)
        high = number("scale_down_steps", self.scale_down_steps, "960 is the default.", above=0, high=LARGEST)
        number("queue_wait_s", self.queue_wait_s, "5 is the default.", above=0)
        number("late_share", self.late_share, "It is a share of first tokens; 0.1 is the default.", above=0, high=1)
        number("target_utilization", self.target_utilization, "0.5 is the default.", above=0, high=0.95)
        number("stale_s", self.stale_s, "10 is the default.", above=0)
        if high <= low:
            field = "scale_down_steps"
            raise PolicyError(f"{field} must be > scale_up_steps ({low:g}), got {high:g}. 960 is the default.", field)

    def decide(self, fleet: Fleet) -> Decision:
        """Replicas wanted now; the windows are applied to it afterwards."""
        decision = self._decide(fleet)
        bounded = min(max(decision.replicas, fleet.least), fleet.most)
        return replace(decision, replicas=bounded)

    def _decide(self, fleet: Fleet) -> Decision:
        target = fleet.target
        queued = fleet.queued if 0 < fleet.queued <= LARGEST else 0.0
        if not fleet.loads:
            if queued:
                return Decision(max(target, 1), "cold_start")
            return Decision(target, "starting" if target else "idle")
        told = [load for load in fleet.loads if self._tells(load)]
        silent = sum(not self._tells(load) and not self._begins(load) for load in fleet.loads)
        if not told or silent > len(told):
            return Decision(target, "stale" if silent else "starting")
        demand = _Demand.of(told, (len(told) + silent) / len(told), queued)
        if demand.requests == 0:
            return Decision(target, "stale") if silent else Decision(0, "idle")
        starting, drained = target > len(told) + silent, sum(load.draining for load in told)
        free, used = demand.freeness(target - drained), demand.utilization(target - drained)
        enough = self._enough(demand) + drained
        wanted, reason = self._wanted(told, target, enough, starting, free, used)
        if wanted < target and silent:
            wanted, reason = target, "stale"
        return Decision(wanted, reason, free, used)

    def _wanted(
        self, told: Sequence[Load], target: int, enough: int, starting: bool, free: float, used: float
    ) -> tuple[int, Reason]:
        more = min(enough, max(GROWTH * target, target + MORE))
        if free < self.scale_up_steps:
            return more, "busy"
        if used > (1 + self.target_utilization) / 2:
            return more, "saturated"
        tight = free <= self.scale_down_steps or used > self.target_utilization
        if (pressure := self._pressure(told, tight)) is not None:
            return (target, "starting") if starting else (target + 1, pressure)
        if free > self.scale_down_steps and (fewer := max(enough, math.ceil(target / GROWTH))) < target:
            return fewer, "free"
        return target, "steady"

    def _enough(self, demand: _Demand) -> int:
        steps = math.sqrt(self.scale_up_steps * self.scale_down_steps)
        return max(demand.replicas(steps), demand.computing(self.target_utilization))

    def _pressure(self, told: Sequence[Load], tight: bool) -> Reason | None:
        if any(load.waiting > 0 and load.wait_s > self.queue_wait_s for load in told):
            return "queue_wait"
        first, late = sum(load.first_tokens for load in told), sum(load.late for load in told)
        # On a fleet with room to spare first tokens are late for what another replica does not change: long prompts.
        if first >= FEW and late > self.late_share * first and tight:
            return "ttft"
        return None

    def _tells(self, load: Load) -> bool:
        return 0 <= load.age_s <= self.stale_s and load.total_blocks >= 1 and load.valid

    def _begins(self, load: Load) -> bool:
        return load.total_blocks == 0 and load.age_s <= self.stale_s


@dataclass(frozen=True, slots=True)
class _Demand:
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
    def of(cls, told: Sequence[Load], scale: float, queued: float) -> _Demand:
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


@dataclass(slots=True)
class Windows:
    """A target follows what is wanted once it was wanted without a break for `up_s`, or `down_s`, seconds.

    These are Serve's `upscale_delay_s`, `downscale_delay_s` and `downscale_to_zero_delay_s` (None: as `down_s`), which
    Serve applies itself: a fleet of another kind (the simulator's) has the same rule here. So a reversal upwards comes
    at least `up_s` after the last step down, one downwards at least `down_s` after the last step up.
    """

    up_s: float
    down_s: float
    to_zero_s: float | None = None
    _way: int = 0
    _since: float = 0.0

    def apply(self, wanted: int, target: int, running: int, now: float) -> int:
        """The target from now on; `running`: replicas that run. From none it rises at once."""
        if running == 0 and wanted > 0:
            return wanted
        way = (wanted > target) - (wanted < target)
        if way != self._way:
            self._way, self._since = way, now
        if way == 0:
            return target
        to_zero = self.to_zero_s if self.to_zero_s is not None else self.down_s
        patience = self.up_s if way > 0 else to_zero if target == 1 else self.down_s
        if now - self._since + 1e-6 < patience:  # as Serve: differences of large times are a little off
            return target
        self._way = 0
        return wanted if target == 1 else max(wanted, 1)
