"""One router's view of the fleet: the last report of each replica plus its own calls that no report covers yet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

COLUMNS = 6


class Report(Protocol):
    """Attributes of a load report that the table reads; units as in deployments.wire.ReplicaReport."""

    @property
    def replica(self) -> str: ...
    @property
    def seq(self) -> int: ...
    @property
    def state(self) -> str: ...
    @property
    def free_blocks(self) -> int: ...
    @property
    def total_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
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
        "heard",
        "id",
        "inflight",
        "own_requests",
        "own_tokens",
        "queued_tokens",
        "requests",
        "seq",
    )

    def __init__(self, replica_id: str, free_tokens: int, batch_tokens: int) -> None:
        self.id = replica_id
        self.column = -1  # -1: not eligible
        self.seq = -1
        self.heard = -math.inf
        self.free_tokens = free_tokens
        self.batch_tokens = batch_tokens
        self.queued_tokens = self.requests = 0
        self.own_tokens = self.own_requests = self.inflight = 0


class FleetTable:
    """Loads of the eligible replicas as float64 columns, index i belonging to `ids[i]`; read them, never write.

    free_tokens    free KV cache, tokens, less the prompts of own uncovered calls (may go below 0)
    queued_tokens  prompt tokens not computed yet, plus the prompts of own uncovered calls
    requests       running and waiting, plus own uncovered calls
    inflight       this router's own unfinished calls
    batch_tokens   the engine's token budget per iteration
    per_batch      1 / batch_tokens: numpy multiplies twice as fast as it divides

    A call is covered, and no longer added, once a report of its replica names its ticket in `admitted`: the report's
    figures count it then. Reports are shared, ledgers are not, so any number of routers can keep one each. A ticket
    is known once: dispatching it again (a retry, or the rare collision of two 32-bit tickets) forgets the first call.

    Eligible are replicas that joined and whose last report, if any, says `serving`. One that never reported counts
    as idle, of the size of the first replica that did. Times are the caller's monotonic seconds.
    """

    def __init__(self, *, stale_s: float = 1.0) -> None:
        self.stale_s = stale_s
        self.ids: list[str] = []
        self._replicas: dict[str, _Replica] = {}
        self._eligible: list[_Replica] = []
        self._uncovered: dict[int, tuple[_Replica, int]] = {}
        self._inflight: dict[int, _Replica] = {}
        self._idle: tuple[int, int] | None = None  # free and batch tokens of a replica that never reported
        self._heard = -math.inf  # newest report of an eligible replica
        self._cells = np.zeros((COLUMNS, 8))
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
        tickets = [ticket for ticket, where in self._inflight.items() if where is replica]
        for ticket in tickets:
            del self._inflight[ticket]
            self._uncovered.pop(ticket, None)
        return tickets

    def apply(self, report: Report, now: float) -> bool:
        """Take a report received at `now`; False if it is not newer than the last one or its replica is not here."""
        replica = self._replicas.get(report.replica)
        if replica is None or report.seq <= replica.seq:
            return False
        replica.seq, replica.heard = report.seq, now
        replica.free_tokens = report.free_blocks * report.block_size
        replica.queued_tokens = report.queued_tokens
        replica.requests = report.running + report.waiting
        replica.batch_tokens = report.batch_tokens
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
            self._assume_idle(report.total_blocks * report.block_size, report.batch_tokens)
        return True

    def dispatch(self, ticket: int, replica_id: str, prompt_tokens: int) -> None:
        """Count a call that is about to be sent; KeyError if the replica is not here."""
        replica = self._replicas[replica_id]
        if ticket in self._inflight:
            self.complete(ticket)
        self._inflight[ticket] = replica
        self._uncovered[ticket] = (replica, prompt_tokens)
        replica.inflight += 1
        replica.own_requests += 1
        replica.own_tokens += prompt_tokens
        if replica.column >= 0:
            self._write(replica)

    def complete(self, ticket: int) -> None:
        """Forget a call that ended, however it ended; nothing happens if it is not known (any more)."""
        replica = self._inflight.pop(ticket, None)
        if replica is None:
            return
        replica.inflight -= 1
        self._cover(ticket, replica)
        if replica.column >= 0:
            self._write(replica)

    def all_stale(self, now: float) -> bool:
        """True if no eligible replica reported within the last `stale_s` seconds: only own calls are known then."""
        return now - self._heard > self.stale_s

    def stale(self, now: float) -> list[str]:
        """Eligible replicas whose last report is older than `stale_s` (their last known figures stay in use)."""
        return [replica.id for replica in self._eligible if now - replica.heard > self.stale_s]

    def _cover(self, ticket: int, replica: _Replica) -> None:
        call = self._uncovered.get(ticket)
        if call is not None and call[0] is replica:  # another replica's: a retry went elsewhere, or a collision
            del self._uncovered[ticket]
            replica.own_requests -= 1
            replica.own_tokens -= call[1]

    def _assume_idle(self, free_tokens: int, batch_tokens: int) -> None:
        self._idle = (free_tokens, batch_tokens)
        for replica in self._eligible:
            if replica.seq < 0:
                replica.free_tokens, replica.batch_tokens = free_tokens, batch_tokens
                self._write(replica)

    def _enter(self, replica: _Replica) -> None:
        replica.column = len(self.ids)
        self.ids.append(replica.id)
        self._eligible.append(replica)
        if len(self.ids) > self._cells.shape[1]:
            self._cells = np.hstack([self._cells, np.zeros_like(self._cells)])
        self._view()
        self._write(replica)

    def _exit(self, replica: _Replica) -> None:
        """Close the gap with the last column."""
        last = self._eligible.pop()
        self.ids.pop()
        if last is not replica:
            last.column = replica.column
            self._eligible[last.column] = last
            self.ids[last.column] = last.id
            self._write(last)
        replica.column = -1
        self._heard = max((other.heard for other in self._eligible), default=-math.inf)
        self._view()

    def _view(self) -> None:
        views = self._cells[:, : len(self.ids)]
        self.free_tokens, self.queued_tokens, self.requests, self.inflight, self.batch_tokens, self.per_batch = views

    def _write(self, replica: _Replica) -> None:
        column, own = replica.column, replica.own_tokens
        self.free_tokens[column] = replica.free_tokens - own
        self.queued_tokens[column] = replica.queued_tokens + own
        self.requests[column] = replica.requests + replica.own_requests
        self.inflight[column] = replica.inflight
        self.batch_tokens[column] = replica.batch_tokens
        self.per_batch[column] = 1 / replica.batch_tokens
