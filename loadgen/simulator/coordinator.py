"""Who moves in virtual time: the product's coordinator over the (perhaps old) reports, and replicas that drain.

What is decided is decided by deployments/coordination.py, policies/migration/pairing.py and victims.py; here is what
deployments/coordinator.py, migration/departures.py and migration/drain.py do with a loop and Serve calls.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from deployments.coordination import HELP_S, Coordination, inverted
from deployments.migration.messages import Given, Moved
from deployments.routing import Heard
from deployments.settings import MigrationSettings
from deployments.wire import ReplicaReport
from loadgen.simulator.driver import World
from loadgen.simulator.ledger import number_of
from loadgen.simulator.moves import Moves
from loadgen.simulator.replica import Replica
from policies.migration.handshake import Plan, State
from policies.migration.pairing import Move
from policies.migration.standing import standing
from policies.migration.victims import Candidate
from policies.tiers import Tiers

LEAST_S = 0.025  # between two looks at the fleet (deployments/coordinator.py)
BY_HAND_S = 60.0  # a drain by hand without progress (deployments/migration/drain.py)
AGAIN_S = 0.25  # between two rounds of a drain


class Place(World, Protocol):
    """What the coordinator needs of the cluster beyond what moves do."""

    @property
    def alive(self) -> Mapping[str, Replica]:
        """The replicas that run, by name, in the order in which they began."""

    def hand_back(self, number: int) -> None:
        """Take a request off its replica and send it again elsewhere."""


class Reports:
    """The last report of each replica, as all who listen know it; `always`: they know all that happened."""

    def __init__(self, place: Place, always: bool, stale_s: float) -> None:
        self._place, self._always, self._stale_s = place, always, stale_s
        self._heard: dict[str, Heard] = {}

    def hear(self, report: ReplicaReport) -> None:
        """A replica has published."""
        self._heard[report.replica] = Heard(report, self._place.clock.now)

    def fresh(self) -> list[Heard]:
        """Those of replicas that run and that are not older than `stale_s`."""
        now, alive = self._place.clock.now, self._place.alive
        if self._always:
            return [Heard(replica.report(0), now) for replica in alive.values()]
        heard = (self._heard.get(name) for name in alive)
        return [one for one in heard if one is not None and now - one.at <= self._stale_s]


@dataclass(slots=True)
class Draining:
    """A replica on its way out. `give_up`: when its requests are sent again elsewhere; None: by hand."""

    replica: Replica
    give_up: float | None
    here: int
    since: float
    round_at: float


class Coordinator:
    """Asks crowded replicas to give requests away, and empties those that drain, by the product's rules."""

    def __init__(self, place: Place, moves: Moves, settings: MigrationSettings, tiers: Tiers, reports: Reports) -> None:
        self.totals: defaultdict[str, Counter[str]] = defaultdict(Counter)  # reason -> outcome -> moves
        self._place, self._moves, self._settings, self._tiers = place, moves, settings, tiers
        self._plan = Coordination(settings, tiers)
        self._reports = reports
        self._last = self._next = -math.inf  # of the ticks
        self._asked: dict[int, Move] = {}  # of sources that have not answered
        self._draining: dict[str, Draining] = {}
        self._departing: Counter[str] = Counter()  # replica -> drain moves under way, out of it
        self._arriving: Counter[tuple[str, str]] = Counter()  # (from, to)

    def start(self) -> None:
        """Begin to look at the fleet."""
        if self._settings.enabled:
            self._tick_at(0.0)

    def look(self, report: ReplicaReport) -> None:
        """A higher tier that waits behind lower ones waits for no tick."""
        if self._settings.enabled and inverted(report):
            when = max(self._place.clock.now, self._last + min(LEAST_S, self._settings.tick_s))
            if when < self._next:
                self._tick_at(when)

    def died(self, replica: Replica) -> None:
        """A replica is dead."""
        self._draining.pop(replica.name, None)
        for number, move in list(self._asked.items()):
            if move.source == replica.name:
                del self._asked[number]
                self._plan.failed(number, move, self._place.clock.now)
                self.totals[move.reason]["failed"] += 1

    # --- ticks

    def _tick_at(self, when: float) -> None:
        self._next = when
        self._place.at(when, partial(self._tick, when))

    def _tick(self, when: float) -> None:
        if when != self._next:
            return  # a higher tier has called it forward
        now = self._last = self._place.clock.now
        message_s = self._moves.transfer.message_s
        fleet = self._reports.fresh()
        if len(fleet) > 1:
            for number, move in self._plan.next_moves(fleet, now):
                self._asked[number] = move
                self._place.later(message_s, partial(self._ask, number, move))
            for name in self._plan.helped(fleet, now):
                self._place.later(message_s, partial(self._help, name))
        self._tick_at(now + self._settings.tick_s)

    def _help(self, name: str) -> None:
        replica = self._place.alive.get(name)
        if replica is not None:
            replica.board.set_grace(self._settings.tier_grace_s, self._place.clock.now + HELP_S)

    def _ask(self, number: int, move: Move) -> None:
        source = self._place.alive.get(move.source)
        if source is not None and number in self._asked:
            self._place.ask(source, partial(self._give, number, move, source))

    def _give(self, number: int, move: Move, source: Replica) -> None:
        """The source chooses who goes."""
        victims = self._settings.victims.choose_all(move, self._candidates(source), self._moves.busy())
        outcomes: list[Moved] = []

        def over(moved: Moved) -> None:
            outcomes.append(moved)
            if len(outcomes) == len(victims):
                self._answer(number, move, _given(outcomes))

        for victim in victims:
            self._depart(victim, source, move, over)
        if not victims:
            self._answer(number, move, Given(0))

    def _answer(self, number: int, move: Move, given: Given) -> None:
        totals = self.totals[move.reason]
        totals.update(moved.outcome for moved in given.outcomes)
        if not given.outcomes:
            totals["no_victim"] += 1
        self._place.later(self._moves.transfer.message_s, partial(self._hear, number, move, given))

    def _hear(self, number: int, move: Move, given: Given) -> None:
        if self._asked.pop(number, None) is not None:
            self._plan.ended(number, move, given, self._place.clock.now)

    def _candidates(self, replica: Replica) -> list[Candidate]:
        """The requests of a replica that are its own to give."""
        now, found = self._place.clock.now, []
        requests = replica.scheduler.on_kv_call(self._moves.workers, "candidates", {})["requests"]
        for name, tier, blocks, place, tokens_left, refused in requests:
            if self._place.owned(number := number_of(name)) == name:
                moved_s = now - self._moves.moved_at.get(number, -math.inf)
                found.append(Candidate(name, tier, blocks, place, tokens_left, moved_s, refused))
        return found

    def _depart(self, victim: Candidate, source: Replica, move: Move, over: Callable[[Moved], None]) -> None:
        destination = self._place.alive.get(move.destination)
        number = number_of(victim.request_id)
        if destination is None:
            over(Moved(str(number), State.ABORTED.value, "unreachable"))
            return
        held = victim.blocks if victim.place == "decode" else 0
        plan = Plan(held, must=move.reason == "drain", refused=victim.refused)
        self._moves.depart(number, victim.request_id, (source, destination), plan, over)

    # --- drains

    def drain(self, replica: Replica, within_s: float | None = None) -> None:
        """Let a replica take no more requests and give away those that it has; None: by hand."""
        now = self._place.clock.now
        replica.state = "draining"
        give_up = None if within_s is None else now + within_s
        draining = Draining(replica, give_up, len(replica.scheduler.requests), now, now)
        self._draining[replica.name] = draining
        self._round(draining, now)

    def undrain(self, replica: Replica) -> None:
        """Let a replica take requests again; moves under way go on."""
        replica.state = "serving"
        self._draining.pop(replica.name, None)

    def _round_at(self, draining: Draining, when: float) -> None:
        draining.round_at = when
        self._place.at(when, partial(self._round, draining, when))

    def _round(self, draining: Draining, when: float) -> None:
        """Start the moves that the pairing allows now; hand back what is left when the time is over."""
        replica = draining.replica
        if self._draining.get(replica.name) is not draining or when != draining.round_at:
            return
        now, here = self._place.clock.now, len(replica.scheduler.requests)
        fleet = self._reports.fresh() if here else []
        others = [one.report for one in fleet if one.report.replica != replica.name and one.report.state == "serving"]
        if others:
            self._pair(replica, others)
        if here < draining.here or not here:
            draining.since = now
        draining.here = here
        give_up = draining.since + BY_HAND_S if draining.give_up is None else draining.give_up
        if others and now >= give_up:
            busy = self._moves.busy()
            for name in sorted(set(replica.scheduler.requests) - busy, key=number_of):
                self.totals["drain"]["handed_back"] += 1
                self._place.hand_back(number_of(name))
        self._round_at(draining, now + AGAIN_S)

    def _pair(self, replica: Replica, others: list[ReplicaReport]) -> None:
        mine = replace(
            standing(replica.name, replica.report(0), self._tiers),
            state="draining",
            outgoing=self._departing[replica.name],
        )
        fleet = [mine]
        for report in others:
            known = standing(report.replica, report, self._tiers)
            fleet.append(replace(known, incoming=self._arriving[replica.name, report.replica]))
        moves = [m for m in self._settings.pairing.moves(fleet) if m.source == replica.name and m.reason == "drain"]
        if moves:
            self._place.ask(replica, partial(self._leave, replica, moves))

    def _leave(self, replica: Replica, moves: list[Move]) -> None:
        candidates = self._candidates(replica)
        for move in moves:
            victim = self._settings.victims.choose(move, candidates, self._moves.busy())
            if victim is not None:
                pair = (replica.name, move.destination)
                self._departing[replica.name] += 1
                self._arriving[pair] += 1
                self._depart(victim, replica, move, partial(self._left, pair))

    def _left(self, pair: tuple[str, str], moved: Moved) -> None:
        """A drain's move has ended; if it went well the next may begin."""
        self.totals["drain"][moved.outcome] += 1
        self._departing[pair[0]] -= 1
        self._arriving[pair] -= 1
        draining = self._draining.get(pair[0])
        if draining is not None and moved.outcome == State.DONE.value:
            self._round_at(draining, self._place.clock.now)


def _given(outcomes: list[Moved]) -> Given:
    return Given(sum(moved.outcome == State.DONE.value for moved in outcomes), outcomes)
