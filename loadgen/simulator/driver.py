"""What moves in virtual time stand on: messages and KV on their way, and a machine that is fed and obeyed.

`Side` is deployments/migration/driver.py in virtual time.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, Protocol

from loadgen.simulator.replica import Clock, Replica
from loadgen.simulator.transfer import Transfer
from policies.migration import destination as d
from policies.migration import events as e
from policies.migration import handshake as h


class World(Protocol):
    """What moves need of the cluster. `number` is a request, `name` one submission of it."""

    clock: Clock

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call at this time."""

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call in so many seconds."""

    def ask(self, replica: Replica, call: Callable[[], None]) -> None:
        """Have `call` done between two steps of a replica."""

    def next_name(self, number: int) -> str:
        """The name of one more submission."""

    def adopt(self, replica: Replica, number: int, name: str, generated: int, adopt: dict[str, Any]) -> None:
        """Give a replica's scheduler the request, with so many tokens, to go on from its reservation."""

    def owned(self, number: int) -> str:
        """The name of the submission whose tokens the client takes."""

    def pass_to(self, number: int, replica: Replica, name: str) -> None:
        """The client takes the tokens of this submission from now on."""

    def announce(self, number: int) -> None:
        """The ingress hears that the call at the source has ended."""


class NoWorkers:
    """Stands for the workers that copy blocks: there are none."""

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
        """Nobody answers, so nobody complains."""
        return []


class Link:
    """Each replica sends one transfer after the other, and takes in one after the other."""

    def __init__(self, transfer: Transfer, clock: Clock) -> None:
        self._transfer, self._clock = transfer, clock
        self._sends: defaultdict[str, float] = defaultdict(float)  # until when
        self._takes: defaultdict[str, float] = defaultdict(float)

    def seconds(self, source: str, destination: str, size: float) -> float:
        """Time from now until `size` bytes and their message have come."""
        now = self._clock.now
        if not size:
            return self._transfer.message_s
        end = max(now, self._sends[source], self._takes[destination]) + size / self._transfer.bandwidth
        self._sends[source] = self._takes[destination] = end
        return end - now + self._transfer.message_s


class Side:
    """Feeds one machine and carries out its actions in order; `perform` says whether one takes time, until `resume`."""

    def __init__(self, machine: h.SourceSide | d.DestinationSide, perform: Callable[[Any], bool], world: World) -> None:
        self.machine: Any = machine
        self.lost = False  # its replica has died
        self._perform, self._world = perform, world
        self._actions: deque[Any] = deque()
        self._performing = False
        self._timer = math.inf

    def feed(self, event: Any) -> None:
        """An event for the machine."""
        if not self.lost:
            self.carry_out(self.machine.handle(event, self._world.clock.now))

    def carry_out(self, actions: tuple[Any, ...]) -> None:
        """Actions of the machine, to be done after those under way."""
        self._actions += actions
        self._arm()
        self._advance()

    def resume(self) -> None:
        """What took time is done."""
        self._performing = False
        self._advance()

    @property
    def at_rest(self) -> bool:
        """Whether nothing is left to be done here."""
        return self.lost or not (self._performing or self._actions)

    def _advance(self) -> None:
        while self._actions and not (self._performing or self.lost):
            self._performing = True
            if not self._perform(self._actions.popleft()):
                self._performing = False

    def _arm(self) -> None:
        deadline = self.machine.deadline()
        if deadline < self._timer and not self.lost and self.machine.state not in (d.ADOPTED, d.RELEASED):
            self._timer = deadline
            self._world.at(deadline, self._ring)

    def _ring(self) -> None:
        self._timer = math.inf
        self.feed(e.Timeout())
        self._arm()
