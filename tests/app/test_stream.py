"""The guard of one sequence: each token once and from one run, whatever the sockets of its replicas bring, and when."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from app import stream as guard
from app.incoming import Incoming
from app.stream import Stream
from app.vllm_compat import SamplingParams
from deployments.wire import Delta


def new_stream(epoch: int = 1) -> Stream:
    """A stream in this epoch."""
    stream = Stream("rid", [1, 2, 3], SamplingParams(max_tokens=9), 12.5, Incoming(1), epoch=epoch - 1)
    stream.submit()
    return stream


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 12), st.integers(1, 4)), max_size=60))
def test_takes_only_what_is_next(deltas: list[tuple[int, int, int]]) -> None:
    """Whatever deltas come, the delivered tokens are the positions 0, 1, 2, ... of the current epoch, each once."""
    stream = new_stream(epoch=2)
    for epoch, start, size in deltas:
        before = len(stream.delivered)
        taken = stream.take(Delta("rid", epoch, start, list(range(start, start + size))), 0.0)
        assert bool(taken) == (epoch == 2 and start == before)
        assert len(stream.delivered) == before + (size if taken else 0)
    assert stream.delivered == list(range(len(stream.delivered)))


Token = tuple[int, int]  # the hop that made it, its index


@dataclass
class Run:
    """One run of the sequence: the tokens before it, as its replica knows them, its own, and the deltas of them."""

    hop: int
    tokens: list[Token]
    start: int
    deltas: list[Delta]

    @property
    def parent(self) -> int:
        return self.tokens[self.start - 1][0] if self.start else 0


def encode(token: Token) -> int:
    """A token id that says who made it."""
    return token[0] * 1000 + token[1]


@st.composite
def histories(draw: st.DrawFn, *, faults: bool) -> list[Run]:
    """Runs of one sequence in an epoch; with `faults` a run may go on after it was given away, and be moved again."""
    runs: list[Run] = []
    for hop in range(draw(st.integers(1, 4))):
        begun: list[Token] = []
        if runs:
            before = draw(st.sampled_from(runs)) if faults else runs[-1]
            at = draw(st.integers(before.start, len(before.tokens))) if faults else len(before.tokens)
            begun = before.tokens[:at]
        own = draw(st.integers(0 if hop == 0 else 1, 6))
        run = Run(hop, begun + [(hop, len(begun) + i) for i in range(own)], len(begun), [])
        position = run.start
        while position < len(run.tokens):
            size = draw(st.integers(1, 3))
            ids = [encode(token) for token in run.tokens[position : position + size]]
            first = position == run.start and hop > 0
            sender, parent = (f"replica-{hop}", run.parent) if first else (None, 0)
            run.deltas.append(Delta("rid", 1, position, ids, hop=hop, sender=sender, parent=parent))
            position += len(ids)
        runs.append(run)
    return runs


@st.composite
def arrivals(draw: st.DrawFn, runs: list[Run]) -> list[Delta]:
    """The deltas of all runs in an order in which sockets may bring them, some twice."""
    links, order = [list(run.deltas) for run in runs], list[Delta]()
    while any(links):
        link = draw(st.sampled_from([link for link in links if link]))
        order.append(link.pop(0))
        if draw(st.integers(0, 9)) == 0:
            order.append(draw(st.sampled_from(order)))
    return order


@given(st.data())
def test_moves_in_any_order_of_arrival(data: st.DataObject) -> None:
    """Moved from run to run, the client gets every token of every run in order, however their sockets race."""
    runs = data.draw(histories(faults=False))
    stream, given = new_stream(), list[int]()
    for delta in data.draw(arrivals(runs)):
        for taken in stream.take(delta, 0.0):
            given += taken.token_ids
    assert given == stream.delivered == [encode(token) for token in runs[-1].tokens]
    last = next((run for run in reversed(runs) if run.deltas), runs[0])
    assert stream.hop == last.hop
    assert stream.sender == (f"replica-{last.hop}" if last.hop else None)
    assert not stream._held


@given(st.data())
def test_runs_that_should_not_be_are_never_mixed(data: st.DataObject) -> None:
    """When a replica goes on after a move, and both are moved again, the client has what one run made of one prefix."""
    runs = data.draw(histories(faults=True))
    stream = new_stream()
    before: list[int] = []
    for delta in data.draw(arrivals(runs)):
        stream.take(delta, 0.0)
        assert stream.delivered[: len(before)] == before, "a token was taken back"
        before = list(stream.delivered)
        current = next(run for run in runs if run.hop == stream.hop)
        assert before == [encode(token) for token in current.tokens[: len(before)]]
    for hop in stream._held:
        assert not stream.is_barred(hop)


def delta(
    start: int, *ids: int, finish: str | None = None, hop: int = 0, sender: str | None = None, parent: int = 0
) -> Delta:
    """A delta of epoch 1."""
    return Delta("rid", 1, start, list(ids), finish, hop=hop, sender=sender, parent=parent)


def test_a_run_that_starts_behind_is_barred_for_good() -> None:
    """A roll-back whose destination speaks all the same: the source's tokens go on, the other's never come."""
    stream = new_stream()
    stream.take(delta(0, 10, 11), 0.0)
    stream.news.clear()
    assert stream.take(delta(1, 99, hop=1, sender="B"), 0.0) == []
    assert stream.is_barred(1)
    assert stream.news.is_set(), "who attached to it must know"
    assert stream.take(delta(2, 99, hop=1), 0.0) == []
    assert stream.take(delta(2, 99, hop=2, sender="C", parent=1), 0.0) == [], "nor what goes on from it"
    assert stream.is_barred(2)
    stream.take(delta(2, 12), 0.0)
    assert stream.take(delta(3, 13, hop=3, sender="C"), 0.0) != [], "a later move goes well"
    assert (stream.delivered, stream.hop, stream.sender) == ([10, 11, 12, 13], 3, "C")


def test_the_older_run_is_left_for_good() -> None:
    """Once the newer run has delivered, the older one's next tokens are not the client's."""
    stream = new_stream()
    stream.take(delta(0, 10), 0.0)
    stream.take(delta(1, 20, hop=1, sender="B"), 0.0)
    assert stream.take(delta(2, 99), 0.0) == []
    assert stream.delivered == [10, 20]


def test_a_hop_without_its_first_delta_is_not_taken() -> None:
    """Tokens of an unseen hop that do not say where they come from are not the first of it."""
    stream = new_stream()
    assert stream.take(delta(0, 99, hop=1), 0.0) == []
    assert stream.take(delta(0, 10), 0.0) != []


def test_what_is_held_is_bounded() -> None:
    """A hop that waits too long for the tokens before it is given up."""
    stream = new_stream()
    stream.take(delta(1, 20, hop=1, sender="B"), 0.0)
    for index in range(2, guard.MAX_HELD + 1):
        stream.take(delta(index, 20, hop=1), 0.0)
    assert not stream.is_barred(1)
    stream.take(delta(guard.MAX_HELD + 1, 20, hop=1), 0.0)
    assert stream.is_barred(1)
    assert not stream._held
    assert stream.take(delta(0, 10), 0.0) != []
    assert stream.delivered == [10]


def test_a_new_epoch_knows_nothing_of_the_old_hops() -> None:
    """What was held or barred before a re-send does not count after it, and what comes late is dropped."""
    stream = new_stream()
    stream.take(delta(0, 10), 0.0)
    stream.take(delta(0, 99, hop=1, sender="B"), 0.0)
    stream.take(delta(5, 99, hop=2, sender="C"), 0.0)
    stream.submit()
    assert (stream.epoch, stream.hop, stream.sender) == (2, 0, None)
    assert stream.take(delta(1, 99, hop=2, sender="C"), 0.0) == []
    assert stream.take(Delta("rid", 2, 1, [11]), 0.0) != []
    assert stream.take(Delta("rid", 2, 2, [12], hop=1, sender="D"), 0.0) != []
    assert stream.delivered == [10, 11, 12]


def test_the_end_ends_it() -> None:
    """After the last token nothing is taken; a finish that waited for the tokens before it comes with them."""
    stream = new_stream()
    assert stream.take(delta(1, 20, hop=1, sender="B", finish="stop"), 0.0) == []
    assert [d.token_ids for d in stream.take(delta(0, 10), 0.0)] == [[10], [20]]
    assert stream.finished
    assert stream.take(delta(2, 99, hop=1), 0.0) == []
    assert stream.take(delta(2, 99, hop=2, sender="C", parent=1), 0.0) == []
    assert stream.delivered == [10, 20]


def test_an_engines_abort_is_no_end() -> None:
    """What an engine aborts has moved, or nobody wants it: the client's stream does not end by it."""
    stream = new_stream()
    stream.take(delta(0, 10), 0.0)
    assert stream.take(delta(1, finish="abort"), 0.0) == []
    assert not stream.finished
    assert stream.take(delta(1, 20, hop=1, sender="B"), 0.0) != []
