"""The span `route`: what the router knew when it chose a replica, and what it chose."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from deployments.tracing import ROUTE
from policies.fleet import FleetTable

if TYPE_CHECKING:
    from deployments.spans import Spans

#: Prompt tokens, tier, and whether a replica has refused the call before.
Asked = tuple[int, int, bool]
#: Candidates whose loads are told: the chosen one and the first others.
MOST = 16
#: Columns of the fleet's table that are told, one list with an entry for each candidate.
LOADS = ("running", "waiting", "inflight", "queued_tokens", "free_tokens")


def record_choice(
    spans: Spans,
    trace: Mapping[str, str] | None,
    began: float,
    call: Asked,
    chosen: tuple[str, bool],
    table: FleetTable,
    column: int,
) -> None:
    """A call that began to wait at `began` got the replica in `column` of `table`.

    `chosen`: by which policy, and whether it had to do without fresh reports.
    """
    policy, stale = chosen
    others = [other for other in range(len(table.ids)) if other != column]
    told = [column, *others[: MOST - 1]]
    loads = {f"tidegate.candidates.{name}": [int(getattr(table, name)[i]) for i in told] for name in LOADS}
    attributes = {
        **_asked(call),
        "tidegate.policy": policy,
        "tidegate.reports_stale": stale,
        "tidegate.replica": table.ids[column],
        "tidegate.candidates": len(table.ids),
        "tidegate.candidates.replica": [table.ids[i] for i in told],
        **loads,
    }
    spans.record(ROUTE, trace, began, time.monotonic(), attributes)


def record_none(spans: Spans, trace: Mapping[str, str] | None, began: float, call: Asked) -> None:
    """Nobody could take a call that began to wait at `began`."""
    attributes = {**_asked(call), "tidegate.candidates": 0}
    spans.record(ROUTE, trace, began, time.monotonic(), attributes, error="no replica")


def _asked(call: Asked) -> dict[str, Any]:
    prompt_tokens, tier, again = call
    return {"gen_ai.usage.input_tokens": prompt_tokens, "tidegate.tier": tier, "tidegate.again": again}
