"""Freeness: how long the requests of a replica can go on before its KV cache is full, seen through virtual usage.

Sources: Llumnix (Sun et al., OSDI 2024), section 4, for virtual usage and freeness; the multi-tier paper ("Beyond
Binary Priorities", arXiv 2608.16336) for K tiers with a full headroom each. Router, coordinator and simulator share it.

    V_sum    = blocks held + blocks wanted by the head of the queue + sum of H_p over the tiers p present here;
               infinite if the replica drains, so that it is never a destination
    H_p      = M * share_p (policies/tiers.py), present: a request of tier p runs or waits here
    F        = (M - V_sum) / max(r, 1), infinite if nothing runs and nothing waits
    F_normal = the same without headroom, for autoscaling: kept free is not used
    phi      = F * max_num_seqs / M, for thresholds that mean the same on any GPU

M = KV blocks of the replica, r = requests running there. F is in blocks per running request: times the block size it
is the iterations until the cache is full, as each running request takes one token per iteration. phi has no unit: 1
means that each running request has left what would be its share of the whole cache in a full batch. Requests behind
the head of the queue count nothing. F may be negative. No objects are compared: a load is -F, smaller is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from policies.tiers import SINGLE, Tiers

Column = NDArray[np.float64]


class Usage(Protocol):
    """What a load report says of KV blocks and requests; units as in deployments.wire.ReplicaReport."""

    @property
    def state(self) -> str: ...
    @property
    def free_blocks(self) -> int: ...
    @property
    def total_blocks(self) -> int: ...
    @property
    def head_blocks(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def max_num_seqs(self) -> int: ...
    @property
    def running_by_tier(self) -> Sequence[int]: ...
    @property
    def waiting_by_tier(self) -> Sequence[int]: ...


def present(usage: Usage) -> set[int]:
    """The tiers of which a request runs or waits on the replica."""
    return {p for by_tier in (usage.running_by_tier, usage.waiting_by_tier) for p, n in enumerate(by_tier) if n}


def headroom(total_blocks: float, tier: int, tiers: Tiers) -> float:
    """H_p: KV blocks (or tokens, in the unit of the argument) kept free for a tier on a replica of this size."""
    return total_blocks * tiers.headroom[tier]


def virtual_usage(usage: Usage, tiers: Tiers = SINGLE) -> float:
    """V_sum: KV blocks held, wanted by the head of the queue and kept free for the tiers present; inf: draining."""
    if usage.state != "serving":
        return math.inf
    held = usage.total_blocks - usage.free_blocks
    kept = sum(headroom(usage.total_blocks, p, tiers) for p in sorted({tiers.clamp(p) for p in present(usage)}))
    return held + usage.head_blocks + kept


def freeness(usage: Usage, tiers: Tiers) -> float:
    """F: KV blocks left per running request; inf on an idle replica, -inf on one that drains."""
    left = usage.total_blocks - virtual_usage(usage, tiers)
    if usage.running == usage.waiting == 0 and left > -math.inf:
        return math.inf
    return left / max(usage.running, 1)


def normal_freeness(usage: Usage) -> float:
    """F_normal: freeness without headroom."""
    return freeness(usage, SINGLE)


def normalised(blocks_per_request: float, usage: Usage) -> float:
    """phi of a freeness F: 1 is an even share of the whole cache for each request of a full batch."""
    return blocks_per_request * usage.max_num_seqs / usage.total_blocks


def freeness_of(free: float, head: float, kept: float, running: float, requests: float) -> float:
    """F from its parts, in the unit of `free`, `head` and `kept`; `requests` are those running and waiting."""
    return (free - head - kept) / (running if running > 1 else 1.0) if requests > 0 else math.inf


def freeness_column(
    free: Column, head: Column, kept: Column | float, running: Column, requests: Column, out: Column
) -> Column:
    """`freeness_of` for many replicas at once, into `out` (which may be `kept`)."""
    np.subtract(np.subtract(free, head), kept, out)
    np.divide(out, np.maximum(running, 1.0), out)
    np.putmask(out, requests <= 0, np.inf)
    return out
