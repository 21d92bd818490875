"""Two baselines that go by the name of INFaaS (Romero et al., USENIX ATC 2021); neither is INFaaS itself.

INFaaS proper picks among model variants and blacklists slow workers. What follows are the two reductions of it that
later papers compare with: a cost without any notion of memory, and a memory load without migration and tiers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies.balancing.ties import FEW, argmin
from policies.fleet import FleetTable
from policies.freeness import freeness_column, freeness_of
from policies.registry import number
from policies.tiers import SINGLE, Tiers
from policies.types import Call

OVERLOADED, INTERFERED = 1.0, 0.5  # penalties; the code's third, 2 for inactive replicas, has no use in this table
DEEP, SHALLOW = 2, 1  # waiting requests above, or up to, which the penalties apply


class InfaasCost:
    """Smallest cost = s * (alpha * queue + beta * service) + gamma * penalty; ties at random.

    queue    requests waiting there
    service  mean seconds of this router's calls that ended there (exponentially weighted)
    penalty  1 if service > overloaded_s and more than 2 wait; 0.5 if service > interfered_s and at most 1 waits
    s        max(0.5, 1 - 0.1 * (K - 1 - p)) for tier p of K: a higher tier shuns penalties more

    Source: the baseline of "Beyond Binary Priorities" (arXiv 2608.16336): cost as printed, with service as the mean
    that the text names; s, penalties and limits as in its code, which uses a predicted step for service instead.

    alpha: cost per waiting request, >= 0; beta: per second, >= 0; gamma: of penalty 1, >= 0.
    overloaded_s, interfered_s: seconds, >= 0.
    """

    name = "infaas_cost"

    def __init__(
        self,
        *,
        alpha: float = 1.0,
        beta: float = 1.0,
        gamma: float = 1.0,
        overloaded_s: float = 1.3,
        interfered_s: float = 1.15,
    ) -> None:
        remedy = "It weighs one term of the cost; 1 is the default."
        self._alpha = number("alpha", alpha, remedy, low=0)
        self._beta = number("beta", beta, remedy, low=0)
        self._gamma = number("gamma", gamma, remedy, low=0)
        remedy = "It is the mean duration of calls from which a replica counts as {}, in seconds."
        self._overloaded_s = number("overloaded_s", overloaded_s, remedy.format("overloaded"), low=0)
        self._interfered_s = number("interfered_s", interfered_s, remedy.format("interfered"), low=0)
        self._tiers = SINGLE

    def use_tiers(self, tiers: Tiers) -> None:
        """Scale the cost by these tiers."""
        self._tiers = tiers

    def choose(self, fleet: FleetTable, call: Call, rng: np.random.Generator) -> int:
        loads = self.few_loads(fleet, call.tier) if len(fleet.ids) <= FEW else self.loads(fleet, call.tier)
        return argmin(loads, rng)

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        pass

    def few_loads(self, fleet: FleetTable, tier: int) -> list[float]:
        """Cost of each column: for up to FEW columns."""
        scale, costs = self._scale(tier), []
        for queue, service in zip(fleet.waiting.tolist(), fleet.service_s.tolist(), strict=True):
            penalty = 0.0
            if service > self._overloaded_s and queue > DEEP:
                penalty = OVERLOADED
            elif service > self._interfered_s and queue <= SHALLOW:
                penalty = INTERFERED
            costs.append(scale * (self._alpha * queue + self._beta * service) + self._gamma * penalty)
        return costs

    def loads(self, fleet: FleetTable, tier: int) -> NDArray[np.float64]:
        """The same for many columns."""
        queue, service = fleet.waiting, fleet.service_s
        overloaded = (service > self._overloaded_s) & (queue > DEEP)
        interfered = (service > self._interfered_s) & (queue <= SHALLOW)
        penalty = OVERLOADED * overloaded + INTERFERED * interfered
        costs: NDArray[np.float64] = self._scale(tier) * (self._alpha * queue + self._beta * service)
        costs += self._gamma * penalty
        return costs

    def _scale(self, tier: int) -> float:
        return max(0.5, 1 - 0.1 * (len(self._tiers) - 1 - self._tiers.clamp(tier)))


class InfaasPlusPlus:
    """INFaaS++: smallest -(A - W) / (r + q), -inf on an idle replica; ties at random.

    A = free KV cache, W = what the waiting requests want of it, r and q = requests running and waiting. Own calls that
    no report covers count once. W is the prompt tokens not computed yet.

    Source: the baseline of Llumnix (OSDI 2024), section 6.1, as its artifact computes it for dispatching.
    """

    name = "infaas_pp"

    def choose(self, fleet: FleetTable, call: Call, rng: np.random.Generator) -> int:
        loads = self.few_loads(fleet) if len(fleet.ids) <= FEW else self.loads(fleet)
        return argmin(loads, rng)

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        pass

    def few_loads(self, fleet: FleetTable) -> list[float]:
        """Load of each column: for up to FEW columns."""
        columns = (fleet.free_tokens, fleet.queued_tokens, fleet.own_tokens, fleet.requests)
        return [
            -freeness_of(free, queued - own, 0.0, requests, requests)
            for free, queued, own, requests in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def loads(self, fleet: FleetTable) -> NDArray[np.float64]:
        """The same for many columns."""
        wanted: NDArray[np.float64] = fleet.queued_tokens - fleet.own_tokens
        requests = fleet.requests
        freeness_column(fleet.free_tokens, wanted, 0.0, requests, requests, wanted)
        np.negative(wanted, wanted)
        return wanted
