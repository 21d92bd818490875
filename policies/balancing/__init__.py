"""Which replica gets a new request."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from policies.balancing.classic import LeastRequests, PowerOfTwoChoices, Random, RoundRobin
from policies.balancing.infaas import InfaasCost, InfaasPlusPlus
from policies.balancing.llumnix import Llumnix
from policies.balancing.sal import SAL
from policies.balancing.tiered_sal import TieredSAL
from policies.fleet import FleetTable
from policies.registry import Registry
from policies.tiers import Tiers
from policies.types import Call

__all__ = [
    "BALANCING",
    "SAL",
    "BalancingPolicy",
    "InfaasCost",
    "InfaasPlusPlus",
    "LeastRequests",
    "Llumnix",
    "PowerOfTwoChoices",
    "Random",
    "RoundRobin",
    "TieredSAL",
    "UsesTiers",
]


class BalancingPolicy(Protocol):
    """Chooses a column of the fleet for each request; one object per router."""

    @property
    def name(self) -> str: ...

    def choose(self, fleet: FleetTable, call: Call, rng: np.random.Generator) -> int:
        """Index into `fleet.ids` for this request; EmptyFleetError if there is no column."""

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        """Learn from a request that ended: its prompt and generated tokens."""


@runtime_checkable
class UsesTiers(Protocol):
    """A policy that must know the tiers; until it is told there is one, without headroom."""

    def use_tiers(self, tiers: Tiers) -> None:
        """Decide by these tiers from now on."""


BALANCING: Registry[BalancingPolicy] = Registry("balancing policy")
for _policy in (
    *(Random, RoundRobin, PowerOfTwoChoices, LeastRequests),
    *(SAL, InfaasCost, InfaasPlusPlus, Llumnix, TieredSAL),
):
    BALANCING.register(_policy.name)(_policy)
