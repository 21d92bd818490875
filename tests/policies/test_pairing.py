"""Which replica gives to which, and which request: gaps shrink, nothing swings back, bounds hold."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.freeness import freeness, normalised
from policies.migration.pairing import REASONS, Move, Pairing
from policies.migration.standing import Standing, gap_after, standing
from policies.migration.victims import Candidate, Victims
from policies.registry import PolicyError
from policies.tiers import SINGLE, Tiers, decaying_headroom

TIERS = Tiers(decaying_headroom(3), (30.0, 30.0, math.inf))
M, SEQS = 200, 16


@dataclass
class Replica:
    """Requests as (tier, blocks), running and waiting; what it reports follows from them."""

    running: list[tuple[int, int]] = field(default_factory=list)
    waiting: list[tuple[int, int]] = field(default_factory=list)
    state: str = "serving"

    @property
    def free(self) -> int:
        """Free KV blocks."""
        return M - sum(blocks for _, blocks in self.running)

    def usage(self) -> Any:
        """Its load report."""
        return SimpleNamespace(
            state=self.state,
            free_blocks=self.free,
            total_blocks=M,
            max_num_seqs=SEQS,
            head_blocks=self.waiting[0][1] if self.waiting else 0,
            running=len(self.running),
            waiting=len(self.waiting),
            running_by_tier=[sum(tier == p for tier, _ in self.running) for p in range(3)],
            waiting_by_tier=[sum(tier == p for tier, _ in self.waiting) for p in range(3)],
        )


REQUEST = st.tuples(st.integers(0, 2), st.integers(1, 40))


@st.composite
def replicas(draw: st.DrawFn, waits: bool = True, drains: bool = True) -> Replica:
    """A replica whose runners fit its memory and its sequence slots."""
    replica = Replica(state=draw(st.sampled_from(["serving"] * 4 + ["draining"] * drains)))
    for tier, blocks in draw(st.lists(REQUEST, max_size=SEQS)):
        if blocks <= replica.free:
            replica.running.append((tier, blocks))
    if waits:
        replica.waiting = draw(st.lists(REQUEST, max_size=3))
    return replica


def fleets(**kinds: bool) -> st.SearchStrategy[dict[str, Replica]]:
    """Two to five replicas by name."""
    return st.lists(replicas(**kinds), min_size=2, max_size=5).map(
        lambda found: {f"r{i}": replica for i, replica in enumerate(found)}
    )


def seen(fleet: dict[str, Replica], tiers: Tiers = TIERS) -> list[Standing]:
    """What the coordinator sees of them."""
    return [standing(name, replica.usage(), tiers) for name, replica in fleet.items()]


def candidates(replica: Replica) -> list[Candidate]:
    """Its runners, all decoding, as `victims` sees them."""
    return [Candidate(f"{i:02}", tier, blocks, "decode", 500) for i, (tier, blocks) in enumerate(replica.running)]


def carry_out(fleet: dict[str, Replica], move: Move) -> bool:
    """Choose the victim and move it at once; False if none may go."""
    source, destination = fleet[move.source], fleet[move.destination]
    victim = Victims().choose(move, candidates(source))
    if victim is None:
        return False
    destination.running.append(source.running.pop(int(victim.request_id)))
    return True


@given(fleets(), st.booleans())
def test_phi_is_that_of_freeness(fleet: dict[str, Replica], tiered: bool) -> None:
    """A standing's phi is normalised freeness; an idle replica counts as a batch of one, a draining one is -inf."""
    tiers = TIERS if tiered else SINGLE
    for replica, figures in zip(fleet.values(), seen(fleet, tiers), strict=True):
        phi = normalised(freeness(replica.usage(), tiers), replica.usage())
        assert figures.phi == pytest.approx(SEQS if phi == math.inf else phi)


@given(fleets(), st.permutations(range(5)), st.integers(1, 3))
def test_moves_do_not_depend_on_order(fleet: dict[str, Replica], order: list[int], per_replica: int) -> None:
    """The same fleet in another order, or asked again, gives the same moves: ties go by replica id."""
    figures = seen(fleet)
    shuffled = [figures[i] for i in order if i < len(figures)]
    pairing = Pairing(per_replica=per_replica)
    assert pairing.moves(figures) == pairing.moves(figures) == pairing.moves(shuffled)


@given(fleets(), st.integers(1, 3))
def test_bounds_of_a_tick(fleet: dict[str, Replica], per_replica: int) -> None:
    """Never to a replica that drains or whose queue is blocked, from one with higher phi, beyond slots or 30 %."""
    figures = {figure.replica: figure for figure in seen(fleet)}
    moves = Pairing(per_replica=per_replica).moves(list(figures.values()))
    for move in moves:
        source, destination = figures[move.source], figures[move.destination]
        assert destination.state == "serving"
        assert not destination.blocked
        assert source.phi < destination.phi
        assert (move.reason == "drain") == (source.state == "draining")
        assert move.budget > 0
    for name, figure in figures.items():
        coming = [move.budget for move in moves if move.destination == name]
        going = [move for move in moves if move.source == name]
        assert len(coming) <= per_replica
        assert len(going) <= (4 if figure.state == "draining" else per_replica)
        assert sum(coming) <= 0.3 * figure.free_blocks
        assert figure.running + len(coming) <= SEQS or not coming
    assert [REASONS.index(move.reason) for move in moves] == sorted(REASONS.index(move.reason) for move in moves)


@given(fleets(waits=False, drains=False), st.data())
def test_every_victim_that_may_go_narrows_the_gap(fleet: dict[str, Replica], data: st.DataObject) -> None:
    """Any runner that a `balance` move admits leaves 0 <= gap after < gap before, and blocks left."""
    for move in Pairing().moves(seen(fleet)):
        source, destination = fleet[move.source], fleet[move.destination]
        able = [i for i, (tier, blocks) in enumerate(source.running) if move.admits(tier, blocks)]
        if not able:
            continue
        before = {figure.replica: figure.phi for figure in seen(fleet)}
        index = data.draw(st.sampled_from(able))
        destination.running.append(source.running.pop(index))
        after = {figure.replica: figure for figure in seen(fleet)}
        gap = after[move.destination].phi - after[move.source].phi
        assert -1e-9 <= gap < before[move.destination] - before[move.source]
        assert after[move.destination].left >= -1e-9
        source.running.insert(index, destination.running.pop())


@given(replicas(waits=False, drains=False), replicas(waits=False, drains=False))
def test_no_ping_pong(one: Replica, other: Replica) -> None:
    """With no other change, moves between two replicas all go one way, narrow the gap each time, and come to an end."""
    fleet, directions, gaps = {"a": one, "b": other}, set(), list[float]()
    pairing = Pairing(cooldown_s=0)
    for _ in range(2 * SEQS + 1):
        phi = {figure.replica: figure.phi for figure in seen(fleet)}
        gaps.append(abs(phi["a"] - phi["b"]))
        moves = pairing.moves(seen(fleet))
        if not moves or not carry_out(fleet, moves[0]):
            break
        directions.add(moves[0].source)
    else:
        pytest.fail("it never settles")
    assert len(directions) <= 1
    assert all(later < earlier for earlier, later in itertools.pairwise(gaps))


@given(fleets(), st.integers(0, 2), st.integers(1, 60))
def test_sizes_are_all_that_fit(fleet: dict[str, Replica], tier: int, blocks: int) -> None:
    """A size that a `balance` move refuses would break a bound: the gap's, the destination's memory, or 30 % of KV."""
    figures = {figure.replica: figure for figure in seen(fleet)}
    balance = [move for move in Pairing().moves(list(figures.values())) if move.reason == "balance"]
    for move in balance[:1]:
        source, destination = figures[move.source], figures[move.destination]
        if move != Pairing().moves(list(figures.values()))[0] or not source.requests(tier) or move.admits(tier, blocks):
            continue
        new = 0 if destination.requests(tier) else destination.kept(tier)
        gap = gap_after(source, destination, tier, blocks)
        narrows = 0 <= gap < destination.phi - source.phi
        assert not (narrows and blocks <= destination.left - new and blocks <= 0.3 * destination.free_blocks)


def test_threshold() -> None:
    """A gap below the threshold is left alone, one above it is not."""
    fleet = {"a": Replica([(0, 10)] * 8), "b": Replica([(0, 10)] * 7)}
    low, high = sorted(figure.phi for figure in seen(fleet, SINGLE))
    assert Pairing(threshold=high - low + 0.01).moves(seen(fleet, SINGLE)) == []
    assert [move.source for move in Pairing(threshold=high - low - 0.01).moves(seen(fleet, SINGLE))] in ([], ["a"])
    fleet["b"] = Replica([(0, 10)] * 2)
    assert [(m.source, m.destination, m.reason) for m in Pairing().moves(seen(fleet, SINGLE))] == [
        ("a", "b", "balance")
    ]


def test_order_of_reasons() -> None:
    """A drain takes the only slot before a tier that waits, that before a blocked queue, that before balance."""
    busy, queue = [(2, 12)] * 16, [(0, 30)]
    fleet = {"free": Replica(), "drain": Replica([(1, 5)], state="draining"), "tier": Replica(busy, queue)}
    assert [move.reason for move in Pairing().moves(seen(fleet))] == ["drain"]
    del fleet["drain"]
    (move,) = Pairing().moves(seen(fleet))
    assert (move.reason, move.source, move.waiting_tier) == ("tier", "tier", 0)
    fleet["tier"].waiting = [(2, 30)]
    assert [move.reason for move in Pairing().moves(seen(fleet))] == ["defragment"]
    fleet["tier"].waiting = []
    assert [move.reason for move in Pairing().moves(seen(fleet))] == ["balance"]


@given(fleets(waits=False, drains=False))
def test_who_can_be_relieved(fleet: dict[str, Replica]) -> None:
    """A crowded replica is told of help exactly if a top-tier request that waits there would make a `tier` move.

    Both ways: with help a move follows, and without it none does, whatever waits there.
    """
    relieved = Pairing().relieved(seen(fleet))
    for name, replica in fleet.items():
        full = replica.free < M / 10 or len(replica.running) >= SEQS
        replica.waiting = [(0, M + 1)]
        moves = [(move.reason, move.source) for move in Pairing().moves(seen(fleet))]
        replica.waiting = []
        if name in relieved:
            assert full
            assert ("tier", name) in moves
        elif full and replica.state == "serving":
            assert ("tier", name) not in moves


def test_cool_downs_and_moves_under_way() -> None:
    """A replica that just took does not give, one that just gave does not take, moves under way use up the slots."""
    a, b = seen({"a": Replica([(0, 24)] * 8), "b": Replica()}, SINGLE)
    assert len(Pairing().moves([a, b])) == 1
    assert len(Pairing(per_replica=2).moves([replace(a, outgoing=1), replace(b, incoming=1)])) == 1
    for tired in ([replace(a, in_s=0.5), b], [a, replace(b, out_s=0.5)], [replace(a, outgoing=1), b]):
        assert Pairing().moves(tired) == []
    assert Pairing().moves([a, replace(b, incoming=1)]) == []
    batch = seen({"b": Replica([(0, 1)] * SEQS)}, SINGLE)[0]
    assert Pairing().moves([a, batch]) == []
    assert Pairing(per_replica=2).moves([a, replace(batch, running_by_tier=(SEQS - 1,), incoming=1)]) == []
    assert len(Pairing(per_replica=2).moves([a, replace(batch, running_by_tier=(SEQS - 1,))])) == 1
    drained = replace(a, state="draining", in_s=0.5)
    assert [move.reason for move in Pairing().moves([drained, replace(b, out_s=0.5)])] == ["drain"]


def test_a_move_too_small_to_help() -> None:
    """Where fewer runners share a deficit, a small move would widen the gap: only larger ones are admitted."""
    a, b = seen({"a": Replica([(0, 90)] * 2), "b": Replica()}, SINGLE)
    (move,) = Pairing().moves([replace(a, left=-100.0), b])
    assert move.room == ((26, 60),) + ((1, 0),) * 2


def test_defragmenting_needs_room_in_the_fleet() -> None:
    """A blocked head makes runners leave only if the fleet has as many free blocks as it wants."""
    fleet = {"a": Replica([(0, 15)] * 12, [(0, 120)]), "b": Replica([(0, 10)] * 10)}
    assert [move.reason for move in Pairing().moves(seen(fleet, SINGLE))] == ["defragment"]
    fleet["a"].waiting = [(0, 121)]
    assert "defragment" not in [move.reason for move in Pairing().moves(seen(fleet, SINGLE))]


def test_bytes_cap() -> None:
    """An empty allowance moves nothing; a small one lets a single larger move through and ends the tick."""
    fleet = seen({f"r{i}": Replica([(0, 10)] * 12) if i % 2 else Replica() for i in range(6)}, SINGLE)
    assert [len(Pairing().moves(fleet, allowance)) for allowance in (math.inf, 1, 0, -3)] == [3, 1, 0, 0]


@given(fleets(), st.data())
def test_barred_pairs_are_passed_over(fleet: dict[str, Replica], data: st.DataObject) -> None:
    """No move is made that is barred; barring what would not have been made anyway changes nothing."""
    figures = seen(fleet)
    made = [(move.reason, move.source, move.destination) for move in Pairing().moves(figures)]
    barred = set(data.draw(st.lists(st.sampled_from(made)))) if made else set()
    left = [(move.reason, move.source, move.destination) for move in Pairing().moves(figures, barred=barred)]
    assert not barred & set(left)
    others = set(itertools.product(REASONS, fleet, fleet)) - set(made)
    assert [(m.reason, m.source, m.destination) for m in Pairing().moves(figures, barred=others)] == made


MOVE = Move("a", "b", "balance", ((1, 50),) * 3)


@given(st.lists(st.tuples(REQUEST, st.sampled_from(["head", "waiting", "prefill", "decode"])), max_size=12))
def test_victims_order(rows: list[tuple[tuple[int, int], Any]]) -> None:
    """Lowest tier, then waiting before running, then fewest blocks, then id; never one in prefill."""
    asked = [Candidate(f"{i:02}", tier, blocks, place, 500) for i, ((tier, blocks), place) in enumerate(rows)]
    left, chosen = list(asked), list[Candidate]()
    while (victim := Victims().choose(MOVE, left)) is not None:
        chosen.append(victim)
        left.remove(victim)
    assert {c.place for c in left} <= {"prefill"}
    keys = [(-c.tier, c.place == "decode", c.blocks, c.request_id) for c in chosen]
    assert keys == sorted(keys)


@given(st.lists(st.tuples(REQUEST, st.sampled_from(["head", "waiting", "prefill", "decode"])), max_size=12))
def test_a_waiting_tier_moves_only_lower_runners(rows: list[tuple[tuple[int, int], Any]]) -> None:
    """For `tier` the victim runs and is of a tier strictly below the one that waits, or there is none."""
    asked = [Candidate(f"{i:02}", tier, blocks, place, 500) for i, ((tier, blocks), place) in enumerate(rows)]
    victim = Victims().choose(replace(MOVE, reason="tier", waiting_tier=1), asked)
    lower = [c for c in asked if c.tier == 2 and c.place == "decode"]
    assert (victim in lower) if lower else victim is None


@given(
    st.lists(st.tuples(REQUEST, st.sampled_from(["head", "waiting", "prefill", "decode"])), max_size=12),
    st.integers(1, 6),
    st.integers(1, 120),
)
def test_several_of_a_queue_are_no_more_than_one(
    rows: list[tuple[tuple[int, int], Any]], requests: int, most: int
) -> None:
    """What goes at once is the one that would go alone, with others of the queue: of its tier, together in its room."""
    asked = [Candidate(f"{i:02}", tier, blocks, place, 500) for i, ((tier, blocks), place) in enumerate(rows)]
    move = replace(MOVE, room=((1, most),) * 3, requests=requests)
    chosen = Victims().choose_all(move, asked)
    assert chosen[:1] == ([] if (one := Victims().choose(move, asked)) is None else [one])
    assert len(chosen) <= requests
    if len(chosen) > 1:
        assert {c.place for c in chosen} <= {"head", "waiting"}
        assert len({(c.tier, c.request_id) for c in chosen}) == len(chosen)
        assert {c.tier for c in chosen} == {chosen[0].tier}
        assert sum(c.blocks for c in chosen) <= most
    elif chosen and chosen[0].place != "decode" and requests > 1:
        rest = [c for c in asked if c.tier == chosen[0].tier and c.place in ("head", "waiting") and c != chosen[0]]
        assert not rest or chosen[0].blocks + min(c.blocks for c in rest) > most


def test_as_many_go_as_there_are_seats() -> None:
    """A queue goes to an idle replica in one move, no more of it than that has sequence slots."""
    queue = Replica(running=[(0, 10)] * SEQS, waiting=[(0, 5)] * 9)
    alone = Replica(running=[(0, 10)] * SEQS)
    for taken, seats in ((0, 9), (SEQS - 6, 6)):
        other = standing("b", Replica(running=[(0, 1)] * taken).usage())
        (move,) = (m for m in Pairing().moves([standing("a", queue.usage()), other]) if m.reason == "balance")
        assert move.requests == seats
    (move,) = Pairing().moves([standing("a", alone.usage()), standing("b", Replica().usage())])
    assert (move.reason, move.requests) == ("balance", 1)


def test_who_stays() -> None:
    """Too large, just moved, nearly done, refused, under way or behind a blocked head: each alone keeps a request."""
    able = Candidate("a", 1, 10, "decode", 500)
    assert Victims().choose(MOVE, [able]) == able
    stays = (
        *(replace(able, blocks=51), replace(able, moved_s=4.9), replace(able, tokens_left=31)),
        *(replace(able, refused="lora"), replace(able, place="prefill"), replace(able, tier=3)),
    )
    assert [Victims().choose(MOVE, [request]) for request in stays] == [None] * 6
    assert Victims().choose(MOVE, [able], busy={"a"}) is None
    behind, head = replace(able, place="waiting"), replace(able, place="head")
    assert Victims().choose(MOVE, [replace(behind, tokens_left=1)]) is not None  # it has all its answer before it
    assert Victims().choose(replace(MOVE, reason="defragment"), [behind]) is None
    assert Victims().choose(replace(MOVE, reason="defragment"), [behind, head]) == head
    for reason in ("drain", "hand"):
        leaving = replace(MOVE, reason=reason)
        went = [Victims().choose(leaving, [request]) is not None for request in stays]
        assert went == [False, True, True] + [False] * 3


@pytest.mark.parametrize(
    ("made", "field"),
    [
        (lambda: Pairing(threshold=0), "threshold"),
        (lambda: Pairing(per_replica=0), "per_replica"),
        (lambda: Pairing(share=1.5), "share"),
        (lambda: Pairing(cooldown_s=-1), "cooldown_s"),
        (lambda: Victims(cooldown_s=math.nan), "cooldown_s"),
        (lambda: Victims(min_remaining=-1), "min_remaining"),
    ],
)
def test_refused_parameters(made: Any, field: str) -> None:
    """A parameter out of range is refused with its name."""
    with pytest.raises(PolicyError) as caught:
        made()
    assert caught.value.field == field
