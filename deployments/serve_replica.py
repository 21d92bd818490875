"""What Serve 2.60 knows about the replica that runs in this process but has no public way to ask.

Private names (contract-tested): `ray._private.worker.global_worker`, `ReplicaActor._replica_impl._shutting_down`.
"""

from __future__ import annotations

from ray._private import worker


def is_stopping() -> bool:
    """Whether Serve has asked this replica to stop: it finishes its requests, then ends."""
    global_worker = worker.global_worker
    actor = global_worker.actors[global_worker.core_worker.get_actor_id()]
    return bool(actor._replica_impl._shutting_down)
