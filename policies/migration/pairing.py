"""Who gives a request to whom: once per tick, from the freeness of all replicas to a list of moves.

Source: Llumnix (Sun et al., OSDI 2024), section 4: the least free replicas give to the freest. The reasons and their
order, the bounds and the cool-downs are ours. Each move is one request, which policies/migration/victims.py chooses.

| reason | source | destination beyond: serving, a slot, its queue not blocked |
|---|---|---|
| `drain` | a replica that is going away | the freest |
| `tier` | its queue is blocked, its highest waiting tier is above that of a runner | freer, and so after the move |
| `defragment` | its queue's head lacks blocks that the fleet has, scattered | freer, and so after the move |
| `balance` | least free | freer by `threshold`, and 0 <= gap after < gap before |
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from policies.migration.standing import Standing, sizes
from policies.registry import number, whole

Reason = Literal["drain", "tier", "defragment", "balance", "hand"]
FREEST = 3  # destinations that are looked at to see whether there is one
CROWDED = 0.1  # of the KV cache is free, or less
REASONS: tuple[Reason, ...] = ("drain", "tier", "defragment", "balance")  # most urgent first; hand: asked for by hand


@dataclass(frozen=True, slots=True)
class Move:
    """One request is to go from `source` to `destination`; `room[p]`: least and most KV blocks it may hold in tier p.

    `waiting_tier`: for `tier`, the tier that waits. `requests`: as many may go at once if all of them wait and hold
    together no more than one may (by hand: any so many).
    """

    source: str
    destination: str
    reason: Reason
    room: tuple[tuple[int, int], ...]
    waiting_tier: int | None = None
    requests: int = 1

    def admits(self, tier: int, blocks: int) -> bool:
        """Whether a request of this tier and size may make the move."""
        return tier < len(self.room) and self.room[tier][0] <= blocks <= self.room[tier][1]

    @property
    def budget(self) -> int:
        """KV blocks that it moves at most."""
        return max((most for least, most in self.room if least <= most), default=0)


@dataclass(frozen=True, slots=True)
class Pairing:
    """threshold: least gap in phi for `balance`. per_replica: moves at a time, each in and out. drain_out: out of a
    replica that drains. share: of the destination's free KV that moves may take. cooldown_s: seconds in which a replica
    that took (or is about to) does not give, and the reverse, for `defragment` and `balance`.
    """

    threshold: float = 0.15
    per_replica: int = 1
    drain_out: int = 4
    share: float = 0.3
    cooldown_s: float = 1.0

    def __post_init__(self) -> None:
        number("threshold", self.threshold, "It is a gap in normalised freeness; 0.15 is the default.", above=0)
        whole("per_replica", self.per_replica, "1 is the default.", low=1)
        whole("drain_out", self.drain_out, "4 is the default.", low=1)
        number("share", self.share, "It is a share of free KV blocks; 0.3 is the default.", above=0, high=1)
        number("cooldown_s", self.cooldown_s, "1 is the default; 0 has none.", low=0)

    def moves(
        self, fleet: Sequence[Standing], allowance: float = math.inf, barred: Collection[tuple[Reason, str, str]] = ()
    ) -> list[Move]:
        """The moves of one tick, most urgent first; ties by replica id.

        `barred`: (reason, source, destination) not to pair.
        `allowance`: KV blocks that may still be sent under the cap on bytes/s (the level of a token bucket, <= 0: no
        move). A move is not cut to it, as one request may be larger than any bucket: it may overdraw.
        """
        now = {standing.replica: standing for standing in fleet}
        sendable = {standing.replica: math.floor(self.share * standing.free_blocks) for standing in fleet}
        chosen: list[Move] = []
        for reason in REASONS:
            while allowance > 0 and (move := next(self._options(reason, now, sendable, barred), None)):
                chosen.append(move)
                allowance -= move.budget
                sendable[move.destination] -= move.budget
                for name, sign in ((move.source, 1), (move.destination, -1)):
                    now[name] = _expected(now[name], move, sign)
        return chosen

    def relieved(self, fleet: Sequence[Standing]) -> list[str]:
        """Crowded replicas off which a `tier` move could bring a runner if the highest tier waited there."""
        free = (replace(d, incoming=0) for d in fleet)  # moves under way end
        takers = sorted((d for d in free if self._takes("tier", d)), key=lambda d: (-d.phi, d.replica))[:FREEST]
        sendable = {d.replica: math.floor(self.share * d.free_blocks) for d in takers}
        found = []
        for source in fleet:
            crowded = source.running >= source.max_num_seqs or source.free_blocks < CROWDED * source.total_blocks
            if source.state == "serving" and crowded and any(source.running_by_tier[1:]):
                asked = replace(source, waiting_by_tier=(1,), head_blocks=source.total_blocks + 1, outgoing=0)
                now = {d.replica: d for d in takers if d.replica != source.replica} | {source.replica: asked}
                if next(self._options("tier", now, sendable, ()), None):
                    found.append(source.replica)
        return found

    def _options(
        self,
        reason: Reason,
        now: dict[str, Standing],
        sendable: dict[str, int],
        barred: Collection[tuple[Reason, str, str]],
    ) -> Iterator[Move]:
        sources = [s for s in now.values() if self._gives(reason, s, now)]
        destinations = [d for d in now.values() if self._takes(reason, d)]
        destinations.sort(key=lambda d: (-d.phi, d.replica))
        for source in sorted(sources, key=lambda s: (s.waiting_tier if reason == "tier" else 0, s.phi, s.replica)):
            for destination in destinations:
                gap = destination.phi - source.phi
                if gap <= 0 or (reason == "balance" and gap < self.threshold):
                    break  # so are those that follow
                if (reason, source.replica, destination.replica) in barred:
                    continue
                room = tuple(
                    self._room(reason, source, destination, tier, sendable[destination.replica], gap)
                    for tier in range(source.tiers)
                )
                if any(least <= most for least, most in room):
                    waiting = source.waiting_tier if reason == "tier" else None
                    seats = destination.max_num_seqs - destination.running - destination.incoming
                    several = max(1, min(seats, sum(source.waiting_by_tier))) if reason == "balance" else 1
                    yield Move(source.replica, destination.replica, reason, room, waiting, several)

    def _gives(self, reason: Reason, s: Standing, now: dict[str, Standing]) -> bool:
        if reason == "drain":
            return s.state == "draining" and s.outgoing < self.drain_out
        if s.state != "serving" or s.outgoing >= self.per_replica:
            return False
        if reason == "tier":
            return s.blocked
        if s.incoming or s.in_s < self.cooldown_s:
            return False
        if reason == "defragment":
            scattered = sum(other.free_blocks for other in now.values() if other.state == "serving")
            return s.free_blocks < s.head_blocks <= scattered
        return True

    def _takes(self, reason: Reason, d: Standing) -> bool:
        if d.state != "serving" or d.incoming >= self.per_replica or d.blocked:
            return False
        if d.running + d.incoming >= d.max_num_seqs:
            return False
        return reason in ("drain", "tier") or not (d.outgoing or d.out_s < self.cooldown_s)

    def _room(
        self, reason: Reason, source: Standing, destination: Standing, tier: int, sendable: int, gap: float
    ) -> tuple[int, int]:
        """Least and most blocks of a request of this tier; the least exceeds the most if none may go."""
        if not source.requests(tier) or (reason == "tier" and tier <= (source.waiting_tier or 0)):
            return 1, 0
        if reason == "drain":
            return 1, sendable
        return sizes(source, destination, tier, sendable, gap if reason == "balance" else math.inf)


def _expected(standing: Standing, move: Move, sign: int) -> Standing:
    """The standing once the largest request that may make the move has made it; sign 1: it left here, -1: it came."""
    tier = max(p for p, (least, most) in enumerate(move.room) if most == move.budget and least <= most)
    by_tier = [*standing.running_by_tier, *[0] * (tier + 1 - len(standing.running_by_tier))]
    by_tier[tier] = max(0, by_tier[tier] - sign)
    return replace(
        standing,
        left=standing.left + sign * move.budget,
        free_blocks=standing.free_blocks + sign * move.budget,
        running_by_tier=tuple(by_tier),
        incoming=standing.incoming + (sign < 0),
        outgoing=standing.outgoing + (sign > 0),
    )
