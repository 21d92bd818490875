"""One replica as the pairing of moves sees it, and the sizes of a request whose move nobody would want to undo.

Source: freeness as in policies/freeness.py; the rule on the gap, 0 <= gap after < gap before, is that of the `balanced`
pairing of Llumnix's open code (which fails there, as its loads cannot be subtracted).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from policies.freeness import Usage, virtual_usage
from policies.tiers import SINGLE, Tiers


@dataclass(frozen=True, slots=True)
class Standing:
    """`left` = M - V_sum in KV blocks, may be negative (means nothing on a draining replica); tier 0 is the highest.

    `headroom[p]`: blocks kept free while tier p is present. `head_blocks`: wanted by the head of the queue, 0 if none
    waits. `incoming` and `outgoing` moves are under way; `in_s` and `out_s` are the seconds since the last one began.
    """

    replica: str
    left: float
    free_blocks: int
    total_blocks: int
    max_num_seqs: int
    running_by_tier: tuple[int, ...]
    waiting_by_tier: tuple[int, ...] = ()
    head_blocks: int = 0
    headroom: tuple[float, ...] = (0.0,)
    state: str = "serving"
    incoming: int = 0
    outgoing: int = 0
    in_s: float = math.inf
    out_s: float = math.inf

    @property
    def running(self) -> int:
        """Running requests."""
        return sum(self.running_by_tier)

    @property
    def waiting_tier(self) -> int | None:
        """The highest tier that waits, None if nobody does."""
        return next((p for p, requests in enumerate(self.waiting_by_tier) if requests), None)

    @property
    def blocked(self) -> bool:
        """Whether the head of the queue waits for KV blocks or for a sequence slot."""
        full = self.head_blocks > self.free_blocks or self.running >= self.max_num_seqs
        return self.waiting_tier is not None and full

    @property
    def phi(self) -> float:
        """Normalised freeness, finite on an idle replica (a batch of one), -inf on one that drains."""
        return self.after(0, 0) if self.state == "serving" else -math.inf

    def after(self, blocks: float, requests: int) -> float:
        """phi with so many blocks more left and so many running requests more."""
        return (self.left + blocks) * self.max_num_seqs / self.total_blocks / max(self.running + requests, 1)

    def requests(self, tier: int) -> int:
        """Requests of a tier that run or wait here."""
        return sum(by_tier[tier] for by_tier in (self.running_by_tier, self.waiting_by_tier) if tier < len(by_tier))

    def kept(self, tier: int) -> float:
        """H_p in blocks."""
        return self.headroom[min(tier, len(self.headroom) - 1)]

    @property
    def tiers(self) -> int:
        """Tiers of which there may be a request here, counted from 0."""
        return max(len(self.running_by_tier), len(self.waiting_by_tier))


def standing(replica: str, usage: Usage, tiers: Tiers = SINGLE) -> Standing:
    """What a load report says of a replica; the coordinator adds the moves under way (`dataclasses.replace`)."""
    used = virtual_usage(usage, tiers)
    return Standing(
        replica=replica,
        left=usage.total_blocks - used if math.isfinite(used) else 0.0,
        free_blocks=usage.free_blocks,
        total_blocks=usage.total_blocks,
        max_num_seqs=usage.max_num_seqs,
        running_by_tier=tuple(usage.running_by_tier) or (usage.running,),
        waiting_by_tier=tuple(usage.waiting_by_tier) or (usage.waiting,),
        head_blocks=usage.head_blocks,
        headroom=tuple(usage.total_blocks * share for share in tiers.headroom),
        state=usage.state,
    )


def gap_after(source: Standing, destination: Standing, tier: int, blocks: int) -> float:
    """phi of the destination less that of the source, once a running request of so many blocks has moved.

    Headroom of its tier is kept free where the tier is new and no more where it was the last.
    """
    back = source.kept(tier) if source.requests(tier) == 1 else 0.0
    new = 0.0 if destination.requests(tier) else destination.kept(tier)
    return destination.after(-blocks - new, 1) - source.after(blocks + back, -1)


def sizes(source: Standing, destination: Standing, tier: int, most: int, below: float) -> tuple[int, int]:
    """Least and greatest KV blocks of a running request of `tier` whose move leaves 0 <= gap < `below`; at most `most`.

    The destination keeps blocks left. The least exceeds the greatest if there is none. The gap falls evenly with them.
    """
    first = gap_after(source, destination, tier, 0)
    fall = first - gap_after(source, destination, tier, 1)
    new = 0.0 if destination.requests(tier) else destination.kept(tier)
    greatest = min(most, math.floor(first / fall), math.floor(destination.left - new))
    least = max(1, math.floor((first - below) / fall) + 1) if below < math.inf else 1
    while greatest >= least and gap_after(source, destination, tier, greatest) < 0:  # rounding
        greatest -= 1
    while greatest >= least and not gap_after(source, destination, tier, least) < below:
        least += 1
    return least, greatest
