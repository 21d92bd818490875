"""How many replicas the fleet should have: by memory, compute and late first tokens.

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
the most replicas, never NaN. `Trough` remembers what was enough while a step down waits for its window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from policies.autoscaling.decision import Decision, Reason
from policies.autoscaling.demand import LARGEST, Demand, Fleet, Load
from policies.registry import PolicyError, number

GROWTH, MORE = 2, 4  # a step up at most doubles the fleet or adds so many; a step down at most halves it
FEW = 5  # first tokens that say nothing of a share yet


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
        demand = Demand.of(told, (len(told) + silent) / len(told), queued)
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

    def _enough(self, demand: Demand) -> int:
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
