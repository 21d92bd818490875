"""One router's view of the fleet: columns are the reports plus its own uncovered calls, and nothing else, ever."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.wire import ReplicaReport
from policies.fleet import FleetTable

from .fleet_rig import NAMES, TIERS, report, rows


class Recount:
    """The same table by its definition: remember all calls and last reports, count everything anew each time."""

    def __init__(self) -> None:
        self.last: dict[str, ReplicaReport | None] = {}
        self.calls: dict[int, dict[str, Any]] = {}
        self.first: ReplicaReport | None = None

    def join(self, name: str) -> None:
        self.last.setdefault(name, None)

    def leave(self, name: str) -> list[int]:
        self.last.pop(name, None)
        gone = [ticket for ticket, call in self.calls.items() if call["replica"] == name]
        for ticket in gone:
            del self.calls[ticket]
        return gone

    def apply(self, news: ReplicaReport) -> bool:
        if news.replica not in self.last:
            return False
        last = self.last[news.replica]
        if last is not None and news.seq <= last.seq:
            return False
        self.last[news.replica] = news
        self.first = self.first or news
        for ticket in news.admitted:
            if ticket in self.calls and self.calls[ticket]["replica"] == news.replica:
                self.calls[ticket]["covered"] = True
        return True

    def dispatch(self, ticket: int, name: str, tokens: int, *, tier: int) -> None:
        self.calls.pop(ticket, None)
        self.calls[ticket] = {"replica": name, "tokens": tokens, "tier": tier, "covered": False}

    def complete(self, ticket: int) -> None:
        self.calls.pop(ticket, None)

    def rows(self) -> dict[str, tuple[float, ...]]:
        result: dict[str, tuple[float, ...]] = {}
        for name, last in self.last.items():
            mine = [call for call in self.calls.values() if call["replica"] == name]
            uncovered = [call for call in mine if not call["covered"]]
            own, tokens = len(uncovered), sum(call["tokens"] for call in uncovered)
            if last is not None and last.state == "serving":
                free, queued, batch = last.free_blocks * last.block_size, last.queued_tokens, last.batch_tokens
                total, head = last.total_blocks * last.block_size, last.head_blocks * last.block_size
                running, waiting = last.running, last.waiting
                tiers = [p for by in (last.running_by_tier, last.waiting_by_tier) for p, n in enumerate(by) if n]
            elif last is None:
                queued = running = waiting = head = 0
                tiers, size = [], self.first
                free, batch = (size.total_blocks * size.block_size, size.batch_tokens) if size else (0, 1)
                total = free
            else:
                continue
            tiers += [call["tier"] for call in uncovered]
            result[name] = (
                *(free - tokens, queued + tokens, running + waiting + own, len(mine), batch),
                *(tokens, head, total, running + own, waiting + own),
                *(total if p in tiers else 0 for p in range(TIERS)),
            )
        return result


TICKETS = st.integers(0, 9)
DISPATCH = st.tuples(
    st.just("dispatch"), TICKETS, st.sampled_from(NAMES), st.integers(0, 5000), st.integers(0, TIERS - 1)
)
BY_TIER = st.lists(st.integers(0, 1), max_size=TIERS)
APPLY = st.tuples(
    st.just("apply"),
    st.builds(
        report,
        st.sampled_from(NAMES),
        st.sampled_from([-1, 0, 1, 1, 1, 1, 2]),  # steps of seq; the test adds them up
        free_blocks=st.integers(0, 1000),
        queued=st.integers(0, 9999),
        running=st.integers(0, 64),
        waiting=st.integers(0, 64),
        state=st.sampled_from(["serving", "serving", "serving", "draining", "dead"]),
        admitted=st.lists(TICKETS, max_size=4),
        batch=st.sampled_from([512, 1024]),
        head_blocks=st.integers(0, 40),
        running_by_tier=BY_TIER,
        waiting_by_tier=BY_TIER,
    ),
)
OPERATIONS = st.lists(
    st.one_of(
        *(DISPATCH, DISPATCH, DISPATCH, APPLY, APPLY, APPLY),
        st.tuples(st.just("complete"), TICKETS),
        st.tuples(st.sampled_from(["join", "join", "leave"]), st.sampled_from(NAMES)),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(st.integers(0, len(NAMES)), OPERATIONS)
def test_columns_equal_a_recount(joined: int, operations: list[tuple[Any, ...]]) -> None:
    """After any events the columns are what counting everything anew gives; once all calls ended, none is left.

    Tickets come from ten numbers only, so retries and collisions happen all the time.
    """
    table, recount, seq = FleetTable(), Recount(), 0
    for operation, *arguments in [*(("join", name) for name in NAMES[:joined]), *operations]:
        if operation == "dispatch":
            *call, tier = arguments
            if call[1] not in recount.last:
                with pytest.raises(KeyError):
                    table.dispatch(*call, tier=tier)
                continue
            table.dispatch(*call, tier=tier)
            recount.dispatch(*call, tier=tier)
            assert rows(table) == recount.rows()
            continue
        extra: tuple[float, ...] = ()
        if operation == "apply":
            seq = max(0, seq + arguments[0].seq)
            arguments, extra = [msgspec.structs.replace(arguments[0], seq=seq)], (0.0,)
        result = getattr(table, operation)(*arguments, *extra)
        assert result == getattr(recount, operation)(*arguments)
        assert rows(table) == recount.rows()
    for ticket in range(10):
        table.complete(ticket)
        recount.complete(ticket)
    assert rows(table) == recount.rows()
    assert not table._inflight
    assert not table._uncovered


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 2), st.integers(0, 1), st.integers(1, 999)),
        st.tuples(st.just("end"), st.integers(0, 2), st.integers(0, 50), st.just(0)),
        st.tuples(st.just("admit"), st.integers(0, 1), st.just(0), st.just(0)),
        st.tuples(st.just("publish"), st.integers(0, 1), st.integers(0, 7), st.just(0)),
    ),
    max_size=80,
)


@given(EVENTS)
def test_three_routers_share_reports(events: list[tuple[str, int, int, int]]) -> None:
    """Routers that hear the same reports, each losing some, forget each of their own calls exactly once.

    A replica takes in what was sent when it admits, counts it from then on and names it in three reports; routers
    that heard one of these count it by the report alone, the others still by their own ledger.
    """
    tables = [FleetTable() for _ in range(3)]
    for table in tables:
        for name in NAMES[:2]:
            table.join(name)
            table.apply(report(name, 0), 0.0)
    sent: dict[int, tuple[int, int, int]] = {}  # ticket -> router, replica, tokens
    inbox: list[list[int]] = [[], []]
    log: list[list[list[int]]] = [[[]], [[]]]  # per replica: tickets first counted by each report
    queued, seqs = [0, 0], [0, 0]
    reported = [[0, 0] for _ in range(3)]
    uncovered: list[set[int]] = [set(), set(), set()]
    for event, who, what, tokens in events:
        if event == "send":
            ticket = len(sent)
            sent[ticket] = (who, what, tokens)
            tables[who].dispatch(ticket, NAMES[what], tokens)
            inbox[what].append(ticket)
            uncovered[who].add(ticket)
        elif event == "end":
            if what in sent and sent[what][0] == who:
                tables[who].complete(what)
                uncovered[who].discard(what)
        elif event == "admit":
            queued[who] += sum(sent[ticket][2] for ticket in inbox[who])
            log[who][-1].extend(inbox[who])
            inbox[who].clear()
        else:
            seqs[who] += 1
            admitted = [ticket for tickets in log[who][-3:] for ticket in tickets]
            log[who].append([])
            for router, table in enumerate(tables):
                if what >> router & 1:
                    continue  # lost on the way to this router
                table.apply(report(NAMES[who], seqs[who], queued=queued[who], admitted=admitted), 0.0)
                reported[router][who] = queued[who]
                uncovered[router] -= set(admitted)
        for router, table in enumerate(tables):
            for replica, name in enumerate(NAMES[:2]):
                own = sum(sent[ticket][2] for ticket in uncovered[router] if sent[ticket][1] == replica)
                assert rows(table)[name][1] == reported[router][replica] + own
    for router, table in enumerate(tables):
        for ticket in sent:
            table.complete(ticket)
        assert not table.inflight.any()
        assert [int(queue) for queue in table.queued_tokens] == reported[router]


def test_completed_before_covered() -> None:
    """A call that ended before any report named it is forgotten, and the late report subtracts nothing."""
    table = FleetTable()
    table.join("a")
    table.apply(report("a", 1, queued=50), 0.0)
    table.dispatch(7, "a", 300)
    assert table.queued_tokens.tolist() == [350]
    table.complete(7)
    table.complete(7)
    assert table.queued_tokens.tolist() == [50]
    table.apply(report("a", 2, queued=50, admitted=[7]), 0.1)
    assert table.queued_tokens.tolist() == [50]
    assert table.free_tokens.tolist() == [1600]


def test_only_the_replica_it_went_to_covers_a_call() -> None:
    """A ticket named by another replica (a retry that went elsewhere, or a collision) covers nothing here."""
    table = FleetTable()
    for name in NAMES[:2]:
        table.join(name)
    table.dispatch(7, "a", 300)
    table.apply(report("b", 1, admitted=[7]), 0.0)
    assert rows(table)["a"][1:3] == (300, 1)
    table.dispatch(7, "b", 300)
    assert rows(table)["a"][1:4] == (0, 0, 0)
    table.apply(report("a", 1, admitted=[7]), 0.0)
    assert rows(table)["b"][1:3] == (300, 1)
    table.apply(report("b", 2, admitted=[7]), 0.1)
    assert rows(table)["b"][1:4] == (0, 0, 1)


def test_older_reports_and_strangers_are_ignored() -> None:
    """Reports count in the order of `seq`, whatever order they arrive in; unknown replicas have none."""
    table = FleetTable()
    table.join("a")
    assert table.apply(report("a", 5, queued=5), 0.0)
    assert not table.apply(report("a", 4, queued=4), 0.1)
    assert not table.apply(report("a", 5, queued=6), 0.1)
    assert not table.apply(report("b", 9), 0.1)
    assert table.queued_tokens.tolist() == [5]
    assert table.ids == ["a"]


def test_leaving_returns_calls_in_flight() -> None:
    """A replica that leaves gives back this router's unfinished calls in the order they were sent, covered or not."""
    table = FleetTable()
    for name in NAMES:
        table.join(name)
    for ticket, name in ((4, "b"), (2, "a"), (3, "b"), (1, "b")):
        table.dispatch(ticket, name, 10)
    table.apply(report("b", 1, state="draining", admitted=[4]), 0.0)
    table.complete(3)
    assert table.leave("b") == [4, 1]
    assert table.leave("b") == []
    table.join("b")
    assert rows(table)["b"][1:4] == (0, 0, 0)
    assert rows(table)["a"][3] == 1


def test_draining_and_dead_replicas_get_nothing() -> None:
    """Only serving replicas are eligible; calls in flight on a draining one are still followed."""
    table = FleetTable()
    for name in NAMES[:3]:
        table.join(name)
        table.apply(report(name, 1), 0.0)
    table.dispatch(1, "a", 100)
    table.apply(report("a", 2, state="draining", admitted=[]), 0.0)
    table.apply(report("b", 2, state="dead"), 0.0)
    assert table.ids == ["c"]
    table.apply(report("a", 3), 0.0)
    assert rows(table)["a"][:5] == (1500, 100, 1, 1, 2048)


def test_stale_reports() -> None:
    """Fresh while any eligible replica reported within stale_s; old figures and own calls stay in use."""
    table = FleetTable(stale_s=1.0)
    assert table.all_stale(0.0)
    table.join("a")
    table.join("b")
    assert table.all_stale(0.0)
    assert table.stale(0.0) == ["a", "b"]
    table.apply(report("a", 1, queued=10), 10.0)
    table.apply(report("b", 1, queued=20), 10.5)
    assert not table.all_stale(11.5)
    assert table.stale(11.5) == ["a"]
    assert table.all_stale(11.6)
    table.dispatch(1, "a", 5)
    assert rows(table)["a"][1] == 15
    assert rows(table)["b"][1] == 20


def test_staleness_ignores_replicas_that_cannot_be_chosen() -> None:
    """A draining or departed replica that reports busily does not hide that nothing is known of the others."""
    table = FleetTable(stale_s=1.0)
    for name in NAMES[:3]:
        table.join(name)
    table.apply(report("a", 1), 0.0)
    table.apply(report("b", 1), 5.0)
    table.apply(report("c", 1, state="draining"), 5.0)
    table.apply(report("b", 2, state="draining"), 5.0)
    assert table.all_stale(5.0)
    table.apply(report("b", 3), 5.5)
    table.leave("b")
    assert table.all_stale(5.5)


def test_a_replica_without_reports_counts_as_idle() -> None:
    """A new replica takes requests at once, as an idle one of the size of the first that reported."""
    table = FleetTable()
    table.join("a")
    table.join("b")
    table.apply(report("a", 1, free_blocks=5, queued=4000), 0.0)
    table.join("c")
    for name in ("b", "c"):
        assert rows(table)[name][:5] == (16000, 0, 0, 0, 2048)
        assert rows(table)[name][5:] == (0, 0, 16000, 0, 0, 0, 0, 0)


def test_many_replicas_come_and_go() -> None:
    """Columns follow any number of replicas; joining twice changes nothing."""
    table = FleetTable()
    names = [f"r{i}" for i in range(100)]
    for i, name in enumerate(names):
        table.join(name)
        table.apply(report(name, 1, queued=i), 0.0)
        table.join(name)
    for name in names[::2]:
        table.leave(name)
    assert {name: row[1] for name, row in rows(table).items()} == {f"r{i}": i for i in range(1, 100, 2)}


def test_a_call_on_its_way_makes_its_tier_present() -> None:
    """Own calls count for their tier until a report covers them or they end; tiers out of range are the nearest."""
    table = FleetTable()
    table.join("a")
    table.apply(report("a", 1), 0.0)

    def tiers() -> list[int]:
        return [p for p, tokens in enumerate(table.tier_tokens[:, 0]) if tokens == 16000]

    for ticket, tier in enumerate((2, 2, 99, -5)):
        table.dispatch(ticket, "a", 10, tier=tier)
    assert tiers() == [0, 2, 15]
    table.complete(0)
    table.complete(2)
    table.apply(report("a", 2, admitted=[3], waiting_by_tier=[0, 1]), 0.1)
    assert tiers() == [1, 2]
    table.complete(1)
    assert tiers() == [1]


def test_service_is_the_mean_of_own_calls() -> None:
    """The latest call weighs 0.6, the first all; calls without times (refused, retried) leave it alone."""
    table = FleetTable()
    table.join("a")
    table.dispatch(1, "a", 10, now=1.0)
    table.complete(1, now=3.0)
    assert table.service_s.tolist() == [2.0]
    table.dispatch(2, "a", 10, now=3.0)
    table.complete(2, now=4.0)
    assert table.service_s.tolist() == pytest.approx([0.6 * 1.0 + 0.4 * 2.0])
    table.dispatch(3, "a", 10, now=4.0)
    table.complete(3)
    table.dispatch(4, "a", 10)
    table.complete(4, now=99.0)
    assert table.service_s.tolist() == pytest.approx([1.4])
