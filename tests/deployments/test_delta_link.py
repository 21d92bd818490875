"""The token link: whole steps in one frame, nothing lost or reordered, a dead ingress is noticed."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable

import pytest
import zmq

from deployments import delta_link
from deployments.delta_link import DeltaReceiver, DeltaSender
from deployments.wire import Delta, Logprobs


def delta(rid: str, start: int, **more: object) -> Delta:
    """One token of a stream."""
    return Delta(rid, 1, start, [start + 500], **more)  # type: ignore[arg-type]


def nobody(endpoint: str) -> None:
    """For links that must not lose their ingress."""
    raise AssertionError(f"{endpoint} was given up")


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Let the loop run until the condition holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def test_one_frame_per_loop_turn_and_ingress() -> None:
    """Deltas sent within one loop turn arrive together, each ingress getting its own."""

    async def scenario() -> None:
        one: list[list[Delta]] = []
        two: list[list[Delta]] = []
        receivers = DeltaReceiver("127.0.0.1", one.append), DeltaReceiver("127.0.0.1", two.append)
        sender = DeltaSender(nobody)
        step = [delta(f"s{i}", 0) for i in range(20)]
        for i, item in enumerate(step):
            sender.send(receivers[i % 2].endpoint, item)
        await until(lambda: one and two)
        assert one == [step[0::2]]
        assert two == [step[1::2]]
        sender.close()
        for receiver in receivers:
            receiver.close()

    asyncio.run(scenario())


def test_all_fields_survive() -> None:
    """A delta arrives equal to the one sent, every field of it."""
    whole = Delta(
        *("rid#0", 3, 17, [1, 2], "stop", "</s>"),
        Logprobs(2, [1, 9, 2, 8], [-0.5, -1.25, 0.0, -3.5], [1, 1]),
        *(Logprobs(1, [4], [-2.0], [7]), 12, 5),
    )

    async def scenario() -> None:
        got: list[list[Delta]] = []
        receiver, sender = DeltaReceiver("127.0.0.1", got.append), DeltaSender(nobody)
        sender.send(receiver.endpoint, whole)
        await until(lambda: got)
        assert got == [[whole]]
        sender.close()
        receiver.close()

    asyncio.run(scenario())


def test_order_is_kept() -> None:
    """Thousands of deltas over many loop turns arrive complete and in each stream's order."""

    async def scenario() -> None:
        got: list[Delta] = []
        receiver, sender = DeltaReceiver("127.0.0.1", got.extend), DeltaSender(nobody)
        rng = random.Random(5)
        sent = {f"s{i}": 0 for i in range(30)}
        for _ in range(5000):
            rid = rng.choice(list(sent))
            sender.send(receiver.endpoint, delta(rid, sent[rid]))
            sent[rid] += 1
            if rng.random() < 0.2:
                await asyncio.sleep(0)
        await until(lambda: len(got) == 5000)
        for rid, count in sent.items():
            assert [d.start for d in got if d.rid == rid] == list(range(count))
        sender.close()
        receiver.close()

    asyncio.run(scenario())


def test_ingress_that_appears_late_misses_nothing() -> None:
    """Tokens for an ingress that cannot be reached yet wait for it, in order."""

    async def scenario() -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        sender = DeltaSender(nobody)
        for start in range(10):
            sender.send(endpoint, delta("s", start))
            await asyncio.sleep(0.01)
        context = zmq.Context()
        late = context.socket(zmq.PULL)
        late.bind(endpoint)
        starts: list[int] = []

        def read() -> bool:
            while late.poll(0):
                starts.extend(d.start for d in delta_link._decoder.decode(late.recv()))
            return len(starts) == 10

        await until(read)
        assert starts == list(range(10))
        sender.close()
        late.close()
        context.term()

    asyncio.run(scenario())


def test_dead_ingress_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ingress that stays unreachable is reported once, its tokens are dropped, and others are served meanwhile."""
    monkeypatch.setattr(delta_link, "_LOST_S", 0.2)

    async def scenario() -> None:
        got: list[Delta] = []
        lost: list[str] = []
        gone = DeltaReceiver("127.0.0.1", lambda deltas: None)
        gone.close()
        receiver, sender = DeltaReceiver("127.0.0.1", got.extend), DeltaSender(lost.append)
        sender.send(gone.endpoint, delta("dead", 0))
        for start in range(20):
            sender.send(receiver.endpoint, delta("alive", start))
            await asyncio.sleep(0.005)
        await until(lambda: lost)
        await until(lambda: len(got) == 20)
        await asyncio.sleep(0.3)
        assert lost == [gone.endpoint]
        assert not sender._pending
        assert set(sender._sockets) == {receiver.endpoint}
        sender.close()
        receiver.close()

    asyncio.run(scenario())


def test_bad_frame_does_not_end_the_link() -> None:
    """A frame that cannot be decoded, or whose deltas cannot be processed, is logged; the next one is handled."""

    async def scenario() -> None:
        got: list[list[Delta]] = []
        poisoned: list[Delta] = []

        def take(deltas: list[Delta]) -> None:
            if deltas[0].rid == "poison":
                poisoned.extend(deltas)
                raise RuntimeError("cannot be processed")
            got.append(deltas)

        receiver, sender = DeltaReceiver("127.0.0.1", take), DeltaSender(nobody)
        sender.send(receiver.endpoint, delta("poison", 0))
        await until(lambda: poisoned)
        sender._socket(receiver.endpoint).send(b"\xff no message")
        sender.send(receiver.endpoint, delta("good", 0))
        await until(lambda: got)
        assert got == [[delta("good", 0)]]
        sender.close()
        receiver.close()

    asyncio.run(scenario())


def test_forgotten_link_is_made_anew() -> None:
    """After `forget` the connection is gone; the next delta to that ingress opens another."""

    async def scenario() -> None:
        got: list[Delta] = []
        receiver, sender = DeltaReceiver("127.0.0.1", got.extend), DeltaSender(nobody)
        sender.send(receiver.endpoint, delta("s", 0))
        await until(lambda: len(got) == 1)
        sender.forget(receiver.endpoint)
        assert not sender._sockets
        sender.send(receiver.endpoint, delta("s", 1))
        await until(lambda: len(got) == 2)
        sender.close()
        receiver.close()

    asyncio.run(scenario())
