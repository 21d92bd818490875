"""A Ray cluster whose actors record what a fleet's processes record, without engines: `python -m ... FOLDER`.

Prints the address of its metrics port as one JSON line, then works until standard input closes; a line `kill` there
kills one of the two replicas.
"""

from __future__ import annotations

import json
import select
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray

from app.incoming import Incoming
from app.metrics import Promise, RequestMetrics
from app.stream import Stream
from deployments import metrics
from deployments.autoscaling import FreenessPolicy
from deployments.gauges import FleetGauges, ReplicaGauges, RouterCounts
from deployments.load_page import Figures
from deployments.reports import report_of
from deployments.routing import Heard
from policies.autoscaling.decision import Decision

REPLICAS = ("one", "two")
TIERS: dict[str, Any] = {"names": ["fast", "slow"], "headroom": [0.2, 0.1], "aging_s": [None, None]}
FIGURES = Figures(
    *(0.0, 60, 100, 16, 4, 1, 30, 2, 512, 8, 3, 9),
    running_by_tier=(1, 3),
    waiting_by_tier=(0, 1),
    blocks_by_tier=(10, 30),
)


class Ingress:
    """Counts a request of each tier and a routing decision per look."""

    async def begin(self) -> None:
        """As the constructor of the deployment."""
        self._figures = RequestMetrics([Promise("fast", 1.0, 0.1), Promise("slow")], "model", ["acme"])
        self._figures.start(lambda tier: tier)
        self._router = RouterCounts()

    async def look(self) -> None:
        """One request per tier, and everything that happens around it."""
        now = time.monotonic()
        for tier in (0, 1):
            stream = Stream("r", [1, 2, 3], None, 0.0, Incoming(tier, tenant="acme", began=now - 0.6))
            stream.delivered, stream.first_at, stream.last_at = [1, 2, 3], now - 0.2, now
            self._figures.first_token(stream, (0.1, 0.3), now - 0.2)
            self._figures.tokens(tier, 3)
            self._figures.ended(stream, "finished")
            self._figures.refused(tier, "queue_full")
        metrics.HTTP_RESPONSES.at("/v1/responses/{id}", "200").inc()
        metrics.paused(0.2)
        metrics.failed_over("actor_died")
        self._router.chose("sal", False, np.array([1.0, 2.0]), 1, 0.01)
        self._router.flush("sal", now)


class Replica:
    """Tells its load, and counts a move."""

    def __init__(self, name: str) -> None:
        self._gauges = ReplicaGauges(name, TIERS)

    def look(self) -> None:
        """One look, one move."""
        self._gauges.look(FIGURES, False, time.monotonic())
        metrics.moved("balance", "done", "moved", stages=1, blocks=8, bytes=1024, park_s=0.1)


class Coordinator:
    """Hears the replicas that live."""

    def __init__(self) -> None:
        self._gauges = FleetGauges()

    def look(self, living: list[str]) -> None:
        """One look."""
        now = time.monotonic()
        reports = [report_of(FIGURES, replica=name, seq=1, state="serving", admitted=[]) for name in living]
        self._gauges.look([Heard(report, now - 0.05) for report in reports], 1, now)


class Controller:
    """Decides anew at each look."""

    def __init__(self) -> None:
        self._policy = FreenessPolicy()
        self._wanted = 2

    def look(self) -> None:
        """One decision."""
        self._wanted = 5 - self._wanted
        context: Any = SimpleNamespace(deployment_name="E", target_num_replicas=2, current_num_replicas=2)
        decision = Decision(self._wanted, "busy", 100.0)
        self._policy._tell(context, decision)
        self._policy._last = decision


def actor(kind: type, *arguments: Any) -> Any:
    """A process of its own."""
    return ray.remote(num_cpus=0)(kind).remote(*arguments)


def main() -> None:
    """Work until standard input closes."""
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        _temp_dir=sys.argv[1],
        log_to_driver=False,
        logging_level="ERROR",
    )
    (node,) = ray.nodes()
    print(json.dumps(f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"), flush=True)
    replicas = {name: actor(Replica, name) for name in REPLICAS}
    ingress, coordinator, controller = actor(Ingress), actor(Coordinator), actor(Controller)
    ray.get(ingress.begin.remote())
    while True:
        looks = [replica.look.remote() for replica in replicas.values()]
        looks += [ingress.look.remote(), coordinator.look.remote(list(replicas)), controller.look.remote()]
        ray.get(looks)
        if select.select([sys.stdin], [], [], 0.5)[0]:
            if not sys.stdin.readline():
                return
            ray.kill(replicas.pop(REPLICAS[0]))


if __name__ == "__main__":
    main()
