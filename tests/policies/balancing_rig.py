"""Fleet tables and counted choices for the tests of the balancers."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from deployments.wire import ReplicaReport
from policies.fleet import FleetTable
from policies.types import Call

FEW, MANY = 5, 40  # replicas: both ways in which loads are computed


def fleet(figures: list[tuple[int, int, int]], requests: list[int] | None = None, batch: int = 2048) -> FleetTable:
    """Replicas with (free blocks of 16, queued tokens, own calls in flight that the report covers)."""
    table = FleetTable()
    for i, (free, queued, inflight) in enumerate(figures):
        name, tickets = f"r{i}", [1000 * i + call for call in range(inflight)]
        table.join(name)
        for ticket in tickets:
            table.dispatch(ticket, name, 100)
        running = requests[i] if requests else inflight
        table.apply(
            ReplicaReport(name, 1, 0.0, "serving", free, 1000, 16, running, 0, queued, 0, batch, 64, 0, tickets), 0.0
        )
    return table


def chosen(policy: Any, table: FleetTable, times: int, seed: int = 1, prompt: int = 100) -> list[int]:
    """Columns chosen one after the other, without dispatching."""
    rng = np.random.default_rng(seed)
    return [policy.choose(table, Call(prompt), rng) for _ in range(times)]


def chi_square_limit(degrees: int, z: float = 4.0) -> float:
    """Value that a chi-square variable passes with probability 3e-5 (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + z * math.sqrt(spread)) ** 3


def assert_frequencies(choices: list[int], probabilities: dict[int, float]) -> None:
    """The choices are distributed as given."""
    counts = Counter(choices)
    assert set(counts) <= {i for i, p in probabilities.items() if p > 0}
    expected = {i: p * len(choices) for i, p in probabilities.items() if p > 0}
    chi_square = sum((counts[i] - n) ** 2 / n for i, n in expected.items())
    assert chi_square < chi_square_limit(len(expected) - 1)
