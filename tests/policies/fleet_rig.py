"""Load reports and the rows of a fleet table, for its tests."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from deployments.wire import ReplicaReport, ReplicaState
from policies.fleet import FleetTable

NAMES = ["a", "b", "c", "d"]
TIERS = 3


def report(
    replica: str,
    seq: int,
    *,
    free_blocks: int = 100,
    queued: int = 0,
    running: int = 0,
    waiting: int = 0,
    state: ReplicaState = "serving",
    admitted: Sequence[int] = (),
    batch: int = 2048,
    head_blocks: int = 0,
    running_by_tier: Sequence[int] = (),
    waiting_by_tier: Sequence[int] = (),
) -> ReplicaReport:
    """A load report of a replica with 1,000 blocks of 16 tokens."""
    return ReplicaReport(
        replica=replica,
        seq=seq,
        t=0.0,
        state=state,
        free_blocks=free_blocks,
        total_blocks=1000,
        block_size=16,
        running=running,
        waiting=waiting,
        queued_tokens=queued,
        head_blocks=head_blocks,
        batch_tokens=batch,
        max_num_seqs=64,
        preemptions=0,
        admitted=list(admitted),
        running_by_tier=list(running_by_tier),
        waiting_by_tier=list(waiting_by_tier),
    )


def rows(table: FleetTable) -> dict[str, tuple[float, ...]]:
    """Replica -> its column entries, whatever the order of the columns."""
    columns = (
        *(table.free_tokens, table.queued_tokens, table.requests, table.inflight, table.batch_tokens),
        *(table.own_tokens, table.head_tokens, table.total_tokens, table.running, table.waiting),
        *table.tier_tokens[:TIERS],
    )
    assert all(len(column) == len(table.ids) for column in (*columns, table.per_batch))
    assert not table.tier_tokens[TIERS:].any()
    assert table.id_hash.tolist() == [zlib.crc32(name.encode()) for name in table.ids]
    np.testing.assert_array_equal(table.per_batch, 1 / table.batch_tokens)
    return dict(zip(table.ids, zip(*(column.tolist() for column in columns), strict=True), strict=True))
