"""Which replica gets a new request."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from policies.balancing.classic import LeastRequests, PowerOfTwoChoices, Random, RoundRobin
from policies.balancing.sal import SAL
from policies.fleet import FleetTable
from policies.registry import Registry
from policies.types import Call

__all__ = ["BALANCING", "SAL", "BalancingPolicy", "LeastRequests", "PowerOfTwoChoices", "Random", "RoundRobin"]


class BalancingPolicy(Protocol):
    """Chooses a column of the fleet for each request; one object per router."""

    @property
    def name(self) -> str: ...

    def choose(self, fleet: FleetTable, call: Call, rng: np.random.Generator) -> int:
        """Index into `fleet.ids` for this request; EmptyFleetError if there is no column."""

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        """Learn from a request that ended: its prompt and generated tokens."""


BALANCING: Registry[BalancingPolicy] = Registry("balancing policy")
for _policy in (Random, RoundRobin, PowerOfTwoChoices, LeastRequests, SAL):
    BALANCING.register(_policy.name)(_policy)
