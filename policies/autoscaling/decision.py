"""How many replicas are wanted, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Reason = Literal["cold_start", "starting", "stale", "idle", "busy", "saturated", "queue_wait", "ttft", "free", "steady"]


@dataclass(frozen=True, slots=True)
class Decision:
    """Replicas wanted, why, and of the fleet with its present target F (tokens per request; inf: idle) and U."""

    replicas: int
    reason: Reason
    freeness: float = math.inf
    utilization: float = 0.0
