"""What a move is driven by: actions in order, deadlines, messages as bytes, and the gate that deltas pass."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from deployments.migration import messages
from deployments.migration.driver import Driver, Step
from deployments.migration.sequence import Sequence
from deployments.wire import Delta, Logprobs, Outcome, Submit
from policies.migration import destination as d
from policies.migration import events as e

from .virtual_loop import run_virtual


class Echo:
    """A machine whose actions are its events, and whose deadline is set by hand."""

    def __init__(self) -> None:
        self.due = math.inf

    def handle(self, event: Any, now: float) -> tuple[Any, ...]:
        if isinstance(event, e.Timeout):
            self.due = math.inf
            return (f"timeout at {now:.1f}",)
        return tuple(event)

    def deadline(self) -> float:
        return self.due


class Bench:
    """A driver whose actions are words: `slow` takes a second, `broken` raises, `tell` feeds another event."""

    def __init__(self) -> None:
        self.machine = Echo()
        self.done: list[str] = []
        self.errors: list[str] = []
        self.driver = Driver(self.machine, self.perform, lambda error: self.errors.append(str(error)))

    def perform(self, action: str) -> Step | None:
        if action == "slow":
            return self.slow()
        if action == "broken":
            raise ValueError("broken")
        self.done.append(action)
        if action == "tell":
            self.driver.feed(["told"])
        return None

    async def slow(self) -> None:
        await asyncio.sleep(1.0)
        self.done.append("slow")


def test_actions_keep_their_order() -> None:
    """An action that takes time holds up those after it, also those of later events; one that fails does not."""

    async def scenario() -> None:
        bench = Bench()
        bench.driver.feed(["one", "tell", "slow", "two", "broken", "three"])
        assert bench.done == ["one", "tell"]
        bench.driver.feed(["four"])
        await asyncio.sleep(0.9)
        assert bench.done == ["one", "tell"]
        await asyncio.sleep(0.2)
        assert bench.done == ["one", "tell", "slow", "two", "three", "told", "four"]
        assert bench.errors == ["broken"]

    run_virtual(scenario())


def test_deadlines_are_kept_while_an_action_is_under_way() -> None:
    """The machine hears of its deadline at its second, though what it wants done then has to wait."""

    async def scenario() -> None:
        bench = Bench()
        bench.machine.due = 0.5
        bench.driver.feed(["slow"])
        await asyncio.sleep(2.0)
        assert bench.done == ["slow", "timeout at 0.5"]

    run_virtual(scenario())


def test_closed_driver_does_nothing() -> None:
    """After `close` no event, action or deadline counts, and what is under way is cancelled."""

    async def scenario() -> None:
        bench = Bench()
        bench.machine.due = 0.5
        bench.driver.feed(["slow", "two"])
        bench.driver.close()
        bench.driver.feed(["three"])
        await asyncio.sleep(2.0)
        assert bench.done == []
        assert bench.errors == []

    run_virtual(scenario())


@pytest.mark.parametrize(
    "event", [e.Reserve(7, 3.0), e.Write(2, 32, 3.0), e.Commit(with_kv=True), e.Query(), e.ReleaseOnDestination()]
)
def test_messages_travel(event: e.ToDestination) -> None:
    """What A asks is what B hears."""
    submit = Submit("r", 1, "tcp://x", [1, 2], b"p", 0.0, output=[3], hop=2)
    sent = messages.message("m", event, fingerprint="f", first=3, blocks=4, computed=70, submit=submit, parent=1)
    heard = messages.decode_message(messages.encode(sent))
    assert heard == sent
    assert heard.event == event


@pytest.mark.parametrize(
    "answer", [None, e.Reserved(8), e.Refused("no_blocks"), d.Stored(1), e.Committed(), e.CommitRefused("too_slow")]
)
def test_answers_travel(answer: messages.Answer | None) -> None:
    """What B answers is what A hears, silence included."""
    assert messages.decode_answer(messages.encode_answer(answer)) == answer


def test_deltas_behind_the_hold_wait() -> None:
    """Held back is what lies behind an index, to the token; then it is passed on, or dropped with the sequence."""

    async def scenario(moved: bool) -> list[Delta]:
        sent: list[Delta] = []
        sequence = Sequence(Submit("r", 1, "tcp://x", [1], b"", 0.0), sent.append)
        rows = Logprobs(2, list(range(8)), [0.5 * i for i in range(8)], [1, 2, 3, 4])
        sequence.emit(Delta("r", 1, 0, [10], cached_tokens=0))
        sequence.hold(3)
        assert not await sequence.reach(3, 0.1)
        reached = asyncio.ensure_future(sequence.reach(3, 1.0))
        await asyncio.sleep(0)
        sequence.emit(Delta("r", 1, 1, [11, 12, 13, 14], "length", logprobs=rows))
        assert await reached
        early = Delta("r", 1, 1, [11, 12], logprobs=Logprobs(2, [0, 1, 2, 3], [0.0, 0.5, 1.0, 1.5], [1, 2]))
        assert sent == [Delta("r", 1, 0, [10], cached_tokens=0), early]
        if moved:
            sequence.shut(Outcome(3, moved_to="b", hop=1))
        sequence.pass_on()
        sequence.emit(Delta("r", 1, 5, [15]))
        assert sequence.outcome.done() == moved
        return sent[2:]

    late = Delta("r", 1, 3, [13, 14], "length", logprobs=Logprobs(2, [4, 5, 6, 7], [2.0, 2.5, 3.0, 3.5], [3, 4]))
    assert run_virtual(scenario(moved=False)) == [late, Delta("r", 1, 5, [15])]
    assert run_virtual(scenario(moved=True)) == []


def test_first_delta_of_a_hop_names_its_sender() -> None:
    """The ingress learns from the first delta whom to attach to and what it goes on from; held back it is till then."""

    async def scenario() -> None:
        sent: list[Delta] = []
        first: list[bool] = []
        sequence = Sequence(Submit("r", 1, "", [1], b"", 0.0, output=[10, 11], hop=3), sent.append, "b", parent=2)
        sequence.on_first = lambda: first.append(bool(sent))
        sequence.emit(Delta("r", 1, 2, [12], hop=3))
        sequence.emit(Delta("r", 1, 3, [13], hop=3))
        assert (first, sent) == ([False], [])
        sequence.pass_on()
        assert sent == [Delta("r", 1, 2, [12], hop=3, sender="b", parent=2), Delta("r", 1, 3, [13], hop=3)]
        assert (sequence.made(2), sequence.made(3), sequence.next_hop(), sequence.next_hop()) == (2, 3, 4, 5)

    run_virtual(scenario())


def test_failed_adoption_is_no_first_token() -> None:
    """An engine that cannot adopt ends the request with an error and a token that is none."""

    async def scenario() -> None:
        first: list[int] = []
        sequence = Sequence(Submit("r", 1, "", [1], b"", 0.0, hop=1), lambda delta: None, "b")
        sequence.on_first = lambda: first.append(1)
        sequence.emit(Delta("r", 1, 0, [7], "error", hop=1))
        assert first == []

    run_virtual(scenario())
