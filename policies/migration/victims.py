"""Which request of a source makes a move.

Source: Llumnix (Sun et al., OSDI 2024), section 4: low class first, short sequences first; here for K tiers, and with
waiting requests, which move without KV. (Its open code chooses by length alone.)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from policies.migration.pairing import Move
from policies.registry import number, whole


@dataclass(frozen=True, slots=True)
class Candidate:
    """One request of the source. `blocks`: KV blocks that it holds, or, waiting, that it will need at once.

    `place`: `head` of the queue, `waiting` behind it, `prefill`: running with prompt tokens left, `decode`.
    `tokens_left` until max_tokens; `moved_s`: seconds since its last move began, inf if there was none; `refused`: why
    it cannot be carried (policies/migration/refusals.py), None if it can.
    """

    request_id: str
    tier: int
    blocks: int
    place: Literal["head", "waiting", "prefill", "decode"]
    tokens_left: int
    moved_s: float = math.inf
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Victims:
    """cooldown_s: seconds in which a request moves once at most, whatever it is that would be gained.

    min_remaining: tokens; a running request that ends sooner is gone before its move has paid (a move of 4,096 tokens
    takes about 15 steps).
    """

    cooldown_s: float = 5.0
    min_remaining: int = 32

    def __post_init__(self) -> None:
        number("cooldown_s", self.cooldown_s, "5 is the default; 0 lets a request move again at once.", low=0)
        whole("min_remaining", self.min_remaining, "32 is the default; 0 moves requests up to their end.", low=0)

    def choose(self, move: Move, candidates: Sequence[Candidate], busy: Collection[str] = ()) -> Candidate | None:
        """The request that makes the move, None if none can; `busy` ones are under way already.

        Lower tier first, then waiting before running, fewest blocks, request id. For `tier` only runners of tiers below
        the one that waits, as a waiting request holds nothing; for `defragment` of the queue only its head. A replica
        that drains loses everything, and a move by hand is wanted: there neither cool-down nor `min_remaining` holds.
        """
        able = [c for c in candidates if c.request_id not in busy and self._may(move, c)]
        return min(able, key=lambda c: (-c.tier, c.place == "decode", c.blocks, c.request_id), default=None)

    def choose_all(self, move: Move, candidates: Sequence[Candidate], busy: Collection[str] = ()) -> list[Candidate]:
        """All requests that go at once: one, or up to `move.requests` of the queue, of one tier and within its room.

        A waiting request holds no KV: where a queue has built up, moving them one at a time would not catch up with it.
        """
        chosen: list[Candidate] = []
        while len(chosen) < move.requests:
            victim = self.choose(move, candidates, {*busy, *(c.request_id for c in chosen)})
            if victim is None:
                break
            if chosen and move.reason != "hand":
                alike = victim.tier == chosen[0].tier and "decode" not in (victim.place, chosen[0].place)
                if not alike or sum(c.blocks for c in chosen) + victim.blocks > move.room[victim.tier][1]:
                    break
            chosen.append(victim)
        return chosen

    def _may(self, move: Move, candidate: Candidate) -> bool:
        if candidate.refused is not None or candidate.place == "prefill":
            return False
        if not move.admits(candidate.tier, candidate.blocks):
            return False
        if move.reason in ("drain", "hand"):
            return True
        if candidate.moved_s < self.cooldown_s:
            return False
        if candidate.place == "decode" and candidate.tokens_left < self.min_remaining:
            return False
        if move.reason == "tier":
            return candidate.place == "decode" and move.waiting_tier is not None and candidate.tier > move.waiting_tier
        return move.reason != "defragment" or candidate.place != "waiting"
