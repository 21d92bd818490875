"""Recent events: what becomes one, once, and that the list is bounded."""

from __future__ import annotations

import msgspec

from deployments.fleet_events import FleetEvents
from deployments.migration.messages import Given
from deployments.wire import ReplicaReport, ReplicaState
from policies.migration.pairing import Move


def report(replica: str, state: ReplicaState = "serving", running: int = 0) -> ReplicaReport:
    """A report that matters in state and load."""
    return ReplicaReport(replica, 1, 0.0, state, 8, 8, 16, running, 0, 0, 0, 256, 8, 0, [])


def kinds(events: FleetEvents) -> list[str]:
    """Kind and replica of each event, the oldest first."""
    return [f"{event['kind']} {event['replica']}" for event in reversed(events.recent())]


def test_a_life() -> None:
    """Coming, draining, empty and gone are one event each, however often they are reported."""
    events = FleetEvents()
    for state, running in (("serving", 3), ("serving", 3), ("draining", 2), ("draining", 1), ("draining", 0)):
        events.look({"a": report("a", state, running)}, 1.0)  # type: ignore[arg-type]
    events.look({}, 2.0)
    events.look({}, 3.0)
    assert kinds(events) == ["serving a", "draining a", "empty a", "gone a"]
    assert [event["number"] for event in events.recent()] == [4, 3, 2, 1]
    assert events.recent()[2]["text"] == "a drains, 2 requests are to leave"


def test_one_that_is_lost() -> None:
    """A replica that vanishes while it serves leaves streams to go on elsewhere; one that drained leaves none."""
    events = FleetEvents()
    events.look({"a": report("a"), "b": report("b", "draining")}, 1.0)
    events.look({}, 2.0)
    assert {event["text"] for event in events.recent()[:2]} == {"a is gone: its streams go on elsewhere", "b is gone"}


def test_a_drain_taken_back() -> None:
    """A replica that serves again is not said to be empty later."""
    events = FleetEvents()
    for state, running in (("serving", 1), ("draining", 1), ("serving", 1), ("serving", 0)):
        events.hear(report("a", state, running), 1.0)  # type: ignore[arg-type]
    assert kinds(events) == ["serving a", "draining a", "serving a"]


def test_moves_that_follow_each_other_are_one_event() -> None:
    """Moves of a pair for one reason add up while they come within two seconds; nothing moved is no event."""
    events, move = FleetEvents(), Move("a", "b", "balance", room=())
    for t, moved in ((1.0, 2), (2.0, 1), (2.5, 0), (9.0, 1)):
        events.moved(move, Given(moved), t)
    assert [(event["count"], event["t"]) for event in reversed(events.recent())] == [(3, 2.0), (1, 9.0)]
    assert events.recent()[1]["text"] == "3 requests moved from a to b (balance)"


def test_the_list_is_bounded() -> None:
    """Only the newest are kept, and numbers never repeat."""
    events = FleetEvents(kept=3)
    for number in range(10):
        events.note("order", number, str(number))
    assert [event["number"] for event in events.recent()] == [10, 9, 8]


def test_events_are_plain_data() -> None:
    """They travel by Serve handle and as JSON."""
    events = FleetEvents()
    events.look({"a": report("a")}, 1.0)
    assert msgspec.json.decode(msgspec.json.encode(events.recent())) == events.recent()
