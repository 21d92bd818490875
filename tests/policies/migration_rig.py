"""One move between two replicas that are nothing but counters, over a channel that loses, doubles and reorders."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from policies.migration import destination as d
from policies.migration import events as e
from policies.migration import handshake as h

BLOCK = 4  # tokens
TOTAL = 200  # blocks of a replica
LIFE = 2.0  # seconds that a message may be under way
LIMITS = e.Limits(2, 1, 2, 2, 0.5, 1.0, 0.5, commit_s=0.3, queries=2, lease_s=3.0, keep_s=8.0)
A_HOP, B_HOP = 1, 2


def blocks(tokens: int) -> int:
    """KV blocks of so many tokens."""
    return -(-tokens // BLOCK)


@dataclass
class Ingress:
    """The client's stream: what it has, from whom, and the guard that policies/migration/handshake.py describes."""

    delivered: list[str] = field(default_factory=list)  # who made each token
    newest: int = A_HOP
    barred: set[int] = field(default_factory=set)
    moved: bool | None = None  # A's marker: confirmed or not
    lost: set[str] = field(default_factory=set)
    gone: bool = False
    finished: bool = False
    fail_over: bool = False
    aborts: set[str] = field(default_factory=set)  # under way to A, to B

    def takes(self, hop: int, index: int) -> bool | None:
        """Whether the token is taken; None: not yet, others come before it."""
        if self.gone or self.finished or self.fail_over or hop in self.barred or hop < self.newest:
            return False
        if index > len(self.delivered):
            return None
        if index < len(self.delivered):
            assert hop > self.newest, "a submission repeats a token"
            self.barred.add(hop)
            self.fail_over_if_lost()
            return False
        self.newest = hop
        return True

    def hears(self, message: Any, sender: str) -> bool:
        """Handle a message of A or B; False: it must wait."""
        if message[0] == "moved":
            self.moved = self.moved or message[1]
            self.fail_over_if_lost()
            return True
        _, hop, index, last = message
        if (taken := self.takes(hop, index)) is None:
            return False
        if taken:
            self.delivered.append(sender)
            self.finished = self.finished or last
        else:
            self.aborts.add(sender)
        return True

    def loses(self, replica: str) -> None:
        """The replica's call failed."""
        self.lost.add(replica)
        self.fail_over_if_lost()

    def fail_over_if_lost(self) -> None:
        """Re-send elsewhere if the stream depends on a replica that is dead, or on a submission that is barred."""
        if not (self.gone or self.finished):
            on_b = self.newest == B_HOP or self.moved is not None
            self.fail_over |= ("B" if on_b else "A") in self.lost or (on_b and B_HOP in self.barred)


class World:
    """A request of `prompt` tokens on A (waiting there without KV if not `running`), about to move to B."""

    def __init__(self, prompt: int, *, running: bool = True, must: bool = False, free: int = TOTAL) -> None:
        self.now = 0.0
        self.ingress = Ingress()
        self.links: dict[str, list[Any]] = {"A": [], "B": []}  # to the ingress, in order
        self.channel: list[tuple[float, str, Any, Any]] = []  # (gone when, to whom, message, what comes with it)
        self.partition = False
        self.prompt, self.made, self.ends_at = prompt, 0, 10_000  # tokens of A
        self.a_alive = self.a_engine = self.executor = self.b_alive = True
        self.status = "running" if running else "waiting"  # on A; also parked, gone
        self.held = blocks(prompt) if running else 0
        self.a_free, self.b_free, self.b_start = TOTAL - self.held, free, free
        self.park_lease, self.parked_at, self.pause = math.inf, math.nan, math.nan
        self.export: Any = None
        self.figures: dict[int, tuple[int, int, int]] = {}
        self.reserved = self.written = self.adopted = 0
        self.b_status, self.b_made, self.passing = "none", 0, False  # adopting, running, gone
        self.payload: dict[Any, Any] = {}  # of messages that reached B
        self.counts: list[e.Count] = []
        self.a, self.b = h.SourceSide(h.Plan(self.held, must), LIMITS), d.DestinationSide(LIMITS)
        self.a_queue: list[Any] = list(self.a.start(self.now))
        self.b_queue: list[Any] = []

    # --- machines and channel

    def tell_a(self, event: e.SourceEvent) -> None:
        """An event for A's machine."""
        if self.a_alive and self.executor:
            was_over, actions = self.a.over, self.a.handle(event, self.now)
            self.a_queue += actions
            if any(isinstance(action, e.Park) for action in actions):
                self.parked_at = self.now
            if self.a.over and not was_over:
                self.pause = self.now - self.parked_at

    def tell_b(self, event: Any) -> None:
        """An event for B's machine."""
        if self.b_alive:
            self.b_queue += self.b.handle(event, self.now)

    def send(self, to: str, message: Any, payload: Any = None) -> None:
        """Put a message on the channel between A and B."""
        if not self.partition:
            self.channel.append((self.now + LIFE, to, message, payload))

    def arrive(self, index: int) -> None:
        """Deliver a message of the channel, whichever."""
        _, to, message, payload = self.channel.pop(index)
        if to == "A":
            if isinstance(message, d.Stored):
                message = e.StageWritten(message.stage, *self.figures[message.stage])
            self.tell_a(message)
        else:
            self.payload[message] = payload
            self.tell_b(message)

    def pass_time(self, seconds: float) -> None:
        """Let time go by, with each deadline at its second."""
        end = self.now + seconds
        while (due := min(self.a.deadline() if self.executor else math.inf, self.b.deadline(), self.park_lease)) <= end:
            self.now = max(self.now, due)
            self.tell_a(e.Timeout())
            self.tell_b(e.Timeout())
            if self.park_lease <= self.now:
                self.park_lease = math.inf
                self.unpark()
                self.tell_a(e.Preempted())
            if self.b.forgettable(self.now) or not self.b_alive:
                self.b = d.DestinationSide(LIMITS)
            if not self.a_alive:
                break
        self.now = max(self.now, end)
        self.channel = [sent for sent in self.channel if sent[0] > self.now]

    # --- A's executor and engine

    def a_step(self) -> None:
        """Carry out the next action of A's machine."""
        if not (self.a_alive and self.executor and self.a_queue):
            return
        match self.a_queue.pop(0):
            case e.Count() as count:
                self.counts.append(count)
            case e.AnnounceMoved(confirmed):
                self.links["A"].append(("moved", confirmed))
            case e.ExportStage(stage, first, most):
                full = (self.prompt + self.made) // BLOCK
                copied = min(most, full - first)
                self.export = (first, copied) if self.status == "running" and self.held else None
                self.figures[stage] = (copied, full - first - copied, self.held)
            case e.Write() as write:
                if self.export is not None:
                    self.send("B", write, self.export)
            case e.Park(lease_s):
                self.park(lease_s)
            case e.ExportLast(first):
                self.export = (first, self.held, self.made) if self.status == "parked" else None
            case e.Commit() as commit:
                if self.export is not None:
                    self.send("B", commit, self.export)
            case e.Unpark():
                self.unpark()
            case e.FreeOnSource():
                self.end_on_a()
            case message:
                self.send("B", message)

    def park(self, lease_s: float) -> None:
        """A's engine: take the request out of the schedule."""
        if self.status == "running" and not self.a.plan.held:
            self.tell_a(e.Refused("started"))
        elif self.status in ("running", "waiting"):
            self.status, self.park_lease = "parked", self.now + lease_s
            self.tell_a(e.Parked(self.held))

    def unpark(self) -> None:
        """A's engine: back into the schedule."""
        self.park_lease = math.inf
        if self.status == "parked":
            self.status = "running" if self.held else "waiting"

    def end_on_a(self) -> None:
        """A's engine: the request leaves, whatever its state."""
        self.a_free += self.held
        self.held, self.status, self.park_lease = 0, "gone", math.inf

    def a_decodes(self) -> None:
        """A's engine: one token of the request, or its admission."""
        if self.status == "waiting" and self.a_engine and self.a_alive:
            self.status, self.held = "running", blocks(self.prompt + self.made)
            self.a_free -= self.held
        elif self.status == "running" and self.a_engine and self.a_alive:
            self.made += 1
            grown = blocks(self.prompt + self.made) - self.held
            self.held, self.a_free = self.held + grown, self.a_free - grown
            last = self.made == self.ends_at
            self.links["A"].append(("token", A_HOP, self.made - 1, last))
            if last:
                self.end_on_a()
                self.tell_a(e.Finished())

    def a_preempts(self) -> None:
        """A's engine: takes the blocks of a running request away."""
        if self.status == "running":
            self.a_free += self.held
            self.held, self.status = 0, "waiting"
            self.tell_a(e.Preempted())

    # --- B's executor and engine

    def b_step(self, fails: bool = False) -> None:
        """Carry out the next action of B's machine; `fails`: the engine cannot."""
        if not (self.b_alive and self.b_queue):
            return
        match self.b_queue.pop(0):
            case e.Count() as count:
                self.counts.append(count)
            case d.Tell(answer):
                self.send("A", answer)
            case d.TakeBlocks(wanted):
                if fails or wanted - self.reserved > self.b_free:
                    self.tell_b(d.NotTaken("full"))
                else:
                    self.b_free -= wanted - self.reserved
                    self.reserved = wanted
                    self.tell_b(d.Taken(wanted))
            case d.WriteStage(stage, first):
                if self.reserved:
                    copied = self.payload[e.Write(stage, first, LIMITS.lease_s)][1]
                    assert first + copied <= self.reserved, "written beyond the reservation"
                    self.written = max(self.written, first + copied)
                    self.tell_b(d.Written(stage))
            case d.Adopt(with_kv):
                self.adopt(with_kv, fails)
            case d.PassTokens():
                self.passing = True
            case d.FreeBlocks():
                self.b_free += self.reserved
                self.reserved = 0
            case d.DropRequest():
                self.end_on_b()

    def adopt(self, with_kv: bool, fails: bool) -> None:
        """B's engine: run the request on the reserved blocks."""
        first, held, self.b_made = self.payload[e.Commit(with_kv)]
        assert (first <= self.written and held <= self.reserved) or not with_kv, "adopted without all of its KV"
        self.b_free += self.reserved - (0 if fails else held)
        self.reserved, self.adopted = 0, 0 if fails else held
        if fails:
            self.tell_b(d.Failed("broken"))
        else:
            self.b_status = "running"
            if not with_kv:
                self.tell_b(d.Begun())

    def end_on_b(self) -> None:
        """B's engine: the adopted request leaves."""
        self.b_free += self.adopted
        self.adopted, self.b_status = 0, "gone"

    def b_decodes(self) -> None:
        """B's engine: one token of the adopted request; before the machine lets it pass it is the only one."""
        if self.b_alive and self.b_status == "running":
            if self.b.state is d.State.ADOPTING:
                self.tell_b(d.Begun())
            elif self.passing and not self.b_queue:
                self.links["B"].append(("token", B_HOP, self.b_made, False))
                self.b_made += 1

    # --- ingress and failures

    def ingress_step(self, replica: str) -> None:
        """A replica's message reaches the ingress, unless it must wait for the other's; an abort reaches it."""
        link = self.links[replica]
        if link and self.ingress.hears(link[0], replica):
            link.pop(0)
        if replica in self.ingress.aborts:
            self.ingress.aborts.discard(replica)
            if replica == "A" and self.status != "gone" and self.a_alive:
                self.end_on_a()
                self.tell_a(e.AbortedByClient())
            if replica == "B" and self.b_status == "running" and self.b_alive:
                self.end_on_b()
                self.tell_b(e.AbortedByClient())

    def client_leaves(self) -> None:
        """The client closes its connection."""
        self.ingress.gone = True
        self.ingress.aborts |= {"A", "B"}

    def lose(self, replica: str) -> None:
        """A replica dies; the others learn it later, in `mourn`."""
        if replica == "A":
            self.a_alive = False
        else:
            self.b_alive, self.b_status = False, "gone"

    def lose_engine(self) -> None:
        """A's engine dies, its actor lives and notices at once."""
        if self.a_engine:
            self.a_engine, self.status, self.park_lease = False, "gone", math.inf
            self.tell_a(e.SourceLost())

    def mourn(self, replica: str) -> None:
        """The ingress and the other side learn that a replica, or A's engine, is dead."""
        dead = not self.b_alive if replica == "B" else not (self.a_alive and self.a_engine)
        if dead and replica not in self.ingress.lost and not self.links[replica]:
            self.ingress.loses(replica)
            if replica == "B":
                self.tell_a(e.DestinationLost())
            elif not self.a_alive:
                self.tell_b(e.SourceLost())

    @property
    def a_runs(self) -> bool:
        """Whether A will make tokens."""
        return self.a_alive and self.a_engine and self.status in ("running", "waiting")

    @property
    def b_runs(self) -> bool:
        """Whether B will make tokens that leave it."""
        return self.b_alive and self.b_status == "running" and self.passing

    def settle(self) -> None:
        """No more faults: what is under way arrives, every lease runs out, the ingress gives up on silence."""
        for _ in range(60):
            for _ in range(3):
                while self.a_alive and self.executor and self.a_queue:
                    self.a_step()
                while self.b_alive and self.b_queue:
                    self.b_step()
                while self.channel:
                    self.arrive(0)
                self.b_decodes()
            self.a_decodes()
            for replica in ("A", "B", "A"):
                for _ in range(len(self.links[replica]) + 1):
                    self.ingress_step(replica)
                self.mourn(replica)
            self.pass_time(0.2)
        silent = self.ingress.moved is False and self.ingress.newest == A_HOP and not (self.a_runs or self.b_runs)
        if silent and not (self.ingress.gone or self.ingress.finished):
            self.ingress.fail_over = True

    def check(self) -> None:
        """What must hold once all is settled: the request is in one place, and nothing is left where it is not."""
        stream = self.ingress
        ended = stream.gone or stream.finished
        where = {"A": self.a_runs, "B": self.b_runs, "ended": ended, "fail over": stream.fail_over and not ended}
        assert sum(where.values()) == 1, (where, self.a.state, self.b.state)
        if self.a_alive and self.a_engine:
            assert self.status != "parked"
            assert self.a_free + self.held == TOTAL
            assert bool(self.held) == self.a_runs
        if self.b_alive:
            assert self.reserved == 0
            assert self.b_free + self.adopted == self.b_start
            assert (self.b_status == "running") == self.b_runs
        if self.a_alive and self.executor:
            assert self.a.over
            assert self.a.deadline() == math.inf
            assert math.isnan(self.pause) or self.pause <= LIMITS.pause_s + 1e-9
            assert len([count for count in self.counts if count.outcome == self.a.state.value]) == 1
        assert stream.delivered == sorted(stream.delivered), "tokens of two runs are mixed"

    @property
    def place(self) -> str:
        """Where the request is once all is settled."""
        if self.ingress.gone or self.ingress.finished:
            return "ended"
        return "A" if self.a_runs else "B" if self.b_runs else "re-sent"
