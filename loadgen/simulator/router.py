"""One ingress in virtual time: admission queue, table of the fleet, balancing policy, as in the product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from loadgen.simulator.replica import Replica
from policies.admission import AdmissionQueue, Verdict
from policies.balancing import BALANCING, UsesTiers
from policies.fleet import FleetTable
from policies.tiers import Tiers
from policies.types import Call

HEARTBEAT_S = 0.1  # a replica whose figures do not change reports so often (deployments/reports.py)


class Router:
    """Chooses replicas by what it was told last and by its own calls, as deployments/router.py does.

    `bounds`: most requests that wait for their first token, in total and per tier (None: no bound); None: no admission
    control. A request is known by its number, which is its ticket as well.
    """

    def __init__(
        self,
        balancing: dict[str, Any],
        tiers: Tiers,
        rng: np.random.Generator,
        replicas: Sequence[Replica],
        *,
        stale_s: float = 1.0,
        bounds: tuple[int, Sequence[int | None]] | None = None,
    ) -> None:
        parameters = dict(balancing)
        self._policy = BALANCING.make(parameters.pop("name", ""), **parameters)
        if isinstance(self._policy, UsesTiers):
            self._policy.use_tiers(tiers)
        self._fallback = BALANCING.make("p2c")
        self._tiers, self._rng = tiers, rng
        self._queue: AdmissionQueue[int] | None = AdmissionQueue(*bounds) if bounds else None
        self._without_token: set[int] = set()  # those in the admission queue
        self._heard: list[float] = []
        self._versions: list[int] = []
        self._tickets: list[int] = []  # how many of each replica's tickets were read
        self._reports = 0
        self.table = FleetTable(stale_s=stale_s)
        for replica in replicas:
            self.add(replica)

    def add(self, replica: Replica) -> None:
        """One more replica, with the next index."""
        self._heard.append(-HEARTBEAT_S)
        self._versions.append(-1)
        self._tickets.append(0)
        self.table.join(replica.name)

    def hear(self, index: int, replica: Replica, now: float, *, state: bool = False) -> None:
        """Take the replica's report, if it has anything new to say or has said nothing for a heartbeat.

        `state`: its state has changed.
        """
        version = replica.version
        if version == self._versions[index] and now - self._heard[index] < HEARTBEAT_S and not state:
            return
        tickets = replica.board.tickets
        self._reports += 1
        report = replica.report(self._reports, tickets[self._tickets[index] :])
        self._heard[index], self._versions[index], self._tickets[index] = now, version, len(tickets)
        self.table.apply(report, now)

    def decide(self, tier: int) -> Verdict[int]:
        """Whether a request of this tier may queue, and who is shed for it."""
        return self._queue.decide(tier) if self._queue is not None else Verdict()

    def retry_after(self, tier: int) -> float | None:
        """Seconds that a refused client is asked to wait."""
        return float(self._queue.retry_after(tier)) if self._queue is not None else None

    def lose(self, index: int, replica: Replica) -> None:
        """The replica's process has ended."""
        self.table.leave(replica.name)
        self._versions[index], self._tickets[index] = -1, 0

    def choose(self, number: int, prompt_tokens: int, tier: int, session: int | None, now: float) -> str:
        """The replica of a request, entered into the books; EmptyFleetError if there is none."""
        call = Call(prompt_tokens, tier, now, session)
        policy = self._fallback if self.table.all_stale(now) else self._policy
        name = self.table.ids[policy.choose(self.table, call, self._rng)]
        self.table.dispatch(number, name, prompt_tokens, tier=tier, now=now)
        return name

    def enter(self, number: int, tier: int, now: float) -> None:
        """The request waits for its first token from now on."""
        if self._queue is not None:
            self._queue.enter(number, tier, now)
            self._without_token.add(number)

    def started(self, number: int, now: float) -> None:
        """The request has its first token."""
        if self._queue is not None:
            self._queue.start(number, now)
            self._without_token.discard(number)

    def moved(self, number: int, now: float) -> None:
        """The call at the replica that was chosen has ended: the request goes on at another."""
        self.table.complete(number, now)

    def ended(self, number: int, prompt_tokens: int, output_tokens: int, now: float) -> None:
        """The request has its last token."""
        self.table.complete(number, now)
        self._policy.observe(prompt_tokens, output_tokens)

    def aborted(self, number: int, now: float) -> None:
        """The request leaves before its last token: shed, or its client has gone."""
        self.table.complete(number, now)
        if self._queue is not None and number in self._without_token:
            self._queue.leave(number)
            self._without_token.discard(number)
