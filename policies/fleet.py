"""One router's view of the fleet: the last report of each replica plus its own calls that no report covers yet."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from policies.freeness import Usage
from policies.tiers import MAX_TIERS

COLUMNS = 13
LATEST = 0.6  # weight of the call that ended last in `service_s`: the multi-tier paper's code


class Report(Usage, Protocol):
    """Attributes of a load report that the table reads; units as in deployments.wire.ReplicaReport."""

    @property
    def replica(self) -> str: ...
    @property
    def seq(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def queued_tokens(self) -> int: ...
    @property
    def batch_tokens(self) -> int: ...
    @property
    def admitted(self) -> Sequence[int]: ...


class _Replica:
    """Last known figures of one replica and this router's share of them (own: calls that no report covers yet)."""

    __slots__ = (
        "batch_tokens",
        "column",
        "free_tokens",
        "head_tokens",
        "heard",
        "id",
        "inflight",
        "own_by_tier",
        "own_requests",
        "own_tiers",
        "own_tokens",
        "queued_tokens",
        "running",
        "seq",
        "service_s",
        "tiers",
        "tiers_shown",
        "total_tokens",
        "waiting",
    )

    def __init__(self, replica_id: str, total_tokens: int, batch_tokens: int) -> None:
        self.id = replica_id
        self.column = -1  # -1: not eligible
        self.seq = -1
        self.heard = -math.inf
        self.free_tokens = self.total_tokens = total_tokens
        self.batch_tokens = batch_tokens
        self.queued_tokens = self.head_tokens = self.running = self.waiting = 0
        self.tiers = self.own_tiers = self.tiers_shown = 0  # bit p: tier p, by report, of own calls, in the table
        self.own_tokens = self.own_requests = self.inflight = 0
        self.own_by_tier = [0] * MAX_TIERS
        self.service_s = 0.0


class FleetTable:
    """Loads of the eligible replicas as float64 columns, index i belonging to `ids[i]`; read them, never write.

    free_tokens    free KV cache, tokens, less the prompts of own uncovered calls (may go below 0)
    queued_tokens  prompt tokens not computed yet, plus the prompts of own uncovered calls
    own_tokens     the prompts of own uncovered calls, for whoever needs only one of the two above without them
    head_tokens    KV cache wanted by the head of the queue, tokens
    total_tokens   the whole KV cache, tokens
    requests       running and waiting, plus own uncovered calls
    running        running, plus own uncovered calls
    waiting        waiting, plus own uncovered calls: these may do either
    inflight       this router's own unfinished calls
    service_s      mean seconds of own calls that ended there, the latest weighing LATEST; 0 before the first
    batch_tokens   the engine's token budget per iteration
    per_batch      1 / batch_tokens: numpy multiplies twice as fast as it divides
    id_hash        CRC-32 of the id, the same in every process
    tier_tokens    one row per tier p: total_tokens where a request of tier p runs or waits (own uncovered calls
                   included), else 0; times the tier's share it is that tier's headroom there

    `block_size` is that of the newest report: a fleet runs one engine configuration.

    A call is covered, and no longer added, once a report of its replica names its ticket in `admitted`: the report's
    figures count it then. Reports are shared, ledgers are not, so any number of routers can keep one each. A ticket
    is known once: dispatching it again (a retry, or the rare collision of two 32-bit tickets) forgets the first call.

    Eligible are replicas that joined and whose last report, if any, says `serving`. One that never reported counts
    as idle, of the size of the first replica that did. Times are the caller's monotonic seconds.
    """

    def __init__(self, *, stale_s: float = 1.0) -> None:
        self.stale_s = stale_s
        self.ids: list[str] = []
        self.block_size = 1
        self._replicas: dict[str, _Replica] = {}
        self._eligible: list[_Replica] = []
        self._uncovered: dict[int, tuple[_Replica, int, int]] = {}  # prompt tokens, tier
        self._inflight: dict[int, tuple[_Replica, float]] = {}  # when it was sent
        self._idle: tuple[int, int] | None = None  # total and batch tokens of a replica that never reported
        self._heard = -math.inf  # newest report of an eligible replica
        self._cells = np.zeros((COLUMNS + MAX_TIERS, 8))
        self._view()

    def join(self, replica_id: str) -> None:
        """Add a replica; nothing happens if it is here already."""
        if replica_id not in self._replicas:
            replica = self._replicas[replica_id] = _Replica(replica_id, *(self._idle or (0, 1)))
            self._enter(replica)

    def leave(self, replica_id: str) -> list[int]:
        """Remove a replica; returns the tickets of this router's calls that were in flight there, oldest first."""
        replica = self._replicas.pop(replica_id, None)
        if replica is None:
            return []
        if replica.column >= 0:
            self._exit(replica)
        tickets = [ticket for ticket, (where, _) in self._inflight.items() if where is replica]
        for ticket in tickets:
            del self._inflight[ticket]
            self._uncovered.pop(ticket, None)
        return tickets

    def apply(self, report: Report, now: float) -> bool:
        """Take a report received at `now`; False if it is not newer than the last one or its replica is not here."""
        replica = self._replicas.get(report.replica)
        if replica is None or report.seq <= replica.seq:
            return False
        block_size = self.block_size = report.block_size
        replica.seq, replica.heard = report.seq, now
        replica.free_tokens = report.free_blocks * block_size
        replica.total_tokens = report.total_blocks * block_size
        replica.head_tokens = report.head_blocks * block_size
        replica.queued_tokens = report.queued_tokens
        replica.running, replica.waiting = report.running, report.waiting
        replica.batch_tokens = report.batch_tokens
        replica.tiers = _mask(report.running_by_tier) | _mask(report.waiting_by_tier)
        for ticket in report.admitted:
            self._cover(ticket, replica)
        if report.state != "serving":
            if replica.column >= 0:
                self._exit(replica)
        elif replica.column >= 0:
            self._write(replica)
        else:
            self._enter(replica)
        if replica.column >= 0:
            self._heard = max(self._heard, now)
        if self._idle is None:
            self._assume_idle(replica.total_tokens, report.batch_tokens)
        return True

    def dispatch(
        self, ticket: int, replica_id: str, prompt_tokens: int, *, tier: int = 0, now: float = math.nan
    ) -> None:
        """Count a call that is about to be sent; KeyError if the replica is not here."""
        replica = self._replicas[replica_id]
        if ticket in self._inflight:
            self.complete(ticket)
        tier = min(max(tier, 0), MAX_TIERS - 1)
        self._inflight[ticket] = (replica, now)
        self._uncovered[ticket] = (replica, prompt_tokens, tier)
        replica.inflight += 1
        replica.own_requests += 1
        replica.own_tokens += prompt_tokens
        replica.own_by_tier[tier] += 1
        replica.own_tiers |= 1 << tier
        if replica.column >= 0:
            self._write_own(replica)

    def complete(self, ticket: int, now: float = math.nan) -> None:
        """Forget a call that ended, however it ended; nothing happens if it is not known (any more).

        With `now`, here and in `dispatch`, its seconds count in `service_s`.
        """
        if ticket not in self._inflight:
            return
        replica, sent = self._inflight.pop(ticket)
        replica.inflight -= 1
        if not math.isnan(spent := now - sent):
            replica.service_s = LATEST * spent + (1 - LATEST) * replica.service_s if replica.service_s else spent
        self._cover(ticket, replica)
        if replica.column >= 0:
            self._write_own(replica)

    def all_stale(self, now: float) -> bool:
        """True if no eligible replica reported within the last `stale_s` seconds: only own calls are known then."""
        return now - self._heard > self.stale_s

    def stale(self, now: float) -> list[str]:
        """Eligible replicas whose last report is older than `stale_s` (their last known figures stay in use)."""
        return [replica.id for replica in self._eligible if now - replica.heard > self.stale_s]

    def _cover(self, ticket: int, replica: _Replica) -> None:
        call = self._uncovered.get(ticket)
        if call is not None and call[0] is replica:  # another replica's: a retry went elsewhere, or a collision
            _, prompt_tokens, tier = self._uncovered.pop(ticket)
            replica.own_requests -= 1
            replica.own_tokens -= prompt_tokens
            replica.own_by_tier[tier] -= 1
            if not replica.own_by_tier[tier]:
                replica.own_tiers &= ~(1 << tier)

    def _assume_idle(self, total_tokens: int, batch_tokens: int) -> None:
        self._idle = (total_tokens, batch_tokens)
        for replica in self._eligible:
            if replica.seq < 0:
                replica.free_tokens = replica.total_tokens = total_tokens
                replica.batch_tokens = batch_tokens
                self._write(replica)

    def _enter(self, replica: _Replica) -> None:
        replica.column = len(self.ids)
        self.ids.append(replica.id)
        self._eligible.append(replica)
        if len(self.ids) > self._cells.shape[1]:
            self._cells = np.hstack([self._cells, np.zeros_like(self._cells)])
        self._view()
        self._place(replica)

    def _exit(self, replica: _Replica) -> None:
        """Close the gap with the last column."""
        last = self._eligible.pop()
        self.ids.pop()
        if last is not replica:
            last.column = replica.column
            self._eligible[last.column] = last
            self.ids[last.column] = last.id
            self._place(last)
        replica.column = -1
        self._heard = max((other.heard for other in self._eligible), default=-math.inf)
        self._view()

    def _view(self) -> None:
        views = self._cells[:, : len(self.ids)]
        self.free_tokens, self.queued_tokens, self.own_tokens, self.head_tokens, self.total_tokens = views[:5]
        self.requests, self.running, self.waiting, self.inflight, self.service_s = views[5:10]
        self.batch_tokens, self.per_batch, self.id_hash = views[10:COLUMNS]
        self.tier_tokens = views[COLUMNS:]

    def _place(self, replica: _Replica) -> None:
        """Fill a column that another replica, or none, had."""
        self.id_hash[replica.column] = zlib.crc32(replica.id.encode())
        self.total_tokens[replica.column] = math.nan  # rewrites the tiers
        self._write(replica)

    def _write(self, replica: _Replica) -> None:
        column = replica.column
        self.head_tokens[column] = replica.head_tokens
        self.batch_tokens[column] = replica.batch_tokens
        self.per_batch[column] = 1 / replica.batch_tokens
        if self.total_tokens[column] != replica.total_tokens:
            self.total_tokens[column] = replica.total_tokens
            self.tier_tokens[:, column] = replica.tiers_shown = 0
        self._write_own(replica)

    def _write_own(self, replica: _Replica) -> None:
        column, tokens, requests = replica.column, replica.own_tokens, replica.own_requests
        self.free_tokens[column] = replica.free_tokens - tokens
        self.queued_tokens[column] = replica.queued_tokens + tokens
        self.own_tokens[column] = tokens
        self.running[column] = replica.running + requests
        self.waiting[column] = replica.waiting + requests
        self.requests[column] = replica.running + replica.waiting + requests
        self.inflight[column] = replica.inflight
        self.service_s[column] = replica.service_s
        tiers = replica.tiers | replica.own_tiers
        changed = tiers ^ replica.tiers_shown
        replica.tiers_shown = tiers
        while changed:
            bit = changed & -changed
            self.tier_tokens[bit.bit_length() - 1, column] = replica.total_tokens if tiers & bit else 0
            changed ^= bit


def _mask(by_tier: Sequence[int]) -> int:
    """Bit p is set if there are requests of tier p."""
    return sum(1 << p for p, requests in enumerate(by_tier[:MAX_TIERS]) if requests)
