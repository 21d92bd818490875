"""Llumnix: send a request to the freest replica.

Source: Sun et al., "Llumnix: dynamic scheduling for large language model serving", OSDI 2024, section 4.4.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from policies.balancing.ties import FEW, argmin
from policies.fleet import FleetTable
from policies.freeness import freeness_column, freeness_of
from policies.tiers import SINGLE, Tiers
from policies.types import Call


class Llumnix:
    """Largest freeness F, headroom of the tiers present included (policies/freeness.py), ties at random.

    F is in iterations here: the table counts tokens, not blocks. Own calls that no report covers hold their prompts,
    run, and make their tier present. The request's own size plays no part, as in the paper. Requests that wait in one
    router go by tier, then by arrival; the router sees to that.
    """

    name = "llumnix"

    def __init__(self) -> None:
        self.use_tiers(SINGLE)
        self._kept = self._part = np.empty(0)

    def use_tiers(self, tiers: Tiers) -> None:
        """Take the headroom of these tiers into account."""
        self._shares = [(p, share) for p, share in enumerate(tiers.headroom) if share > 0]

    def choose(self, fleet: FleetTable, call: Call, rng: np.random.Generator) -> int:
        loads = self.few_loads(fleet) if len(fleet.ids) <= FEW else self.loads(fleet)
        return argmin(loads, rng)

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        pass

    def few_loads(self, fleet: FleetTable) -> list[float]:
        """-F of each column: for up to FEW columns."""
        kept = [0.0] * len(fleet.ids)
        for p, share in self._shares:
            kept = [k + share * tokens for k, tokens in zip(kept, fleet.tier_tokens[p].tolist(), strict=True)]
        columns: Sequence[list[float]] = (
            *(fleet.free_tokens.tolist(), fleet.head_tokens.tolist(), kept),
            *(fleet.running.tolist(), fleet.requests.tolist()),
        )
        return [-freeness_of(*figures) for figures in zip(*columns, strict=True)]

    def loads(self, fleet: FleetTable) -> NDArray[np.float64]:
        """The same for many columns, in an array that the next call overwrites."""
        if len(self._kept) != len(fleet.ids):
            self._kept, self._part = np.empty(len(fleet.ids)), np.empty(len(fleet.ids))
        kept, part = self._kept, self._part
        kept.fill(0.0)
        for p, share in self._shares:
            np.multiply(fleet.tier_tokens[p], share, part)
            np.add(kept, part, kept)
        freeness_column(fleet.free_tokens, fleet.head_tokens, kept, fleet.running, fleet.requests, kept)
        np.negative(kept, kept)
        return kept
