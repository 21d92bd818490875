"""The hand-shake of a move: nothing lost, nothing run twice, nothing left behind, whatever goes wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policies.migration import destination as d
from policies.migration import events as e
from policies.migration import handshake as h
from policies.migration.refusals import REFUSALS, Traits, refusal
from policies.registry import PolicyError
from tests.policies.migration_rig import LIMITS, TOTAL, World


class Moves(RuleBasedStateMachine):
    """One move under every fault: lost, doubled, late messages, dead sides, clients that leave, preemptions, ends."""

    world: World

    @initialize(
        prompt=st.integers(1, 60),
        running=st.booleans(),
        must=st.booleans(),
        free=st.sampled_from([TOTAL, 20, 16, 3]),
        length=st.integers(1, 40) | st.just(10_000),
    )
    def begin(self, prompt: int, running: bool, must: bool, free: int, length: int) -> None:
        self.world = World(prompt, running=running, must=must, free=free)
        self.world.ends_at = length

    @rule(times=st.integers(1, 6))
    def goes_well(self, times: int) -> None:
        for _ in range(times):
            self.world.a_step()
            self.world.b_step()
            if self.world.channel:
                self.world.arrive(0)

    @rule()
    def a_acts(self) -> None:
        self.world.a_step()

    @rule(fails=st.sampled_from([False, False, False, True]))
    def b_acts(self, fails: bool) -> None:
        self.world.b_step(fails)

    @precondition(lambda self: self.world.channel)
    @rule(data=st.data(), fate=st.sampled_from(["arrives", "arrives", "lost", "doubled"]))
    def message(self, data: st.DataObject, fate: str) -> None:
        index = data.draw(st.integers(0, len(self.world.channel) - 1))
        if fate == "lost":
            self.world.channel.pop(index)
            return
        if fate == "doubled":
            self.world.channel.append(self.world.channel[index])
        self.world.arrive(index)

    @rule(tokens=st.integers(1, 8))
    def decode(self, tokens: int) -> None:
        for _ in range(tokens):
            self.world.a_decodes()

    @rule()
    def b_decodes(self) -> None:
        self.world.b_decodes()

    @rule(replica=st.sampled_from("AB"))
    def ingress(self, replica: str) -> None:
        self.world.ingress_step(replica)

    @rule(seconds=st.sampled_from([0.05, 0.3, 1.2, 3.5]))
    def time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule()
    def preempt(self) -> None:
        self.world.a_preempts()

    @rule()
    def client_leaves(self) -> None:
        self.world.client_leaves()

    @rule(replica=st.sampled_from("AB"))
    def lose(self, replica: str) -> None:
        self.world.lose(replica)

    @rule()
    def lose_engine(self) -> None:
        self.world.lose_engine()

    @rule()
    def lose_executor(self) -> None:
        self.world.executor = False

    @rule(replica=st.sampled_from("AB"))
    def mourn(self, replica: str) -> None:
        self.world.mourn(replica)

    @rule()
    def cut_off(self) -> None:
        self.world.partition = True
        self.world.channel.clear()

    @invariant()
    def each_token_comes_from_one_run(self) -> None:
        if hasattr(self, "world"):
            delivered = self.world.ingress.delivered
            assert delivered == sorted(delivered)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()
            self.world.check()


TestMoves = Moves.TestCase
TestMoves.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


POINTS: dict[str, Callable[[World], bool]] = {
    "proposed": lambda w: True,
    "reserved on B": lambda w: w.reserved > 0,
    "copying": lambda w: w.a.state is h.COPYING,
    "a stage written": lambda w: w.a.stages > 0,
    "parking": lambda w: w.a.state is h.PARKING,
    "parked": lambda w: w.status == "parked",
    "commit under way": lambda w: any(isinstance(sent[2], e.Commit) for sent in w.channel),
    "adopting": lambda w: w.b.state is d.ADOPTING,
    "adopted": lambda w: w.b.state is d.ADOPTED,
    "answer under way": lambda w: any(isinstance(sent[2], e.Committed) for sent in w.channel),
    "done": lambda w: w.a.state is h.DONE,
}


#: A waiting request has nothing to copy.
WAITING = [(point, False) for point in POINTS if point not in ("reserved on B", "copying", "a stage written")]


def cut_off(world: World) -> None:
    """A and B hear no more of each other."""
    world.partition = True
    world.channel.clear()


def end(world: World) -> None:
    """The request's next token on A is its last."""
    world.ends_at = world.made + 1
    world.a_decodes()


FAULTS: dict[str, Callable[[World], object]] = {
    "none": lambda w: None,
    "client leaves": World.client_leaves,
    "preempted on A": World.a_preempts,
    "ends on A": end,
    "A dies": lambda w: w.lose("A"),
    "A's engine dies": World.lose_engine,
    "A's executor dies": lambda w: setattr(w, "executor", False),
    "B dies": lambda w: w.lose("B"),
    "messages lost": lambda w: w.channel.clear(),
    "messages doubled": lambda w: w.channel.extend(w.channel),
    "cut off": cut_off,
    "B stands still": lambda w: w.pass_time(1.0),
    "all stand still": lambda w: w.pass_time(20.0),
}


def drive(world: World, until: Callable[[World], bool]) -> World:
    """Let all go well up to a point."""
    for turn in itertools.count():
        if until(world):
            return world
        assert turn < 500, "it never comes to this point"
        if turn % 4 == 0:
            world.a_step()
        elif turn % 4 == 1:
            world.b_step()
        elif turn % 4 == 2 and world.channel:
            world.arrive(0)
        elif turn % 16 == 15:
            world.b_decodes()
    raise AssertionError


@pytest.mark.parametrize(("point", "running"), [(point, True) for point in POINTS] + WAITING)
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_at_every_point(point: str, fault: str, running: bool) -> None:
    """Whatever happens wherever: the request is in one place, blocks are back, nothing is parked or reserved."""
    world = drive(World(40, running=running), POINTS[point])
    FAULTS[fault](world)
    world.settle()
    world.check()
    if fault == "none":
        assert (world.place, world.a.state) == ("B", h.DONE)


@pytest.mark.parametrize(
    ("point", "fault", "outcome", "reason", "place"),
    [
        ("proposed", "cut off", "aborted", "proposed_timeout", "A"),
        ("copying", "ends on A", "cancelled", "finished", "ended"),
        ("copying", "preempted on A", "cancelled", "preempted", "A"),
        ("copying", "client leaves", "cancelled", "aborted_by_client", "ended"),
        ("copying", "B dies", "aborted", "destination_lost", "A"),
        ("parking", "ends on A", "cancelled", "finished", "ended"),
        ("parking", "B stands still", "rolled_back", "parking_timeout", "A"),
        ("commit under way", "messages lost", "rolled_back", "not_committed", "A"),
        ("commit under way", "B dies", "rolled_back", "destination_lost", "A"),
        ("commit under way", "cut off", "aborted", "unresolved", "re-sent"),
        ("commit under way", "A's engine dies", "aborted", "source_lost", "B"),
        ("adopting", "B dies", "rolled_back", "destination_lost", "A"),
        ("answer under way", "messages lost", "done", "moved", "B"),
        ("answer under way", "cut off", "aborted", "unresolved", "B"),
        ("answer under way", "client leaves", "done", "moved", "ended"),
    ],
)
def test_how_a_fault_ends(point: str, fault: str, outcome: str, reason: str, place: str) -> None:
    """Each fault ends as the page says, and is counted under that name."""
    world = drive(World(40), POINTS[point])
    FAULTS[fault](world)
    world.settle()
    assert ([(c.outcome, c.reason) for c in world.counts if c.outcome != "expired"], world.place) == (
        [(outcome, reason)],
        place,
    )


def test_a_slow_destination_gives_up_its_claim() -> None:
    """B that has no token when asked drops the request for good: A goes on after one commit time-out and one answer."""
    world = drive(World(40), POINTS["adopting"])
    world.pass_time(LIMITS.commit_s)
    for _ in range(8):
        world.a_step()
        world.b_step()
        if world.channel:
            world.arrive(0)
    assert (world.a.state, world.status, world.pause) == (h.ROLLED_BACK, "running", pytest.approx(LIMITS.commit_s))
    world.tell_b(e.Commit(with_kv=True))
    assert world.b_queue == [d.Tell(e.CommitRefused("released"))]


def test_a_move_in_full() -> None:
    """Room first, then full blocks in stages while it decodes, then the pause, with the rest on the commit."""
    machine = h.SourceSide(h.Plan(held=6), LIMITS)
    steps: list[tuple[Any, ...]] = [
        machine.start(0.0),
        machine.handle(e.Reserved(8), 0.1),
        machine.handle(e.StageWritten(0, copied=2, left=3, held=6), 0.2),
        machine.handle(e.StageWritten(0, copied=2, left=3, held=6), 0.2),
        machine.handle(e.StageWritten(1, copied=2, left=1, held=6), 0.3),
        machine.handle(e.Parked(held=6), 0.4),
        machine.handle(e.Timeout(), 0.5),
        machine.handle(e.Committed(), 0.6),
    ]
    assert steps == [
        (e.Reserve(8, 3.0),),
        (e.ExportStage(0, 0, 2), e.Write(0, 0, 3.0)),
        (e.ExportStage(1, 2, 2), e.Write(1, 2, 3.0)),
        (),
        (e.Park(LIMITS.park_lease_s),),
        (e.ExportLast(4), e.Commit(with_kv=True)),
        (),
        (e.AnnounceMoved(confirmed=True), e.FreeOnSource(), e.Count("done", "moved")),
    ]


def test_a_waiting_request_moves_without_kv() -> None:
    """No stage and no block: a place in B's queue, out of A's, commit."""
    machine = h.SourceSide(h.Plan(held=0), LIMITS)
    steps = [machine.start(0.0), machine.handle(e.Reserved(0), 0.1), machine.handle(e.Parked(0), 0.2)]
    park = e.Park(LIMITS.park_lease_s)
    assert steps == [(e.Reserve(0, 3.0),), (park,), (e.ExportLast(0), e.Commit(with_kv=False))]


def test_room_grows_before_the_pause() -> None:
    """A request that outgrows its reservation gets more room while it decodes, and stays on A if it does so late."""
    machine = h.SourceSide(h.Plan(held=4), LIMITS)
    machine.start(0.0)
    machine.handle(e.Reserved(6), 0.0)
    assert machine.handle(e.StageWritten(0, copied=2, left=1, held=6), 0.1) == (e.Reserve(8, 3.0),)
    assert machine.handle(e.Reserved(6), 0.1) == ()
    assert machine.handle(e.Reserved(8), 0.1) == (e.Park(LIMITS.park_lease_s),)
    assert machine.handle(e.Parked(held=9), 0.2)[-1] == e.Count("rolled_back", "outgrown")


@pytest.mark.parametrize(("must", "state"), [(False, h.ABORTED), (True, h.PARKING)])
def test_a_link_slower_than_the_request_grows(must: bool, state: h.State) -> None:
    """Beyond its stages a move with blocks left is given up, but on a replica that goes away it pauses for them."""
    machine = h.SourceSide(h.Plan(held=4, must=must), LIMITS)
    machine.start(0.0)
    machine.handle(e.Reserved(1000), 0.0)
    for stage in range(4):
        assert machine.state is h.COPYING
        machine.handle(e.StageWritten(stage, copied=2, left=5, held=9), 0.1)
    assert machine.state is state


def test_taken_blocks_while_committing_ask_once() -> None:
    """A request that leaves its park by itself makes A ask B, once; the answer decides as ever."""
    machine = h.SourceSide(h.Plan(held=2), LIMITS)
    machine.start(0.0)
    machine.handle(e.Reserved(4), 0.0)
    machine.handle(e.Parked(held=2), 0.0)
    assert [machine.handle(e.Preempted(), 0.1) for _ in range(4)] == [(e.Query(),), (), (), ()]
    assert machine.handle(e.Committed(), 0.2)[0] == e.AnnounceMoved(confirmed=True)


def test_refusals_have_names() -> None:
    """What cannot be carried is refused under its own name, before B is asked for anything."""
    assert refusal(Traits()) is None
    for name in REFUSALS:
        machine = h.SourceSide(h.Plan(held=4, refused=refusal(Traits(**{name: True}))), LIMITS)
        assert machine.start(0.0) == (e.Count("aborted", name),)
        assert machine.over
    named = {"multimodal", "prompt_embeds", "pooling", "other_attention", "pipeline_parallel", "lora"}
    assert named <= set(REFUSALS)


def test_limits_refuse_what_cannot_work() -> None:
    """A lease shorter than a good move's silence, or a memory shorter than the lease, is refused by name."""
    for field, value in [("lease_s", 1.0), ("keep_s", 10.0), ("queries", 0), ("stage_blocks", 0), ("commit_s", 0)]:
        with pytest.raises(PolicyError, match=field) as caught:
            e.Limits(**{field: value})  # type: ignore[arg-type]  # one of each kind
        assert caught.value.field == field
    assert e.Limits().pause_s < e.Limits().park_lease_s


EVENTS: list[Any] = [
    *(e.Reserved(0), e.Reserved(8), e.Reserved(99), e.Refused("full"), e.Parked(0), e.Parked(6), e.Parked(200)),
    *(e.StageWritten(0, 2, 3, 6), e.StageWritten(1, 2, 0, 6), e.StageWritten(2, 0, 9, 200), e.Timeout()),
    *(e.Finished(), e.AbortedByClient(), e.Preempted(), e.DestinationLost(), e.SourceLost()),
    *(e.Committed(), e.CommitRefused("no")),
]


@given(st.sampled_from([0, 1, 6]), st.lists(st.tuples(st.sampled_from(EVENTS), st.floats(0, 1)), max_size=30))
def test_any_events_in_any_order(held: int, events: list[tuple[Any, float]]) -> None:
    """No sequence of events breaks the source: it ends, is counted once, and its pause keeps to the time-outs."""
    machine, now = h.SourceSide(h.Plan(held), LIMITS), 0.0
    done = [(now, action) for action in machine.start(now)]
    for event, later in events:
        until = now + later
        while machine.deadline() <= until:
            now = machine.deadline()
            done += [(now, action) for action in machine.handle(e.Timeout(), now)]
        now = until
        done += [(now, action) for action in machine.handle(event, now)]
    while not machine.over:
        now = machine.deadline()
        done += [(now, action) for action in machine.handle(e.Timeout(), now)]
    when = {type(action): moment for moment, action in done}
    counted = [action.outcome for _, action in done if isinstance(action, e.Count)]
    assert counted == [machine.state.value]
    assert sum(isinstance(action, e.Park) for _, action in done) <= 1
    if e.Park in when:
        assert when[e.Count] - when[e.Park] <= LIMITS.pause_s + 1e-9
        goes_on = [action for _, action in done if isinstance(action, e.Unpark | e.FreeOnSource)]
        assert len(goes_on) == 1 or machine.state in (h.CANCELLED, h.ABORTED)
    if e.Commit not in when:
        assert e.ReleaseOnDestination in when
