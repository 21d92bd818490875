"""Serve request router of the engine replicas: a balancing policy over live load reports and an own-dispatch ledger.

Private Ray names used (contract-tested): `RequestRouter._choose_replica_for_request`, `_event_loop`. The base class's
own path hangs when two calls of one ingress request wait at once and probes queue lengths we already know.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments import tracing
from deployments.gauges import RouterCounts
from deployments.hints import tiers_of
from deployments.reports import ReportSubscriber
from deployments.route_span import record_choice, record_none
from deployments.routing import Heard, NoReplicaError, WaitingLine, register_router
from deployments.settings import make_policy
from deployments.wire import ReplicaReport
from policies.balancing import BALANCING, UsesTiers
from policies.fleet import FleetTable
from policies.freeness import freeness, normal_freeness, normalised
from policies.types import Call

logger = logging.getLogger(f"ray.serve.{__name__}")

DRAINING_SILENT_S = 5.0  # its process is busy ending; a call to one that is gone fails by itself


class FleetRouter(RequestRouter):
    """Chooses the replica of each `generate` call from its keywords `ticket`, `prompt_tokens`, `tier` and `session`.

    `trace` is what the span of the choice hangs under. `target_replica` pins a call. A replica that drains takes pinned
    calls only, for as long as it reports.
    """

    def initialize_state(
        self, balancing: dict[str, Any], wait_for_replica_s: float = 5.0, tiers: dict[str, Any] | None = None
    ) -> None:
        """Called by Serve with `request_router_kwargs`.

        `balancing` holds until a replica announces other settings; `tiers` has the lists `headroom` (shares of the KV
        cache) and `aging_s` (seconds, None: never) with one entry per tier. None: one tier.
        """
        self._wait_for_replica_s = wait_for_replica_s
        self.tiers = tiers_of(tiers)
        self._rng = np.random.default_rng()
        self._replica_by_name: dict[str, RunningReplica] = {}
        self._listed: set[str] = set()
        self._tickets: defaultdict[tuple[ReplicaID, str], deque[int | None]] = defaultdict(deque)
        self._subscriber: ReportSubscriber | None = None
        self._settings: dict[str, Any] = {}
        self._settings_t = 0.0
        self.reports: dict[str, ReplicaReport] = {}
        self._heard: dict[str, float] = {}  # monotonic seconds
        self.listener: Callable[[ReplicaReport], None] | None = None  # hears each report, in the router's thread
        self.table = FleetTable()
        self._line = WaitingLine(lambda: bool(self.table.ids))
        self._fallback = BALANCING.make("p2c")
        self._counts = RouterCounts()
        self._apply_settings(balancing)
        register_router(self._deployment_id.name, self)

    def _apply_settings(self, balancing: dict[str, Any]) -> None:
        if balancing == self._settings:
            return  # each replica announces them again when it starts: what the policy has learnt stays
        policy = make_policy(BALANCING, balancing)
        if isinstance(policy, UsesTiers):
            policy.use_tiers(self.tiers)
        self.policy = policy
        self.table.stale_s = balancing.get("stale_s", self.table.stale_s)
        self._settings = balancing

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Follow the set of running replicas and where each publishes its reports."""
        super().update_replicas(replicas)
        if self._subscriber is None:
            self._subscriber = ReportSubscriber(self._on_report, self._event_loop)
        self._listed = {r.replica_id.unique_id for r in replicas}
        for replica in replicas:
            name = replica.replica_id.unique_id
            self._replica_by_name[name] = replica
            self.table.join(name)
        for name in self._replica_by_name.keys() - self._listed:
            self._check_unlisted(name)
        self._follow_reports()
        self._line.advance()

    def _follow_reports(self) -> None:
        if self._subscriber is not None:
            metadata = (replica.replica_metadata for replica in self._replica_by_name.values())
            self._subscriber.set_endpoints({data["reports"] for data in metadata if data})

    def _check_unlisted(self, name: str) -> None:
        """Drop a replica that Serve no longer lists, unless it still reports.

        Serve also takes a healthy replica off its list for the moment in which its user_config changes. One that stops
        says `draining` and, until its last call has ended, takes pinned calls (moves and what follows from them); one
        that is gone says nothing.
        """
        if name in self._listed or name not in self._replica_by_name:
            return
        report, silent_s = self.reports.get(name), time.monotonic() - self._heard.get(name, -math.inf)
        patience = {"serving": self.table.stale_s, "draining": max(self.table.stale_s, DRAINING_SILENT_S)}
        if report is not None and silent_s <= patience.get(report.state, -math.inf):
            self._event_loop.call_later(0.1, self._check_unlisted, name)
        else:
            self._drop(name)

    def _drop(self, name: str) -> None:
        self._replica_by_name.pop(name, None)
        self.table.leave(name)
        self.reports.pop(name, None)
        self._heard.pop(name, None)
        self._follow_reports()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Take a dead replica out at once, before Serve's controller notices."""
        super().on_replica_actor_died(replica_id)
        self._drop(replica_id.unique_id)

    def _on_report(self, report: ReplicaReport) -> None:
        if report.replica not in self._replica_by_name:
            return
        now = self._heard[report.replica] = time.monotonic()
        self.reports[report.replica] = report
        self.table.apply(report, now)
        if self.listener is not None:
            self.listener(report)
        self._counts.flush(self.policy.name, now)
        self._line.advance()
        if report.settings and report.settings_t > self._settings_t:
            self._settings_t = report.settings_t
            try:
                self._apply_settings(report.settings)
            except ValueError:
                logger.exception("balancing settings refused, the ones before stay in force")

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        keywords = pending_request.kwargs
        ticket = keywords.get("ticket")
        prompt_tokens, tier = keywords.get("prompt_tokens", 0), self.tiers.clamp(keywords.get("tier", 0))
        internal_id = pending_request.metadata.internal_request_id
        if is_retry and ticket is not None:
            self._forget_attempt(ticket, internal_id)
        name = keywords.get("target_replica")
        if name is None:
            name = await self._choose(prompt_tokens, tier, keywords.get("session"), keywords.get("trace"), is_retry)
        elif is_retry:
            raise NoReplicaError(f"replica {name} takes no more calls")  # it would refuse each further one as well
        replica = self._replica_by_name.get(name)
        if replica is None:
            raise NoReplicaError(f"replica {name} is gone")
        if ticket is not None:
            self.table.dispatch(ticket, name, prompt_tokens, tier=tier, now=time.monotonic())
        # Without a ticket too: its end must not be taken for that of a sibling.
        self._tickets[replica.replica_id, internal_id].append(ticket)
        return replica

    def _forget_attempt(self, ticket: int, internal_id: str) -> None:
        """Close the entry of a refused attempt; Serve reports its end later, which must not close the next one's."""
        self.table.complete(ticket)
        for (_, request_id), tickets in self._tickets.items():
            if request_id == internal_id and ticket in tickets:
                tickets.remove(ticket)
                tickets.appendleft(None)

    async def _choose(
        self, prompt_tokens: int, tier: int, session: int | None, trace: dict[str, str] | None, again: bool
    ) -> str:
        spans, began = tracing.current() if trace else None, time.monotonic()
        try:
            await self._line.turn(tier, self._wait_for_replica_s)
        except TimeoutError:
            if spans is not None:
                record_none(spans, trace, began, (prompt_tokens, tier, again))
            raise NoReplicaError("no engine replica can take requests now") from None
        call = Call(prompt_tokens, tier, time.monotonic(), session)
        stale = self.table.all_stale(call.now)
        policy = self._fallback if stale else self.policy
        column = policy.choose(self.table, call, self._rng)
        name = self.table.ids[column]
        age_s = call.now - self._heard.get(name, -math.inf)
        self._counts.chose(policy.name, stale, self.table.requests, column, age_s)
        self._counts.flush(self.policy.name, call.now)
        if spans is not None:
            record_choice(spans, trace, began, (prompt_tokens, tier, again), (policy.name, stale), self.table, column)
        return name

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Only reached through Serve's `choose_replica()`; the request path is `_choose_replica_for_request`."""
        assert pending_request is not None
        pending_request.routing_context.should_backoff = True
        return [[await self._choose_replica_for_request(pending_request)]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Close one ledger entry; sibling calls of one HTTP request share the id, so each call closes one."""
        key = (replica_id, internal_request_id)
        if tickets := self._tickets.get(key):
            if (ticket := tickets.popleft()) is not None:
                self.table.complete(ticket, time.monotonic())
            if not tickets:
                del self._tickets[key]

    def heard(self) -> list[Heard]:
        """The last report of each replica, and when it came; may be called from any thread."""
        return [Heard(report, self._heard.get(name, -math.inf)) for name, report in list(self.reports.items())]

    def fresh(self, now: float) -> list[Heard]:
        """Those of `heard` that came within `stale_s` seconds."""
        return [heard for heard in self.heard() if now - heard.at <= self.table.stale_s]

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        """Tell the policy the lengths of a finished request (SAL's online beta)."""
        self.policy.observe(prompt_tokens, output_tokens)

    @property
    def reports_stale(self) -> bool:
        """Whether every report is too old, so that the router falls back to two choices on its own in-flight counts."""
        return self.table.all_stale(time.monotonic())

    def freeness(self) -> dict[str, dict[str, float]]:
        """Freeness of each replica by its last report: `F`, `F_normal` in blocks per running request, `phi`.

        All are inf on an idle replica and -inf on one that does not serve.
        """
        return {name: self._freeness(report) for name, report in self.reports.items()}

    def _freeness(self, report: ReplicaReport) -> dict[str, float]:
        full = freeness(report, self.tiers)
        return {"F": full, "F_normal": normal_freeness(report), "phi": normalised(full, report)}
