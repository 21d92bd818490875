"""What happened to the fleet lately, as the coordinator saw it: a bounded list for people.

No Ray, no clock: times are wall-clock seconds and arguments. A coordinator that starts anew begins with an empty list.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from deployments.migration.messages import Given
from deployments.wire import ReplicaReport
from policies.migration.pairing import Move

KEPT = 200
MERGE_S = 2.0  # moves of one pair for one reason that end so soon after each other are one event
_SAYS = {"serving": "serves", "draining": "drains", "dead": "is dead: its streams go on elsewhere"}


@dataclass(slots=True)
class Event:
    """One event; `number` grows by one, `t` is when it was last added to, `count` the requests or times in it.

    `kind`: `serving`, `draining`, `dead`, `gone`, `empty` (of `replica`), `move` (from `replica` to `destination`),
    `order` (what somebody asked for), `settings`.
    """

    number: int
    t: float
    kind: str
    text: str
    replica: str | None = None
    destination: str | None = None
    reason: str | None = None
    count: int = 1


class FleetEvents:
    """The last `KEPT` events, and what is needed to see the next: the state in which each replica was last."""

    def __init__(self, kept: int = KEPT) -> None:
        self._events: deque[Event] = deque(maxlen=kept)
        self._number = 0
        self._states: dict[str, str] = {}
        self._emptying: set[str] = set()  # that drain and still have requests

    def recent(self) -> list[dict[str, Any]]:
        """The events, the newest first."""
        return [asdict(event) for event in reversed(self._events)]

    def note(self, kind: str, t: float, text: str, replica: str | None = None, **more: Any) -> Event:
        """Add an event."""
        self._number += 1
        event = Event(self._number, t, kind, text, replica, **more)
        self._events.append(event)
        return event

    def is_news(self, report: ReplicaReport) -> bool:
        """Whether the report's state is not the one known; may be asked from any thread."""
        return self._states.get(report.replica) != report.state

    def hear(self, report: ReplicaReport, t: float) -> None:
        """Take in a report."""
        name, held = report.replica, report.running + report.waiting
        if self.is_news(report):
            self._states[name] = report.state
            self._emptying.discard(name)
            here = f", {held} requests are to leave" if report.state == "draining" else ""
            self.note(report.state, t, f"{name} {_SAYS[report.state]}{here}", name)
            if report.state == "draining":
                self._emptying.add(name)
        if not held and name in self._emptying:
            self._emptying.discard(name)
            self.note("empty", t, f"{name} is empty", name)

    def look(self, fleet: Mapping[str, ReplicaReport], t: float) -> None:
        """Take in the last report of each replica that is there now."""
        for report in fleet.values():
            self.hear(report, t)
        for name in [name for name in self._states if name not in fleet]:
            lost = self._states.pop(name) == "serving"
            self._emptying.discard(name)
            self.note("gone", t, f"{name} is gone" + (": its streams go on elsewhere" if lost else ""), name)

    def moved(self, move: Move, given: Given, t: float) -> None:
        """Take in the requests that the coordinator had moved."""
        if not given.moved:
            return
        last = self._events[-1] if self._events else None
        same = ("move", move.source, move.destination, move.reason)
        if last and (last.kind, last.replica, last.destination, last.reason) == same and t - last.t <= MERGE_S:
            last.t, last.count = t, last.count + given.moved
        else:
            last = self.note(
                "move", t, "", move.source, destination=move.destination, reason=move.reason, count=given.moved
            )
        requests = "request" if last.count == 1 else "requests"
        last.text = f"{last.count} {requests} moved from {move.source} to {move.destination} ({move.reason})"
