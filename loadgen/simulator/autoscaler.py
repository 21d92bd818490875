"""Autoscaling in virtual time: asks the policy, applies Serve's windows, starts and stops replicas."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from deployments.autoscaling import ARRIVALS_S, REMEMBERED_S
from loadgen.simulator.replica import Clock, Replica
from loadgen.simulator.scaling import SCALING, Autoscaling, Scaled
from policies.autoscaling.demand import Fleet as Demand
from policies.autoscaling.demand import Load
from policies.autoscaling.windows import Windows

HAND_BACK_S = 5.0  # before a replica that drains is killed, its requests are sent again elsewhere


class Shop(Protocol):
    """What the autoscaler needs of the cluster. Replicas are known by their numbers."""

    clock: Clock
    replicas: list[Replica]

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call in so many seconds."""

    def place_of(self, request: int) -> int:
        """The replica of a request, -1: none."""

    def open_replica(self) -> int:
        """Make one more replica, which takes requests from now on."""

    def drain_replica(self, index: int, within_s: float) -> None:
        """It takes no more requests, and those that it has go elsewhere."""

    def is_empty(self, index: int) -> bool:
        """Whether it has nothing to do any more."""

    def close_replica(self, index: int) -> None:
        """Its process ends."""

    def send(self, number: int, generated: int = 0) -> None:
        """Send a request to a replica, with the tokens that it has generated."""

    def turn_away(self, request: int) -> None:
        """No replica can take a request."""


class Autoscaler:
    """Asks the policy every `interval_s`, applies Serve's windows, starts and stops replicas."""

    def __init__(self, shop: Shop, settings: Autoscaling, replicas: int, tiers: dict[str, Any] | None) -> None:
        if not settings.least <= replicas <= settings.most:
            raise ValueError(
                f"replicas: {replicas} to begin with, but the autoscaler keeps {settings.least} to {settings.most}"
            )
        self._shop, self.settings = shop, settings
        parameters = dict(settings.policy)
        self._policy = SCALING.make(parameters.pop("name", ""), **parameters)
        self._windows = Windows(settings.up_s, settings.down_s, settings.to_zero_s)
        self.target = replicas
        self.log = [Scaled(0.0, replicas, replicas, "start")]
        self.waiting: list[tuple[int, int, int, int]] = []  # (tier, arrival, request, tokens): for a first replica
        self._running = list(range(replicas))  # in the order in which they began
        self._starting: list[int] = []  # by number of the start; one that is called off is no longer here
        self._stopping: list[int] = []
        self._starts = 0
        self._began = dict.fromkeys(self._running, 0.0)  # replica -> when its start began
        self._spent_s = 0.0  # of replicas that are gone
        self._start_began: dict[int, float] = {}
        self._ongoing = 0
        self._counts: deque[tuple[float, int]] = deque()
        self._arrivals = 0
        promises: Sequence[float | None] = (tiers or {}).get("ttft_slo_s", ())
        self._slo_s = promises if any(promise is not None for promise in promises) else ()
        self._unstarted: dict[int, tuple[int, float, int]] = {}  # requests without a token: tier, due, prompt tokens
        self._arrived: deque[tuple[float, int]] = deque()  # when, and prompt tokens
        self._came: dict[int, deque[tuple[float, bool]]] = {}  # replica -> its first tokens: when, whether late

    def start(self) -> None:
        """Begin to look at the load."""
        self._shop.later(0.0, self._beat)

    # --- what the cluster tells

    def sent(self, request: int, tier: int, due: float, tokens: int) -> None:
        """A request with so many prompt tokens has come in."""
        self._ongoing += 1
        if not self._slo_s or self._promise(tier) is not None:
            self._unstarted[request] = (tier, due, tokens)
            self._arrived.append((self._shop.clock.now, tokens))

    def first(self, request: int) -> None:
        """A request has its first token."""
        if (known := self._unstarted.pop(request, None)) is not None:
            now = self._shop.clock.now
            came = self._came.setdefault(self._shop.place_of(request), deque())
            tier, due, _ = known
            came.append((now, self._late(tier, due, now)))

    def ended(self, request: int) -> None:
        """A request has its last token, or leaves, or is refused."""
        self._ongoing -= 1
        self._unstarted.pop(request, None)
        self.waiting = [one for one in self.waiting if one[2] != request]

    def wait(self, request: int, tier: int, tokens: int) -> None:
        """A request finds no replica: it waits for one, which is started at once if none starts yet."""
        self._arrivals += 1
        entry = (tier, self._arrivals, request, tokens)
        insort(self.waiting, entry)
        self._shop.later(self.settings.cold_start_s, partial(self._give_up, entry))
        if not self._running:
            self._decide()

    def place_waiting(self) -> None:
        """There is a replica again: send those that wait."""
        waiting, self.waiting = self.waiting, []
        for _, _, request, tokens in waiting:
            self._shop.send(request, tokens)

    def _give_up(self, entry: tuple[int, int, int, int]) -> None:
        if entry in self.waiting:
            self._shop.turn_away(entry[2])

    def died(self, index: int) -> None:
        """A replica is dead: another is started."""
        self._forget(index)
        while len(self._running) + len(self._starting) < self.target:
            self._start_one()

    def replica_seconds(self, end: float) -> float:
        """Seconds of all replicas until then, from the decision to start one to the end of its process."""
        begun = [*self._began.values(), *(self._start_began[start] for start in self._starting)]
        return self._spent_s + sum(max(0.0, end - at) for at in begun)

    # --- decisions

    def _beat(self) -> None:
        for index in [index for index in self._stopping if self._shop.is_empty(index)]:
            self._forget(index)
            self._shop.close_replica(index)
        self._decide()
        self._shop.later(self.settings.interval_s, self._beat)

    def _decide(self) -> None:
        now, settings, running = self._shop.clock.now, self.settings, len(self._running)
        self._counts.append((now, self._ongoing))
        while self._counts[0][0] < now - settings.look_back_s:
            self._counts.popleft()
        ongoing = sum(count for _, count in self._counts) / len(self._counts)
        loads = [self._load(index, now) for index in self._running]
        demand = Demand(loads, self.target, settings.least, settings.most, float(len(self.waiting)))
        decision = self._policy.decide(demand, ongoing)
        wanted = min(max(decision.replicas, settings.least), settings.most)
        target = self._windows.apply(wanted, self.target, running, now)
        if target != self.target:
            self.target = target
            self._follow()
            self.log.append(Scaled(now, target, len(self._running), decision.reason))

    def _follow(self) -> None:
        """Start replicas, or stop them, until there are as many as wanted: those that start first, then the newest."""
        while len(self._running) + len(self._starting) < self.target:
            self._start_one()
        while len(self._running) + len(self._starting) > self.target:
            if self._starting:
                self._spent_s += self._shop.clock.now - self._start_began.pop(self._starting.pop())
            else:
                index = self._running.pop()
                self._stopping.append(index)
                patience = self.settings.shutdown_s
                self._shop.drain_replica(index, max(patience - HAND_BACK_S, patience / 2))

    def _start_one(self) -> None:
        self._starts += 1
        self._starting.append(self._starts)
        self._start_began[self._starts] = self._shop.clock.now
        self._shop.later(self.settings.startup_s, partial(self._up, self._starts))

    def _up(self, start: int) -> None:
        if start not in self._starting:
            return  # called off
        self._starting.remove(start)
        index = self._shop.open_replica()
        self._running.append(index)
        self._began[index] = self._start_began.pop(start)
        self.place_waiting()

    def _forget(self, index: int) -> None:
        self._spent_s += self._shop.clock.now - self._began.pop(index)
        for those in (self._running, self._stopping):
            if index in those:
                those.remove(index)
        self._came.pop(index, None)

    # --- loads

    def _load(self, index: int, now: float) -> Load:
        replica = self._shop.replicas[index]
        figures = replica.figures()
        came = self._came.get(index, deque())
        while came and came[0][0] < now - REMEMBERED_S:
            came.popleft()
        mine = [known for request, known in self._unstarted.items() if self._shop.place_of(request) == index]
        overdue = sum(self._late(tier, due, now) for tier, due, _ in mine)
        while self._arrived and self._arrived[0][0] < now - ARRIVALS_S:
            self._arrived.popleft()
        return Load(
            age_s=0.0,
            free_blocks=figures.free_blocks,
            total_blocks=figures.total_blocks,
            block_size=figures.block_size,
            running=figures.running,
            waiting=figures.waiting,
            queued_tokens=figures.queued_tokens,
            head_blocks=figures.head_blocks,
            max_num_seqs=figures.max_num_seqs,
            wait_s=max((now - due for _, due, _ in mine), default=0.0),
            first_tokens=len(came) + overdue,
            late=sum(late for _, late in came) + overdue,
            draining=replica.state != "serving",
            full_rate=figures.full_rate,
            due_tokens=sum(tokens for _, _, tokens in mine),
            # Which replica they came to does not matter: the policy adds them up.
            prompt_rate=sum(tokens for _, tokens in self._arrived) / ARRIVALS_S / len(self._running),
        )

    def _promise(self, tier: int) -> float | None:
        return self._slo_s[min(tier, len(self._slo_s) - 1)] if self._slo_s else None

    def _late(self, tier: int, due: float, now: float) -> bool:
        promise = self._promise(tier)
        return promise is not None and now - due > promise
