"""The destination's side of a move: what it promises it keeps, what it let go it never takes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from policies.migration import destination as d
from policies.migration import events as e
from tests.policies.migration_rig import LIMITS


def destination(*events: Any, now: float = 0.0) -> tuple[d.DestinationSide, list[Any]]:
    """B's machine after these events, and what it wants done upon the last."""
    machine, actions = d.DestinationSide(LIMITS), list[Any]()
    for event in events:
        actions = list(machine.handle(event, now))
    return machine, actions


RESERVED = (e.Reserve(8, 3.0), d.Taken(8))
ADOPTING = (*RESERVED, e.Commit(with_kv=True))


@pytest.mark.parametrize(
    ("events", "state", "actions"),
    [
        (RESERVED, d.RESERVED, [d.Tell(e.Reserved(8))]),
        ((*RESERVED, e.Reserve(8, 3.0)), d.RESERVED, [d.Tell(e.Reserved(8))]),
        ((e.Reserve(8, 3.0), d.NotTaken("full")), d.RELEASED, [d.Tell(e.Refused("full"))]),
        ((*RESERVED, e.Reserve(9, 3.0), d.NotTaken("full")), d.RESERVED, [d.Tell(e.Refused("full"))]),
        ((e.ReleaseOnDestination(), e.Reserve(8, 3.0)), d.RELEASED, [d.Tell(e.Refused("released"))]),
        ((*RESERVED, e.ReleaseOnDestination()), d.RELEASED, [d.FreeBlocks()]),
        ((*RESERVED, e.SourceLost()), d.RELEASED, [d.FreeBlocks()]),
        ((*ADOPTING, e.Write(0, 0, 3.0)), d.ADOPTING, []),
        ((*ADOPTING, e.SourceLost()), d.ADOPTING, []),
        ((*ADOPTING, e.ReleaseOnDestination()), d.RELEASED, [d.DropRequest()]),
        ((*ADOPTING, d.Failed("broken")), d.RELEASED, [d.Tell(e.CommitRefused("broken"))]),
        ((*ADOPTING, d.Begun()), d.ADOPTED, [d.PassTokens(), d.Tell(e.Committed())]),
        ((*ADOPTING, d.Begun(), e.ReleaseOnDestination()), d.ADOPTED, []),
        ((*ADOPTING, d.Begun(), e.Query()), d.ADOPTED, [d.Tell(e.Committed())]),
    ],
)
def test_what_the_destination_does(events: tuple[Any, ...], state: d.State, actions: list[Any]) -> None:
    """B frees what it will not run, never takes back a first token, and never takes what it once let go."""
    machine, wanted = destination(*events)
    assert (machine.state, wanted) == (state, actions)


def test_leases_and_memory_of_the_destination() -> None:
    """Each word from A renews the lease; without one it ends by itself; an ended move is remembered, then forgotten."""
    machine, _ = destination(*RESERVED)
    machine.handle(e.Write(0, 0, 3.0), 2.0)
    assert machine.deadline() == 5.0
    assert machine.handle(e.Timeout(), 4.9) == ()
    assert machine.handle(e.Timeout(), 5.0) == (d.FreeBlocks(), e.Count("expired", "lease"))
    assert [machine.forgettable(5.0 + after) for after in (0.0, LIMITS.keep_s)] == [False, True]
    assert destination(*ADOPTING)[0].deadline() == math.inf
