"""A fleet in one event loop: fake engines under the real executors, the real ingress streams, a network with faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np

from app.incoming import Incoming
from app.stream import Stream
from app.streams import Failover, run_stream
from app.vllm_compat import SamplingParams
from deployments.migration.messages import (
    Answer,
    Give,
    Given,
    How,
    Message,
    Moved,
    decode_answer,
    encode,
)
from deployments.migration.running import Migration
from deployments.migration.sequences import Sequences
from deployments.migration.source import DestinationDead, Unreachable
from deployments.routing import NoReplicaError
from deployments.settings import MigrationSettings
from deployments.token_codec import decode_params
from deployments.wire import Delta, Outcome, Submit
from policies.migration.events import Limits
from policies.migration.standing import Standing

from .fake_engine import FakeEngine, token
from .migration_parts import Client, Fault, Method, Node

LINK_S = 0.003  # a token's way to the ingress
CALL_S = 0.002  # a message's way between replicas
NOTICE_S = 0.05  # until callers of a dead replica hear of it
LIMITS = Limits(
    2, 1, 2, 2, reserve_s=0.5, stage_s=1.0, park_s=0.5, commit_s=0.5, query_s=0.2, queries=3, lease_s=3.0, keep_s=8.0
)
MIGRATION = MigrationSettings(limits=LIMITS)


class World:
    """Replicas a, b, ... with `total` KV blocks and `slots` sequences each, and one ingress."""

    def __init__(self, names: str = "ab", total: int = 200, slots: int = 8, settings: MigrationSettings = MIGRATION):
        self.loop = asyncio.get_running_loop()
        self.settings = settings
        self.lengths: dict[str, int] = {}
        self.nodes: dict[str, Node] = {}
        self.clients: dict[str, Client] = {}
        self.faults: Callable[[str, str, Message, int], Fault | None] = lambda source, to, message, nth: None
        self.sent: dict[tuple[str, str], int] = {}  # messages of a move by kind
        self.log: list[str] = []
        self.given: list[Moved] = []
        self.left: list[tuple[str, Delta]] = []  # deltas and the replica that they left
        self._done: Callable[[], None] = lambda: None
        self._places: dict[str, str | None] = {}
        self.unreachable: set[tuple[str, str]] = set()
        self.generate, self.attach = Method(self._generate), Method(self._attach)  # the handle's
        for name in names:
            self.add(name, total, slots)

    def add(self, name: str, total: int, slots: int) -> Node:
        """Start a replica."""
        engine = FakeEngine(total, slots, lambda submit: self.lengths[submit.rid])
        sequences = Sequences(engine.generate, partial(self._link, name), lambda reply_to: None, name)
        fleet = View(self, name)
        migration = Migration(
            name, engine, sequences, fleet, self.settings, partial(self.standing, name), lambda: engine.dead
        )
        self.nodes[name] = node = Node(name, engine, sequences, migration)
        return node

    def standing(self, name: str) -> Standing:
        """What a replica's report says."""
        node, engine = self.nodes[name], self.nodes[name].engine
        waiting = sum(request.status == "waiting" for request in engine.requests.values())
        running = len(engine.requests) - waiting
        size = (float(engine.free), engine.free, engine.total, engine.slots)
        return Standing(name, *size, (running,), (waiting,), state=node.state)

    # --- the ingress

    def ask(self, rid: str, prompt: int, length: int, node: str | None = None) -> Client:
        """A client asks for `length` tokens after a prompt of `prompt`; `node`: where its first submission goes."""
        self.lengths[rid] = length
        params = SamplingParams(max_tokens=length)
        stream = Stream(rid, [token(f"prompt {rid}", i) for i in range(prompt)], params, 0.0, Incoming(0))
        task = self.loop.create_task(run_stream(stream, self, "tcp://ingress", Failover(3, 30.0), self._fail))
        client = self.clients[rid] = Client(stream, length, task)
        self._places[rid] = node
        return client

    def _fail(self, stream: Stream, error: Exception) -> None:
        self.clients[stream.rid].problem = error

    async def _generate(self, frame: bytes, *, ticket: int, **keywords: Any) -> Outcome:
        submit = msgspec.msgpack.decode(frame, type=Submit)
        assert decode_params(submit.params).extra_args["tidegate"]["ticket"] == ticket
        name = self._places.pop(submit.rid, None)
        serving = [node for node in self.nodes.values() if node.state == "serving"]
        if name is None or self.nodes[name] not in serving:
            if not serving:
                await asyncio.sleep(5.0)
                raise NoReplicaError("none serves")
            name = min(serving, key=lambda node: (len(node.engine.requests), node.name)).name
        return await self._call(name, lambda node: node.sequences.run(submit))

    async def _attach(self, rid: str, epoch: int, hop: int, *, target_replica: str) -> Outcome:
        return await self._call(target_replica, lambda node: node.sequences.attach((rid, epoch, hop)))

    async def _call(self, name: str, method: Callable[[Node], Any]) -> Outcome:
        """A Serve call to a replica; the caller hears of its death."""
        await asyncio.sleep(CALL_S)
        node = self.nodes[name]
        if node.dead:
            raise NoReplicaError("gone")
        task = asyncio.ensure_future(method(node))
        try:
            while True:
                done, _ = await asyncio.wait([task], timeout=NOTICE_S)
                if node.dead:
                    raise ray_died()
                if done:
                    return task.result()
        finally:
            task.cancel()

    def _link(self, name: str, reply_to: str, delta: Delta) -> None:
        if not self.nodes[name].dead:
            self.left.append((name, delta))
            self.loop.call_later(LINK_S, self._arrive, delta)

    def _arrive(self, delta: Delta) -> None:
        client = self.clients[delta.rid]
        for taken in client.stream.take(delta, self.loop.time()):
            client.taken += taken.token_ids

    def leave(self, rid: str) -> None:
        """A client closes its connection."""
        client = self.clients[rid]
        client.stream.finish()
        client.task.cancel()

    # --- moves

    async def give(
        self, source: str, to: str, rid: str | None = None, count: int = 1, how: How = "live"
    ) -> list[Moved]:
        """Order `source` to give requests to `to`."""
        order = Give("hand", to, rid=rid, count=count, how=how)
        answer = await self.nodes[source].migration.give(encode(order))
        given = msgspec.msgpack.decode(answer, type=Given)
        self.given += given.outcomes
        self.log += [f"{moved.rid} {source}>{to} {moved.outcome} {moved.reason}" for moved in given.outcomes]
        self._done()
        return given.outcomes

    async def carry(self, source: str, to: str, message: Message, parts: Sequence[np.ndarray]) -> Answer | None:
        """A message between replicas, with what befalls it."""
        if (source, to) in self.unreachable or to not in self.nodes:
            raise Unreachable(to)
        key = (message.move, message.ask)
        nth = self.sent[key] = self.sent.get(key, 0) + 1
        fault = self.faults(source, to, message, nth) or Fault()
        if fault.then:
            fault.then()
        if fault.lose:
            await self._lost(to)
        if fault.double_after is not None:
            self.loop.call_later(fault.double_after, self._again, to, message, parts)
        await asyncio.sleep(CALL_S + fault.delay)
        answer = await self._delivered(to, message, parts)
        if fault.after:
            fault.after()
        if fault.lose_answer:
            await self._lost(to)
        await asyncio.sleep(CALL_S + fault.delay_answer)
        if self.nodes[source].dead:
            await asyncio.Event().wait()
        return decode_answer(answer)

    async def _lost(self, to: str) -> None:
        while not self.nodes[to].dead:
            await asyncio.sleep(NOTICE_S)
        raise DestinationDead(to)

    def _again(self, to: str, message: Message, parts: Sequence[np.ndarray]) -> None:
        task = self.loop.create_task(self._delivered(to, message, parts))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _delivered(self, to: str, message: Message, parts: Sequence[np.ndarray]) -> bytes:
        node = self.nodes[to]
        if node.dead:
            await self._lost(to)
        task = asyncio.ensure_future(node.migration.hear(encode(message), parts))
        try:
            while True:
                done, _ = await asyncio.wait([task], timeout=NOTICE_S)
                if node.dead:
                    raise DestinationDead(to)
                if done:
                    return task.result()
        finally:
            task.cancel()

    # --- what happens meanwhile

    def at(self, moment: str, happens: Callable[[], None]) -> None:
        """Let something happen once: "<ask> sent", "<ask> answered", "park", "parked", "adopt", "done"."""
        left = [happens]

        def once(*_: Any) -> None:
            if left:
                left.pop()()

        ask, _, when = moment.partition(" ")
        if moment == "done":
            self._done = once
        elif not when:
            for node in self.nodes.values():
                node.engine.on = lambda now, request: self._soon(once) if now == moment else None
        else:

            def faults(source: str, to: str, message: Message, nth: int) -> Fault | None:
                if message.ask != ask:
                    return None
                return Fault(then=once) if when == "sent" else Fault(after=once)

            self.faults = faults

    def _soon(self, happens: Callable[[], None]) -> None:
        self.loop.call_soon(happens)

    def lose_engine(self, name: str) -> None:
        """An EngineCore dies; its replica tells whom it owes an answer and ends half a second later."""
        node = self.nodes[name]
        node.state = "dead"
        node.engine.die()
        self.loop.call_later(0.5, node.die)

    def preempt(self, name: str, request: str) -> None:
        """An engine takes a running request's blocks."""
        engine = self.nodes[name].engine
        if request in engine.requests and engine.requests[request].status == "running":
            engine.preempt(request)

    def finish(self, rid: str) -> None:
        """The sequence's next token is its last, wherever it comes from."""
        engines = (node.engine for node in self.nodes.values())
        runs = [r for engine in engines for r in engine.requests.values() if r.submit.rid == rid]
        length = max(len(run.output) for run in runs) + 1
        for run in runs:
            run.length = length
        self.lengths[rid] = self.clients[rid].length = length

    def stand_still(self, name: str, seconds: float) -> None:
        """An engine makes no steps for a while."""
        engine = self.nodes[name].engine
        engine.stuck = True
        self.loop.call_later(seconds, setattr, engine, "stuck", False)

    def slow(self, name: str, seconds: float) -> None:
        """Orders to an engine take long, for so long."""
        engine = self.nodes[name].engine
        engine.slow_s = seconds / 2
        self.loop.call_later(seconds, setattr, engine, "slow_s", 0.0)

    def cut_off(self) -> None:
        """No message passes between replicas any more."""
        self.faults = lambda source, to, message, nth: Fault(lose=True)

    # --- what must hold in the end

    async def settle(self) -> None:
        """Until every client has its end, and what is left on the replicas has run out."""
        for client in self.clients.values():
            await asyncio.wait([client.task], timeout=300)
            assert client.task.done(), f"{client.stream.rid} hangs: {self.log}"
        limits = self.settings.limits
        await asyncio.sleep(limits.keep_s + limits.lease_s + 12.0)

    def check(self) -> None:
        """Every client has each token once and in order; nothing is left on any replica that lives."""
        for rid, client in self.clients.items():
            want = [token(rid, i) for i in range(client.length)]
            got = client.taken
            assert got == (want if client.stream.finished and not client.task.cancelled() else want[: len(got)]), rid
            assert client.problem is None, (rid, client.problem, self.log)
        for name, node in self.nodes.items():
            if node.dead or node.engine.dead:
                continue
            engine = node.engine
            assert not engine.requests, (name, self.log, {r: q.status for r, q in engine.requests.items()})
            assert not engine.reservations, (name, self.log)
            assert engine.free == engine.total, (name, self.log)
            assert not node.sequences.running, name
            assert not node.migration.departures.under_way, name
            assert not node.migration.destination.names, name


@dataclass
class View:
    """What one replica sees of the others."""

    world: World
    name: str

    async def ready(self, replica: str) -> None:
        """It knows them all."""

    async def call(self, replica: str, message: Message, parts: Sequence[np.ndarray]) -> Answer | None:
        return await self.world.carry(self.name, replica, message, parts)

    def serving(self) -> list[Standing]:
        standings = (self.world.standing(name) for name in self.world.nodes)
        return [standing for standing in standings if standing.state == "serving"]


def ray_died() -> Exception:
    """What Serve raises for a call whose replica has died."""
    from ray.exceptions import ActorUnavailableError

    return ActorUnavailableError("the replica has died", None)
