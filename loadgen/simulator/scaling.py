"""How a simulated fleet grows and shrinks: the product's policy or Serve's default one, and what they are set to."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from policies.autoscaling.decision import Decision
from policies.autoscaling.demand import Fleet as Demand
from policies.autoscaling.freeness import FreenessScaling
from policies.autoscaling.windows import Trough
from policies.registry import Registry, number


class ScalingPolicy(Protocol):
    """Says how many replicas there should be; `ongoing` requests, mean over `look_back_s`."""

    def decide(self, fleet: Demand, ongoing: float) -> Decision: ...


class Freeness:
    """The product's policy, which has no use for the number of ongoing requests; parameters of `FreenessScaling`."""

    __signature__ = inspect.signature(FreenessScaling)

    def __init__(self, **parameters: Any) -> None:
        self._policy, self._trough = FreenessScaling(**parameters), Trough()

    def decide(self, fleet: Demand, ongoing: float = 0.0) -> Decision:
        """Replicas wanted now."""
        return self._trough.apply(self._policy.decide(fleet), fleet.target)


class Ongoing:
    """Ray Serve's default: ongoing requests, waiting ones included, over `target_ongoing_requests`, rounded up.

    Source: `replica_queue_length_autoscaling_policy` of Ray 2.60, with its scaling factors at their default, 1.
    """

    def __init__(self, target_ongoing_requests: float = 2.0) -> None:
        remedy = "2 is Serve's default."
        self._target = number("target_ongoing_requests", target_ongoing_requests, remedy, above=0)

    def decide(self, fleet: Demand, ongoing: float) -> Decision:
        """Replicas wanted now."""
        if not fleet.loads:  # Serve multiplies by the replicas that run: without any it starts one for whoever waits
            waits = ongoing > 0 or fleet.queued > 0
            return Decision(max(1, fleet.target) if waits else fleet.target, "cold_start" if waits else "idle")
        wanted = math.ceil(ongoing / self._target)
        reason = "busy" if wanted > fleet.target else "free" if wanted < fleet.target else "steady"
        return Decision(min(max(wanted, fleet.least), fleet.most), reason)  # type: ignore[arg-type]  # three of them


SCALING: Registry[ScalingPolicy] = Registry("autoscaling policy")
SCALING.register("freeness")(Freeness)
SCALING.register("ongoing")(Ongoing)


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """How the number of replicas follows the load; times in seconds, `Fleet.replicas` is the number at the start.

    policy: `{"name": "freeness" | "ongoing", **parameters}`. Delays, interval and look-back are Serve's, with the
    product's defaults (docs/autoscaling.md); to_zero_s None: as down_s. startup_s: from the decision until a replica
    takes requests, paid for; 60 is an assumption, measure yours. A replica that is stopped drains within `shutdown_s`:
    with `Fleet.migration` its requests move away. cold_start_s: how long a request waits for a first replica.
    """

    policy: Mapping[str, Any] = field(default_factory=lambda: {"name": "freeness"})
    least: int = 1
    most: int = 4
    up_s: float = 5.0
    down_s: float = 120.0
    to_zero_s: float | None = None
    startup_s: float = 60.0
    interval_s: float = 1.0
    look_back_s: float = 5.0
    shutdown_s: float = 600.0
    cold_start_s: float = 240.0

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or self.most < 1:
            raise ValueError(f"least, most: write 0 <= least <= most, 1 at least; got {self.least} and {self.most}")
        for name in ("up_s", "down_s", "to_zero_s", "startup_s", "shutdown_s", "cold_start_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be >= 0 seconds, got {value}")
        for name in ("interval_s", "look_back_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be > 0 seconds, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Scaled:
    """From `at` seconds on the autoscaler wants `target` replicas, for this `reason`; `running` ones take requests."""

    at: float
    target: int
    running: int
    reason: str
