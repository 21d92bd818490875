"""A FleetRouter without a cluster: real Ray base class, replicas and requests that only have a name."""

from __future__ import annotations

import time
from typing import Any, cast

import msgspec
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest, RunningReplica

from deployments.router import FleetRouter
from deployments.wire import ReplicaReport

ENGINES = DeploymentID(name="EngineReplica", app_name="tidegate")
LEAST = {"policy": "least_requests"}


class FakeReplica:
    """What the router sees of a RunningReplica; its queue is never probed with success."""

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(unique_id=name, deployment_id=ENGINES)
        self.replica_metadata: dict[str, Any] = {}
        self.max_ongoing_requests = 10_000

    async def get_queue_len(self, *, deadline_s: float) -> int:
        raise AssertionError("the router must not wait for queue lengths")


class Fleet:
    """A router and its replicas; `pick` sends one call through it and returns the replica's name."""

    def __init__(
        self,
        *names: str,
        balancing: dict[str, Any] | None = None,
        wait_s: float = 0.15,
        tiers: dict[str, Any] | None = None,
    ) -> None:
        self.router = FleetRouter(deployment_id=ENGINES, handle_source=DeploymentHandleSource.REPLICA)
        self.router.initialize_state(balancing=balancing or LEAST, wait_for_replica_s=wait_s, tiers=tiers)
        self.seq = 0
        self.set(*names)

    def set(self, *names: str) -> None:
        """Let Serve list these replicas."""
        self.router.update_replicas([cast(RunningReplica, FakeReplica(name)) for name in names])

    def report(self, name: str, **figures: Any) -> None:
        """Let a report of an idle replica arrive, but for the figures given."""
        self.seq += 1
        idle = ReplicaReport(
            replica=name,
            seq=self.seq,
            t=time.time(),
            state="serving",
            free_blocks=100,
            total_blocks=100,
            block_size=16,
            running=0,
            waiting=0,
            queued_tokens=0,
            head_blocks=0,
            batch_tokens=512,
            max_num_seqs=64,
            preemptions=0,
            admitted=[],
        )
        self.router._on_report(msgspec.structs.replace(idle, **figures))

    async def pick(self, *, internal_id: str = "r", is_retry: bool = False, **keywords: Any) -> str:
        """Send a call; the name of the replica that gets it."""
        request = PendingRequest(
            args=[], kwargs=keywords, metadata=RequestMetadata(request_id="x", internal_request_id=internal_id)
        )
        replica = await self.router._choose_replica_for_request(request, is_retry=is_retry)
        return cast(str, replica.replica_id.unique_id)

    def complete(self, name: str, internal_id: str = "r") -> None:
        """Let Serve tell the end of a call."""
        self.router.on_request_completed(ReplicaID(unique_id=name, deployment_id=ENGINES), internal_id)

    def inflight(self) -> dict[str, int]:
        """Calls of this router that have not ended, by replica."""
        return dict(zip(self.router.table.ids, self.router.table.inflight.astype(int).tolist(), strict=True))

    def close(self) -> None:
        """Stop listening to reports."""
        if self.router._subscriber is not None:
            self.router._subscriber.close()
