"""Tiered SAL: SAL among the replicas that keep enough memory free for the tiers above the request's.

Sources: SAL as in policies/balancing/sal.py; headroom as in policies/freeness.py. Their combination is ours.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from policies.balancing.affinity import stay
from policies.balancing.llumnix import Llumnix
from policies.balancing.sal import SAL
from policies.balancing.ties import FEW, Loads, argmin
from policies.fleet import FleetTable
from policies.registry import number
from policies.tiers import SINGLE, Tiers
from policies.types import Call

_NEVER = np.asarray(math.inf)


class TieredSAL:
    """Smallest SAL load among the replicas eligible for tier p; the freest (Llumnix's F) if none is eligible.

    Eligible: A - sum of H_i over the tiers i < p that are present or expected >= need(r), with A the free KV cache,
    H_i the headroom of tier i and need(r) the prompt in whole blocks, all in tokens. Tier i is present where one of
    its requests runs or waits. It is expected, everywhere, for `expect_s` seconds after this router saw a call of it:
    without that a burst of a lower tier would fill the replicas between two calls of a higher one.

    expect_s: >= 0; 0 keeps memory free only where the tier is present.
    beta, prior_beta, half_life, affinity_tokens: as in SAL; only an eligible replica keeps a session.
    """

    name = "tiered_sal"

    def __init__(
        self,
        *,
        beta: float | None = None,
        prior_beta: float = 6.47,
        half_life: float = 512.0,
        affinity_tokens: float = 0.0,
        expect_s: float = 60.0,
    ) -> None:
        self._sal = SAL(beta=beta, prior_beta=prior_beta, half_life=half_life, affinity_tokens=affinity_tokens)
        self._affinity_tokens = affinity_tokens  # checked by SAL
        remedy = "It is how long headroom outlives the last call of its tier; 60 s is the default."
        self._expect_s = number("expect_s", expect_s, remedy, low=0)
        self._freest = Llumnix()
        self._share, self._need = np.empty(()), np.empty(())  # 0-d: numpy takes them faster than Python numbers
        self._room, self._full = np.empty(0), np.empty(0, dtype=bool)
        self.use_tiers(SINGLE)

    def use_tiers(self, tiers: Tiers) -> None:
        """Keep the headroom of these tiers free; nothing is expected yet."""
        self._tiers = tiers
        self._freest.use_tiers(tiers)
        self._seen, self._expires = [-math.inf] * len(tiers), -math.inf
        self._kept: list[tuple[float, list[tuple[int, float]]]] = []

    @property
    def beta(self) -> float:
        """SAL's beta as learnt or pinned."""
        return self._sal.beta

    def choose(self, fleet: FleetTable, call: Call, rng: np.random.Generator) -> int:
        tier, now = self._tiers.clamp(call.tier), call.now
        if now > self._expires or now - self._seen[tier] > self._expect_s:
            self._expect(tier, now)
        self._seen[tier] = now
        need = -(-call.prompt_tokens // fleet.block_size) * fleet.block_size
        loads: Loads
        if len(fleet.ids) <= FEW:
            loads = self._few_eligible(self._sal.few_loads(fleet, call.prompt_tokens), fleet, tier, need)
        else:
            loads = self._eligible(self._sal.loads(fleet, call.prompt_tokens), fleet, tier, need)
        best = argmin(loads, rng)
        if loads[best] == math.inf:
            return self._freest.choose(fleet, call, rng)
        if self._affinity_tokens and call.session is not None:
            return stay(loads, best, fleet, call.session, self._affinity_tokens)
        return best

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        """Follow a request that ended, as SAL does."""
        self._sal.observe(prompt_tokens, output_tokens)

    def _few_eligible(self, loads: list[float], fleet: FleetTable, tier: int, need: float) -> list[float]:
        """The loads, infinite where the request may not go: for up to FEW columns."""
        share, rows = self._kept[tier]
        room: list[float] = fleet.free_tokens.tolist()
        if share:
            room = [free - share * total for free, total in zip(room, fleet.total_tokens.tolist(), strict=True)]
        for p, part in rows:
            room = [free - part * tokens for free, tokens in zip(room, fleet.tier_tokens[p].tolist(), strict=True)]
        if room and min(room) >= need:
            return loads
        return [load if free >= need else math.inf for load, free in zip(loads, room, strict=True)]

    def _eligible(self, loads: NDArray[np.float64], fleet: FleetTable, tier: int, need: float) -> NDArray[np.float64]:
        """The same for many columns, in place."""
        if len(self._room) != len(loads):
            self._room, self._full = np.empty(len(loads)), np.empty(len(loads), dtype=bool)
        (share, rows), room = self._kept[tier], fleet.free_tokens
        self._share[()], self._need[()] = share, need
        if share:
            np.multiply(fleet.total_tokens, self._share, self._room)
            room = np.subtract(room, self._room, self._room)
        for p, part in rows:
            room = np.subtract(room, part * fleet.tier_tokens[p], self._room)
        np.putmask(loads, np.less(room, self._need, self._full), _NEVER)
        return loads

    def _expect(self, tier: int, now: float) -> None:
        """Note a call of the tier, and which share of each replica is kept from whom now that old calls are forgotten.

        For each tier p: the shares of the expected tiers above it, summed, and (i, share) of each other tier i above
        it, which counts only where it is present.
        """
        self._seen[tier] = now
        shares, expected = self._tiers.headroom, [now - seen <= self._expect_s for seen in self._seen]
        self._expires = min(seen for seen, fresh in zip(self._seen, expected, strict=True) if fresh) + self._expect_s
        self._kept = [
            (
                sum(shares[i] for i in range(tier) if expected[i]),
                [(i, shares[i]) for i in range(tier) if shares[i] > 0 and not expected[i]],
            )
            for tier in range(len(shares))
        ]
