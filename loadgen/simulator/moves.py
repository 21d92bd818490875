"""Moves in virtual time: the product's hand-shake on simulated replicas, over a link that is modelled.

Both machines (policies/migration/) run as in production, and what they ask of an engine is done by the scheduler's own
half of a move (deployments/migration/kv_scheduler.py), between two steps of its replica. Made up are the bytes: nothing
is copied, messages and KV take the time of `Transfer`. `Move` is deployments/migration/source.py and destination.py in
virtual time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from deployments.migration.messages import Moved
from loadgen.simulator.driver import Link, NoWorkers, Side, World
from loadgen.simulator.replica import Replica
from loadgen.simulator.transfer import Transfer
from policies.migration import destination as d
from policies.migration import events as e
from policies.migration import handshake as h

LONGEST_MESSAGE_S = 0.1  # beyond, a source that asks again would not hear in time what became of its commit


class Move:
    """One request on its way from `source` to `destination`; `over` is told once how the source saw it end."""

    def __init__(
        self,
        moves: Moves,
        number: int,
        name: str,
        pair: tuple[Replica, Replica],
        plan: h.Plan,
        limits: e.Limits,
        over: Callable[[Moved], None],
    ) -> None:
        self.number, self.name = number, name
        self.source, self.destination = pair
        self.adopted_name = ""  # once it was sent there
        self.a = Side(h.SourceSide(plan, limits), self._at_source, moves.world)
        self.b = Side(d.DestinationSide(limits), self._at_destination, moves.world)
        self.messages = 0  # under way
        self.barred = False  # the request was sent again elsewhere: its tokens here are not taken
        self._moves, self._over = moves, over
        self._id = f"{name}>{self.destination.name}@{moves.world.clock.now!r}"
        self._exported: dict[int, dict[str, Any]] = {}
        self._parked: dict[str, Any] = {}
        self._parked_at = math.nan
        self._lease_s = limits.lease_s
        self._blocks = 0

    def start(self) -> None:
        """Begin."""
        self.a.carry_out(self.a.machine.start(self._moves.world.clock.now))

    @property
    def ended(self) -> bool:
        """Whether both replicas are through with it."""
        a = self.a.lost or (self.a.machine.over and self.a.at_rest)
        return a and self._through and not self.messages

    @property
    def _through(self) -> bool:
        return self.b.lost or (self.b.machine.state not in (d.RESERVED, d.ADOPTING) and self.b.at_rest)

    def _kv(self, replica: Replica, op: str, **payload: Any) -> Any:
        return replica.scheduler.on_kv_call(self._moves.workers, op, payload)

    def _send(self, event: Any, blocks: int = 0, extra_s: float = 0.0) -> None:
        """A message of the source to the destination, with so many KV blocks."""
        size = blocks * self._moves.block_bytes
        self._blocks += blocks
        self._moves.sent(size)
        seconds = self._moves.link.seconds(self.source.name, self.destination.name, size) + extra_s
        self._deliver(seconds, lambda: self.b.feed(event))

    def _deliver(self, seconds: float, call: Callable[[], None]) -> None:
        def arrive() -> None:
            self.messages -= 1
            call()

        self.messages += 1
        self._moves.world.later(seconds, arrive)

    # --- on the source

    def _at_source(self, action: e.SourceAction) -> bool:
        ask = self._moves.world.ask
        match action:
            case e.Reserve() | e.Query() | e.ReleaseOnDestination():
                self._send(action)
            case e.ExportStage(stage, first, blocks):
                self._moves.copying(self, True)
                ask(self.source, lambda: self._export(stage, first, blocks))
                return True
            case e.Write(stage):
                exported = self._exported.get(stage)
                if exported is not None and exported["copied"]:
                    self._send(action, exported["copied"])
                elif exported is not None:
                    self._hear(d.Stored(stage))
            case e.Park(lease_s):
                ask(self.source, lambda: self._park(lease_s))
                return True
            case e.Commit():
                self._send(action, self._parked["copied"], self._moves.transfer.handover_s)
            case e.Unpark():
                ask(self.source, self._unpark)
                return True
            case e.AnnounceMoved(confirmed):
                if not confirmed:
                    raise RuntimeError(f"nobody answers for request {self.number}: messages cannot be lost here")
                self._moves.world.announce(self.number)
            case e.FreeOnSource():
                ask(self.source, self._free)
                return True
            case e.Count(outcome, reason):
                self._moves.copying(self, False)
                tokens = len(self._parked["output"]) if self._parked else -1
                self._over(
                    Moved(
                        str(self.number),
                        outcome,
                        reason,
                        tokens=tokens,
                        destination=self.destination.name,
                        blocks=self._blocks,
                        bytes=round(self._blocks * self._moves.block_bytes),
                    )
                )
        return False

    def _export(self, stage: int, first: int, blocks: int) -> None:
        answer = self._kv(self.source, "export", request=self.name, first=first, blocks=blocks, at=0)
        if not self._failed(answer):
            self._exported[stage] = answer
        self.a.resume()

    def _park(self, lease_s: float) -> None:
        answer = self._kv(self.source, "park", request=self.name, first=self.a.machine.copied, at=0, lease_s=lease_s)
        if isinstance(answer, Future):  # its last token is on its way
            answer.add_done_callback(lambda future: self._after_park(future.result()))
        else:
            self._after_park(answer)

    def _after_park(self, answer: dict[str, Any]) -> None:
        if not self._failed(answer):
            if self.a.machine.plan.held and not answer["held"]:
                self.a.feed(e.Preempted())
            else:
                self._parked, self._parked_at = answer, self._moves.world.clock.now
                self.a.feed(e.Parked(answer["held"]))
        self.a.resume()

    def _unpark(self) -> None:
        if self.name in self.source.scheduler.requests:
            self._kv(self.source, "unpark", request=self.name)
        self.a.resume()

    def _free(self) -> None:
        self.source.drop(self.name)
        self.a.resume()

    def _failed(self, answer: dict[str, Any]) -> bool:
        """Tell the source's machine of an order that was not carried out."""
        match answer.get("error"):
            case None:
                return False
            case "gone":
                self.a.feed(e.Finished())
            case "not_running":
                self.a.feed(e.Preempted())
            case _:
                self.a.feed(e.Refused(answer["reason"]))
        return True

    def _hear(self, answer: Any) -> None:
        if isinstance(answer, d.Stored):
            exported = self._exported.pop(answer.stage, None)
            if exported is None:
                return
            answer = e.StageWritten(answer.stage, exported["copied"], exported["left"], exported["held"])
        self.a.feed(answer)

    # --- on the destination

    def _at_destination(self, action: d.Action) -> bool:
        ask = self._moves.world.ask
        match action:
            case d.TakeBlocks(blocks):
                ask(self.destination, lambda: self._take(blocks))
                return True
            case d.WriteStage(stage, first):
                ask(self.destination, lambda: self._write(stage, first))
                return True
            case d.Adopt(with_kv):
                ask(self.destination, lambda: self._adopt(with_kv))
                return True
            case d.PassTokens():
                if self.barred:
                    ask(self.destination, partial(self.destination.drop, self.adopted_name))
                else:
                    self._moves.world.pass_to(self.number, self.destination, self.adopted_name)
            case d.FreeBlocks() | d.DropRequest():
                ask(self.destination, self._release)
                return True
            case d.Tell(answer):
                self._deliver(self._moves.transfer.message_s, lambda: self._hear(answer))
            case e.Count(outcome, reason):
                self._moves.expired(outcome, reason)
        return False

    def _take(self, blocks: int) -> None:
        if self.destination.state != "serving":
            self.b.feed(d.NotTaken("draining"))
        else:
            answer = self._kv(self.destination, "reserve", move=self._id, blocks=blocks, lease_s=self._lease_s)
            self.b.feed(d.Taken(answer["held"]) if "error" not in answer else d.NotTaken(answer["reason"]))
        self.b.resume()

    def _write(self, stage: int, first: int) -> None:
        blocks = self._exported[stage]["copied"]
        answer = self._kv(
            self.destination, "write", move=self._id, first=first, blocks=blocks, at=0, lease_s=self._lease_s
        )
        self.b.feed(d.Written(stage) if "error" not in answer else d.NotTaken(answer["reason"]))
        self.b.resume()

    def _adopt(self, with_kv: bool) -> None:
        world, parked = self._moves.world, self._parked
        self.adopted_name = world.next_name(self.number)
        self._moves.adopted(self)
        adopt = {"move": self._id, "computed": parked["computed"]}
        if parked["copied"]:
            adopt |= {"first": parked["first"], "blocks": parked["copied"], "at": 0}
        world.adopt(self.destination, self.number, self.adopted_name, len(parked["output"]), adopt)
        if with_kv:
            self.destination.watch(self.adopted_name, self._begun)
        else:
            self.b.feed(d.Begun())
        self.b.resume()

    def _begun(self) -> None:
        """Its first token is there."""
        if self.b.machine.state is d.ADOPTING:
            if not self.barred:
                self._moves.paused(self._moves.world.clock.now - self._parked_at)
            self.b.feed(d.Begun())

    def _release(self) -> None:
        self.destination.drop(self.adopted_name)
        self._kv(self.destination, "release", move=self._id)
        self.b.resume()


class Moves:
    """The moves of a run. `block_bytes`: KV of a block; `figures` of what was sent and how it went."""

    def __init__(self, world: World, transfer: Transfer, limits: e.Limits, block_bytes: float) -> None:
        if transfer.message_s > LONGEST_MESSAGE_S:
            raise ValueError(f"message_s must be <= {LONGEST_MESSAGE_S}, got {transfer.message_s}")
        self.world, self.transfer, self.limits, self.block_bytes = world, transfer, limits, block_bytes
        self.link = Link(transfer, world.clock)
        self.workers = NoWorkers()
        self.pauses: list[float] = []
        self.bytes = 0.0
        self.expiries: Counter[str] = Counter()
        self.moved_at: dict[int, float] = {}  # request -> when its last move began
        self._open: list[Move] = []
        self._by_name: dict[str, Move] = {}  # submissions that no other move may take
        self._copying: set[Move] = set()

    def depart(
        self, number: int, name: str, pair: tuple[Replica, Replica], plan: h.Plan, over: Callable[[Moved], None]
    ) -> None:
        """Begin to move a request, from the first of the pair to the second."""
        move = Move(self, number, name, pair, plan, self.limits, over)
        self.moved_at[number] = self.world.clock.now
        self._open = [other for other in self._open if not self._close(other)]
        self._open.append(move)
        self._by_name[name] = move
        move.start()

    def busy(self) -> set[str]:
        """Submissions that no other move may take now."""
        for move in self._open:
            self._close(move)
        return set(self._by_name)

    @property
    def under_way(self) -> bool:
        """Whether any replica still has to do with a move."""
        self._open = [move for move in self._open if not self._close(move)]
        return bool(self._open)

    def has_to_do_with(self, replica: Replica) -> bool:
        """Whether a move from or to it is under way."""
        return self.under_way and any(replica in (move.source, move.destination) for move in self._open)

    def finished(self, name: str) -> None:
        """A submission has got its last token."""
        move = self._by_name.get(name)
        if move is not None and move.name == name:
            move.a.feed(e.Finished())

    def aborted(self, number: int) -> None:
        """The client of a request has left."""
        for move in self._open:
            if move.number == number and not move.ended:
                if not move.a.lost:
                    self.world.ask(move.source, partial(move.source.drop, move.name))
                move.a.feed(e.AbortedByClient())
                move.b.feed(e.AbortedByClient())

    def died(self, replica: Replica) -> None:
        """A replica is dead; whoever sent it a request hears of it at once."""
        for move in self._open:
            if move.source is replica and not move.a.lost:
                move.a.lost = True
                move.barred = move.b.machine.state is not d.ADOPTED
                self.copying(move, False)
            if move.destination is replica and not move.b.lost:
                move.b.lost = True
                move.a.feed(e.DestinationLost())
                if self.world.owned(move.number) != move.name and not move.a.lost:
                    # It had given tokens to the client: what the source would go on with is not taken.
                    self.world.ask(move.source, partial(move.source.drop, move.name))

    # --- told by the moves

    def adopted(self, move: Move) -> None:
        """A submission of the request is at the destination."""
        self._by_name[move.adopted_name] = move

    def paused(self, seconds: float) -> None:
        """A client waited so long between tokens of two replicas."""
        self.pauses.append(seconds)

    def sent(self, size: float) -> None:
        """So many bytes are on their way."""
        self.bytes += size

    def expired(self, outcome: str, reason: str) -> None:
        """A destination gave a reservation back without a word from its source."""
        self.expiries[outcome] += 1

    def copying(self, move: Move, on: bool) -> None:
        """Steps of both replicas take longer while a move copies."""
        if on:
            self._copying.add(move)
        else:
            self._copying.discard(move)
        for replica in (move.source, move.destination):
            slowed = any(replica in (other.source, other.destination) for other in self._copying)
            replica.slowed = self.transfer.slowdown if slowed else 0.0

    def _close(self, move: Move) -> bool:
        """Forget a move if both replicas are through with it."""
        if not move.ended:
            return False
        for name in (move.name, move.adopted_name):
            if self._by_name.get(name) is move:
                del self._by_name[name]
        return True
