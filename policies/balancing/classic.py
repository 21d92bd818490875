"""The general-purpose balancers that know nothing of tokens: baselines, and what is left when reports are stale."""

from __future__ import annotations

import numpy as np

from policies.balancing.ties import argmin
from policies.fleet import FleetTable
from policies.types import Call, EmptyFleetError


class Random:
    """Any replica, each as likely."""

    name = "random"

    def choose(self, fleet: FleetTable, call: Call, rng: np.random.Generator) -> int:
        return int(rng.random() * _width(fleet))

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        pass


class RoundRobin:
    """One after the other, from a random start so that several routers do not march in step."""

    name = "round_robin"

    def __init__(self) -> None:
        self._last: int | None = None

    def choose(self, fleet: FleetTable, call: Call, rng: np.random.Generator) -> int:
        width = _width(fleet)
        last = int(rng.random() * width) if self._last is None else self._last
        self._last = (last + 1) % width
        return self._last

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        pass


class PowerOfTwoChoices:
    """Of two different replicas drawn at random, the one with fewer of this router's own unfinished calls.

    Needs no report. Source: Mitzenmacher, "The power of two choices in randomized load balancing" (1996, 2001).
    """

    name = "p2c"

    def choose(self, fleet: FleetTable, call: Call, rng: np.random.Generator) -> int:
        width = _width(fleet)
        if width == 1:
            return 0
        first = int(rng.random() * width)
        second = int(rng.random() * (width - 1))
        second += second >= first  # any replica but the first; a tie stays with the first, itself drawn at random
        return second if fleet.inflight[second] < fleet.inflight[first] else first

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        pass


class LeastRequests:
    """The replica with the fewest requests, running and waiting, whoever sent them; ties at random."""

    name = "least_requests"

    def choose(self, fleet: FleetTable, call: Call, rng: np.random.Generator) -> int:
        return argmin(fleet.requests, rng)

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        pass


def _width(fleet: FleetTable) -> int:
    width = len(fleet.ids)
    if width == 0:
        raise EmptyFleetError("no replica is eligible: wait until one joins or serves again")
    return width
