"""A fleet in virtual time: arrivals, routers with stale reports, replicas; every request ends exactly once."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from deployments.hints import tiers_of
from deployments.wire import ReplicaState
from loadgen.simulator import engine
from loadgen.simulator.autoscaler import Autoscaler
from loadgen.simulator.coordinator import Coordinator, Reports
from loadgen.simulator.fleet import Drain, Fleet, Job, Outage, Outcome, check
from loadgen.simulator.lean import Ended
from loadgen.simulator.ledger import Ledger, Watch, number_of
from loadgen.simulator.moves import Moves
from loadgen.simulator.prefixes import Contents
from loadgen.simulator.replica import Clock, Replica
from loadgen.simulator.roster import Roster
from loadgen.simulator.router import Router
from loadgen.simulator.scaling import Autoscaling
from loadgen.simulator.transfer import Migration, Transfer
from policies.types import EmptyFleetError

__all__ = ["Autoscaling", "Cluster", "Drain", "Fleet", "Job", "Migration", "Outage", "Outcome", "Transfer"]

# What happens at the same moment happens in this order, and by replica.
STEP_ENDS, REPORTS, LEAVES, DIES, IS_BACK, CALLS = range(6)


class Cluster:
    """One run: make it, `run` it once. `fast` and `coast` choose short cuts, which change no result."""

    def __init__(self, fleet: Fleet, *, fast: bool = True, coast: bool = True) -> None:
        self.fleet = fleet
        self.clock = Clock()
        self._roster = Roster(fleet, self.clock, fast=fast, coast=coast)
        self.replicas = self._roster.replicas  # all that there have been
        self._tiers = tiers_of(fleet.tiers)
        self._heap: list[tuple[float, int, int]] = []
        self._calls: dict[int, Callable[[], None]] = {}  # in the heap by number
        self._asked = 0
        self._waits_for: list[float | None] = [None] * fleet.replicas  # the step end that is in the heap
        self._happens = (self._end_step, self._report, self._leave, self._die, self._come_back, self._call)
        self.alive, self._index = self._roster.alive, self._roster.index
        self._contents: Contents | None = None
        if fleet.shape.prefix_caching:
            self._contents = Contents(fleet.shape.block_size, fleet.block_tokens, plain=not fast)
        self.routers = [
            Router(
                fleet.balancing,
                self._tiers,
                np.random.default_rng([fleet.seed, i]),
                self.replicas,
                stale_s=fleet.stale_s,
                bounds=fleet.bounds,
            )
            for i in range(fleet.routers)
        ]
        self._reports = Reports(self, not fleet.report_s, fleet.stale_s)
        self._moves: Moves | None = None
        self._coordinator: Coordinator | None = None
        if (migration := fleet.migration) is not None:
            block_bytes = fleet.shape.block_size * fleet.model.kv_bytes
            self._moves = Moves(self, migration.transfer, migration.settings.limits, block_bytes)
            self._coordinator = Coordinator(self, self._moves, migration.settings, self._tiers, self._reports)
        self._scaling: Autoscaler | None = None
        if fleet.autoscaling is not None:
            self._scaling = Autoscaler(self, fleet.autoscaling, fleet.replicas, fleet.tiers)

    def run(self, jobs: Sequence[Job], watch: Watch | None = None) -> Outcome:
        """Play the jobs to their ends, each told to `watch`; ValueError for jobs out of order or too long."""
        check(self.fleet, jobs, len(self._tiers))
        self.jobs = jobs
        self._ledger = ledger = Ledger(jobs, watch)
        self.next_name = ledger.next_name
        if self.fleet.report_s > 0:
            for i in range(len(self.replicas)):
                self._push(i * self.fleet.report_s / len(self.replicas), REPORTS, i)
        for number, outage in enumerate(self.fleet.outages):
            self._push(outage.begin, DIES, number)
            if outage.end < math.inf:
                self._push(outage.end, IS_BACK, number)
        for drain in self.fleet.drains:
            self.at(drain.begin, partial(self._set_state, drain.replica, "draining"))
            if drain.end < math.inf:
                self.at(drain.end, partial(self._set_state, drain.replica, "serving"))
        if self._coordinator is not None:
            self._coordinator.start()
        if self._scaling is not None:
            self._scaling.start()
        arrived, heap = 0, self._heap
        while ledger.left:
            if arrived < len(jobs) and (not heap or jobs[arrived].due < heap[0][0]):
                self.clock.now = jobs[arrived].due
                self._arrive(arrived)
                arrived += 1
            elif heap:
                self._happen()
            else:
                raise RuntimeError(f"{ledger.left} requests are left, and nothing happens any more")
        duration = self.clock.now
        while self._moves is not None and self._moves.under_way:  # reservations for requests that have ended
            self._happen()
        return self._outcome(duration)

    # --- what happens

    def _push(self, when: float, kind: int, index: int) -> None:
        heapq.heappush(self._heap, (when, kind, index))

    def _happen(self) -> None:
        self.clock.now, kind, index = heapq.heappop(self._heap)
        self._happens[kind](index)

    def _follow(self, index: int) -> None:
        """Put the end of the replica's running step into the heap, once."""
        until = self.replicas[index].busy_until
        if until is not None and until != self._waits_for[index]:
            self._waits_for[index] = until
            self._push(until, STEP_ENDS, index)

    def _router(self, number: int) -> Router:
        return self.routers[number % len(self.routers)]

    def _arrive(self, number: int) -> None:
        job, router = self.jobs[number], self._router(number)
        verdict = router.decide(job.tier)
        if verdict.reason is not None:
            self._ledger.refused(number, 429, verdict.reason, router.retry_after(job.tier))
            return
        for other in verdict.shed:
            self._abort(other)
            self._ledger.refused(other, 429, "shed", router.retry_after(self.jobs[other].tier))
        if self._scaling is not None:
            self._scaling.sent(number, job.tier, job.due, job.prompt_tokens)
        router.enter(number, job.tier, job.due)
        self.send(number)
        if job.patience is not None:
            self._push(job.due + job.patience, LEAVES, number)

    def send(self, number: int, generated: int = 0) -> None:
        """Send a request to a replica, with the tokens that it was `generated` elsewhere."""
        job, now, router = self.jobs[number], self.clock.now, self._router(number)
        if self.fleet.report_s == 0:
            for name, replica in self.alive.items():
                router.hear(self._index[name], replica, now)
        try:
            name = router.choose(number, job.prompt_tokens, job.tier, job.session, now)
        except EmptyFleetError:
            self._ledger.replica[number] = -1
            if self._scaling is not None:
                self._scaling.wait(number, job.tier, generated)
            else:
                self.turn_away(number)
            return
        index = self._ledger.replica[number] = self._index[name]
        self.replicas[index].submit(self._request(number, self._ledger.sent_again(number), generated))
        self._follow(index)

    def _request(self, number: int, name: str, generated: int, adopt: dict[str, Any] | None = None) -> Any:
        job = self.jobs[number]
        return engine.request(
            name,
            job.prompt_tokens,
            job.output_tokens,
            job.due,
            tier=job.tier,
            ticket=number,
            oracle=self.fleet.oracle,
            told=job.told,
            generated=generated,
            adopt=adopt,
            content=self._contents.of(number, job.prompt_tokens, job.blocks) if self._contents else None,
        )

    def turn_away(self, number: int) -> None:
        """No replica can take a request."""
        self._router(number).aborted(number, self.clock.now)
        self._ledger.refused(number, 503, "no_replica", None)
        if self._scaling is not None:
            self._scaling.ended(number)

    def _abort(self, number: int) -> None:
        self._router(number).aborted(number, self.clock.now)
        if (index := self._ledger.replica[number]) >= 0:
            self.replicas[index].abort(self._ledger.names[number])
        if self._moves is not None:
            self._moves.aborted(number)
        if self._scaling is not None:
            self._scaling.ended(number)

    def _leave(self, number: int) -> None:
        if not self._ledger.over(number):
            self._abort(number)
            self._ledger.ended(number, self.clock.now, self.jobs[number].left)

    def _die(self, number: int) -> None:
        index = self.fleet.outages[number].replica
        replica = self.replicas[index]
        if replica.name not in self.alive:
            return  # the autoscaler has stopped it before
        left = replica.crash()
        self._gone(index)
        if self._moves is not None and self._coordinator is not None:
            self._moves.died(replica)
            self._coordinator.died(replica)
        if self._scaling is not None:
            self._scaling.died(index)
        for name in sorted(left, key=number_of):
            if self._ledger.names[number_of(name)] == name:
                self.send(number_of(name), left[name])

    def _gone(self, index: int) -> None:
        """A replica's process has ended."""
        self._waits_for[index] = None
        self._roster.gone(index)
        for router in self.routers:
            router.lose(index, self.replicas[index])

    def _come_back(self, number: int) -> None:
        if self._scaling is not None:
            return  # another was started
        replica = self._roster.restart(self.fleet.outages[number].replica)
        for router in self.routers:
            router.table.join(replica.name)

    def _end_step(self, index: int) -> None:
        if self._waits_for[index] != self.clock.now:
            return  # the replica has died in that step
        self._waits_for[index] = None
        replica = self.replicas[index]
        self._note(replica.end_step())
        self._follow(index)
        if self._coordinator is not None and not self.fleet.report_s and len(self._tiers) > 1:
            if replica.scheduler.waiting:
                self._coordinator.look(replica.report(0))

    def _note(self, ended: Ended) -> None:
        now, ledger = self.clock.now, self._ledger
        for name in ended.first:
            if ledger.names[number := number_of(name)] == name:
                ledger.started(number, now)
                self._router(number).started(number, now)
                if self._scaling is not None:
                    self._scaling.first(number)
        for name in ended.last:
            if ledger.names[number := number_of(name)] != name:
                continue  # the request was sent again elsewhere before
            if self._moves is not None:
                self._moves.finished(name)
            ledger.ended(number, now)
            job = self.jobs[number]
            self._router(number).ended(number, job.prompt_tokens, job.output_tokens, now)
            if self._scaling is not None:
                self._scaling.ended(number)

    def _report(self, index: int) -> None:
        replica = self.replicas[index]
        if replica.name in self.alive:
            for router in self.routers:
                router.hear(index, replica, self.clock.now)
            if self._coordinator is not None:
                report = replica.report(0)
                self._reports.hear(report)
                self._coordinator.look(report)
        elif self._scaling is not None:
            return  # it will not come back
        self._push(self.clock.now + self.fleet.report_s, REPORTS, index)

    def _call(self, number: int) -> None:
        self._calls.pop(number)()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call at this time; what is due at the same moment is called in the order in which it was asked for."""
        self._asked += 1
        self._calls[self._asked] = call
        self._push(when, CALLS, self._asked)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call in so many seconds."""
        self.at(self.clock.now + seconds, call)

    # --- drains and moves

    def _set_state(self, index: int, state: ReplicaState, within_s: float | None = None) -> None:
        replica = self.replicas[index]
        if not self._roster.runs(index):
            return
        replica.state = state
        for router in self.routers:
            router.hear(index, replica, self.clock.now, state=True)
        self._reports.hear(replica.report(0))
        if self._coordinator is not None:
            if state == "serving":
                self._coordinator.undrain(replica)
            else:
                self._coordinator.drain(replica, within_s)
        if self._scaling is not None and state == "serving":
            self._scaling.place_waiting()

    def ask(self, replica: Replica, call: Callable[[], None]) -> None:
        """Have `call` done between two steps of a replica; never if it dies before."""
        if self.alive.get(replica.name) is replica:
            replica.ask(call)
            self._follow(self._index[replica.name])

    def owned(self, number: int) -> str:
        """The submission of a request whose tokens the client takes."""
        return self._ledger.names[number]

    def adopt(self, replica: Replica, number: int, name: str, generated: int, adopt: dict[str, Any]) -> None:
        """Give a replica a request that goes on from its reservation."""
        replica.scheduler.add_request(self._request(number, name, generated, adopt))

    def pass_to(self, number: int, replica: Replica, name: str) -> None:
        """The client takes the tokens of this submission from now on."""
        self._ledger.replica[number], self._ledger.names[number] = self._index[replica.name], name

    def announce(self, number: int) -> None:
        """The ingress hears that the call at the source has ended."""
        self._router(number).moved(number, self.clock.now)

    def hand_back(self, number: int) -> None:
        """Take a request off its replica and send it again, with its tokens, elsewhere."""
        replica, name = self.replicas[self._ledger.replica[number]], self._ledger.names[number]
        self._router(number).moved(number, self.clock.now)
        generated = replica.tokens(name)
        replica.abort(name)
        self.send(number, generated)

    # --- autoscaling

    def place_of(self, request: int) -> int:
        """The replica of a request, -1: none."""
        return self._ledger.replica[request]

    def open_replica(self) -> int:
        """Make one more replica, which takes requests from now on."""
        replica, index = self._roster.add(), len(self.replicas) - 1
        self._waits_for.append(None)
        for router in self.routers:
            router.add(replica)
        if self.fleet.report_s > 0:
            self._push(self.clock.now, REPORTS, index)
        return index

    def drain_replica(self, index: int, within_s: float) -> None:
        """It takes no more requests; its own move away, or in `within_s` seconds at the latest are sent again."""
        self._set_state(index, "draining", within_s)
        if self._coordinator is None:
            self.later(within_s, partial(self._give_up, index))

    def _give_up(self, index: int) -> None:
        if (replica := self.replicas[index]).name in self.alive:
            for name in sorted(replica.scheduler.requests, key=number_of):
                self.hand_back(number_of(name))

    def is_empty(self, index: int) -> bool:
        """Whether a replica has no requests, and no move has to do with it."""
        replica = self.replicas[index]
        moving = self._moves is not None and self._moves.has_to_do_with(replica)
        return not replica.scheduler.requests and not moving

    def close_replica(self, index: int) -> None:
        """A replica that is empty ends."""
        replica = self.replicas[index]
        replica.check_idle()
        self._gone(index)
        if self._coordinator is not None:
            self._coordinator.died(replica)

    # --- the end

    def _outcome(self, duration: float) -> Outcome:
        self._roster.check_idle()
        moves, coordinator, scaling = self._moves, self._coordinator, self._scaling
        return Outcome(
            records=self._ledger.records(),
            replica=self._ledger.replica,
            duration=duration,
            steps=[replica.steps for replica in self.replicas],
            preemptions=self._roster.preemptions,
            busy_s=[replica.busy_s for replica in self.replicas],
            moves={reason: dict(ended) for reason, ended in coordinator.totals.items()} if coordinator else {},
            pauses=moves.pauses if moves else [],
            moved_bytes=moves.bytes if moves else 0.0,
            replica_s=scaling.replica_seconds(duration) if scaling else len(self.replicas) * duration,
            scaling=scaling.log if scaling else [],
            prefix_queries=[queries for queries, _ in self._roster.hits],
            prefix_hits=[found for _, found in self._roster.hits],
        )
