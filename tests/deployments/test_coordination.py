"""Coordination: which moves begin at a look at the fleet, and what a coordinator learns from how they end."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import msgspec

from deployments.coordination import FORGET_S, Coordination
from deployments.migration.messages import Given, Moved
from deployments.routing import Heard
from deployments.settings import MigrationSettings
from deployments.wire import ReplicaReport
from policies.migration.pairing import Move, Pairing
from policies.tiers import Tiers

TIERS = Tiers((0.1, 0.05), (math.inf, math.inf))
IDLE = ReplicaReport("", 1, 0.0, "serving", 100, 100, 16, 0, 0, 0, 0, 512, 10, 0, [])
DONE = Given(1, [Moved("r", "done", "moved", 1, 30, blocks=10, bytes=1000)])
NOTHING = Given(0, [])


class Fleet:
    """Reports of a fleet, and a clock."""

    def __init__(self, **settings: Any) -> None:
        self.now = 1000.0
        self.reports: dict[str, ReplicaReport] = {}
        self.heard_at: dict[str, float] = {}
        self.plan = Coordination(MigrationSettings(**settings), TIERS)

    def say(self, name: str, **figures: Any) -> None:
        """Let a report arrive, of an idle replica but for the figures given."""
        self.reports[name] = msgspec.structs.replace(IDLE, replica=name, **figures)
        self.heard_at[name] = self.now

    def crowd(self, *names: str, running: int = 8, free: int = 20) -> None:
        """Let replicas report that they are nearly full of requests of the lower tier."""
        for name in names:
            self.say(name, running=running, running_by_tier=[0, running], free_blocks=free)

    def pass_time(self, seconds: float) -> None:
        """Let time pass in which all replicas report as before."""
        self.now += seconds
        self.heard_at = dict.fromkeys(self.heard_at, self.now)

    @property
    def fleet(self) -> list[Heard]:
        return [Heard(report, self.heard_at[name]) for name, report in self.reports.items()]

    def look(self) -> list[tuple[int, Move]]:
        return self.plan.next_moves(self.fleet, self.now)

    def pairs(self) -> list[tuple[str, str, str]]:
        return [(move.source, move.destination, move.reason) for _, move in self.look()]

    def outcome(self, begun: tuple[int, Move], given: Given | None) -> None:
        number, move = begun
        if given is None:
            self.plan.failed(number, move, self.now)
        else:
            self.plan.ended(number, move, given, self.now)


def test_the_crowded_give_to_the_free() -> None:
    """A look at an uneven fleet begins a move; while it is under way neither replica begins a second one."""
    fleet = Fleet()
    fleet.crowd("full")
    fleet.say("idle")
    ((number, move),) = fleet.look()
    assert (move.source, move.destination, move.reason) == ("full", "idle", "balance")
    assert fleet.plan.standing(fleet.reports["full"], fleet.now).outgoing == 1
    assert fleet.plan.standing(fleet.reports["idle"], fleet.now).incoming == 1
    fleet.pass_time(0.25)
    assert fleet.look() == []
    fleet.outcome((number, move), DONE)
    assert fleet.plan.standing(fleet.reports["full"], fleet.now).outgoing == 0
    assert fleet.plan.under_way == {}


def test_a_higher_tier_that_waits_is_made_way_for() -> None:
    """Where the batch is full of a lower tier and a higher one waits, a runner is asked away, with the tier named."""
    fleet = Fleet()
    fleet.say(
        "full", running=10, running_by_tier=[0, 10], waiting=1, waiting_by_tier=[1], free_blocks=40, head_blocks=2
    )
    fleet.say("idle")
    ((_, move),) = fleet.look()
    assert (move.reason, move.waiting_tier) == ("tier", 0)


def test_replicas_that_do_not_serve_are_left_out() -> None:
    """One that drains is neither source (it sees to itself) nor destination, nor is one that is dead."""
    for state in ("draining", "dead"):
        fleet = Fleet()
        fleet.crowd("full")
        fleet.say("other", state=state)
        assert fleet.look() == []
        fleet.say("full", state=state, running=8, running_by_tier=[0, 8], free_blocks=20)
        fleet.say("other")
        assert fleet.look() == []


def test_one_replica_moves_nothing() -> None:
    """There is nobody to give to."""
    fleet = Fleet()
    fleet.crowd("only")
    assert fleet.look() == []


def test_reports_from_before_the_last_move_ended_are_not_used() -> None:
    """What a move changed must be seen before the next decision: else it would be made twice."""
    fleet = Fleet(pairing=Pairing(cooldown_s=0.0))
    fleet.crowd("full")
    fleet.say("idle")
    (begun,) = fleet.look()
    fleet.now += 0.2
    fleet.outcome(begun, DONE)
    fleet.now += 0.01
    assert fleet.look() == []
    fleet.pass_time(0.01)
    assert fleet.pairs() == [("full", "idle", "balance")]


def test_a_pair_that_gives_nothing_waits_longer_each_time() -> None:
    """No victim, a refusal, a dead source: the pair pauses, doubling; another pair may go on; success ends it."""
    for given in (NOTHING, None, Given(0, [Moved("r", "aborted", "no_blocks")])):
        fleet = Fleet(pairing=Pairing(cooldown_s=0.0))
        fleet.crowd("full")
        fleet.say("idle")
        pauses = []
        for _ in range(7):
            while not (begun := fleet.look()):
                fleet.pass_time(0.05)
            pauses.append(fleet.now)
            fleet.outcome(begun[0], given)
        gaps = [round(b - a, 1) for a, b in itertools.pairwise(pauses)]
        assert gaps == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]
        fleet.say("third", free_blocks=99, running=1, running_by_tier=[0, 1])
        fleet.pass_time(0.01)
        assert fleet.pairs() == [("full", "third", "balance")]


def test_success_clears_the_back_off() -> None:
    """After a move that went well the pair is asked again at once."""
    fleet = Fleet(pairing=Pairing(cooldown_s=0.0))
    fleet.crowd("full")
    fleet.say("idle")
    for given in (NOTHING, DONE, NOTHING):
        while not (begun := fleet.look()):
            fleet.pass_time(0.05)
        fleet.outcome(begun[0], given)
    ended = fleet.now
    while not fleet.look():
        fleet.pass_time(0.05)
    assert round(fleet.now - ended, 1) == 0.5


def test_a_move_that_came_to_nothing_starts_no_cool_down() -> None:
    """Only a replica that really took a request is spared from giving one."""
    fleet = Fleet(pairing=Pairing(cooldown_s=5.0))
    fleet.crowd("full")
    fleet.say("idle")
    (begun,) = fleet.look()
    fleet.outcome(begun, NOTHING)
    stands = fleet.plan.standing(fleet.reports["idle"], fleet.now)
    assert (stands.in_s, stands.out_s) == (math.inf, math.inf)
    fleet.pass_time(1.0)
    (begun,) = fleet.look()
    fleet.outcome(begun, DONE)
    assert fleet.plan.standing(fleet.reports["idle"], fleet.now).in_s == 0.0
    assert fleet.plan.standing(fleet.reports["full"], fleet.now).out_s == 0.0


def test_a_silent_source_is_forgotten() -> None:
    """A source that never answers blocks its pair for a minute, not for ever; its late answer does no harm."""
    fleet = Fleet()
    fleet.crowd("full")
    fleet.say("idle")
    (begun,) = fleet.look()
    fleet.pass_time(FORGET_S)
    assert fleet.look() == []
    fleet.pass_time(1.0)
    fleet.look()
    assert fleet.plan.under_way == {}
    assert fleet.plan.totals["balance"]["unknown"] == 1
    fleet.outcome(begun, DONE)
    assert fleet.plan.standing(fleet.reports["idle"], fleet.now).incoming == 0


def test_the_cap_on_bytes_spreads_moves() -> None:
    """Under a cap the first move shows the size of a block; what it overdraws has to trickle in before the next."""
    fleet = Fleet(max_bytes_per_s=500.0, pairing=Pairing(cooldown_s=0.0))
    fleet.crowd("a", "b")
    fleet.say("c")
    fleet.say("d")
    (begun,) = fleet.look()  # two could go
    assert fleet.look() == []
    fleet.outcome(begun, DONE)  # 1,000 bytes where 500 were there
    ended = fleet.now
    fleet.pass_time(0.1)
    while not fleet.look():
        fleet.pass_time(0.1)
    assert 0.9 < fleet.now - ended < 1.3


def test_without_a_cap_as_many_go_as_there_are_pairs() -> None:
    """Two crowded and two idle replicas make two moves at once."""
    fleet = Fleet()
    fleet.crowd("a", "b")
    fleet.say("c")
    fleet.say("d")
    assert {(source, destination) for source, destination, _ in fleet.pairs()} in (
        {("a", "c"), ("b", "d")},
        {("a", "d"), ("b", "c")},
    )


def test_help_is_told_again_and_again_while_it_lasts() -> None:
    """A replica crowded with a lower tier hears of room elsewhere once a second, and no more when there is none."""
    fleet = Fleet()
    fleet.crowd("full", running=10)
    fleet.say("idle")
    told = []
    for _ in range(12):
        told.append(fleet.plan.helped(fleet.fleet, fleet.now))
        fleet.pass_time(0.25)
    assert told == [["full"], [], [], [], ["full"], [], [], [], ["full"], [], [], []]
    fleet.crowd("idle", running=10)
    assert [fleet.plan.helped(fleet.fleet, fleet.now) for _ in range(2)] == [[], []]
    fleet.say("idle")
    fleet.say("full", running=10, running_by_tier=[10], free_blocks=20)
    fleet.pass_time(1.0)
    assert fleet.plan.helped(fleet.fleet, fleet.now) == [], "there is nobody of a lower tier to move"


def test_without_a_grace_nobody_is_told() -> None:
    """`tier_grace_s` 0: lower tiers make way at once, everywhere."""
    fleet = Fleet(tier_grace_s=0.0)
    fleet.crowd("full", running=10)
    fleet.say("idle")
    assert fleet.plan.helped(fleet.fleet, fleet.now) == []


def test_state_can_be_printed() -> None:
    """The state is plain JSON: a row per replica, also for one that drains, moves under way, counts by outcome."""
    fleet = Fleet()
    fleet.crowd("full")
    fleet.say("idle")
    fleet.say("old", state="draining", running=1, running_by_tier=[1])
    (begun,) = fleet.look()
    fleet.now += 0.5
    state = json.loads(json.dumps(fleet.plan.state(fleet.fleet, fleet.now), allow_nan=False))
    assert state["moving"] == [{"source": "full", "destination": "idle", "reason": "balance", "seconds": 0.5}]
    assert (state["replicas"]["full"]["outgoing"], state["replicas"]["idle"]["incoming"]) == (1, 1)
    assert (state["replicas"]["old"]["state"], state["replicas"]["old"]["phi"]) == ("draining", None)
    fleet.outcome(begun, Given(1, [*DONE.outcomes, Moved("s", "rolled_back", "too_slow")]))
    assert fleet.plan.state(fleet.fleet, fleet.now)["moves"] == {"balance": {"done": 1, "rolled_back": 1}}
