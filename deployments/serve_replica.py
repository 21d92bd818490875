"""What Serve 2.60 knows about the replica that runs in this process but has no public way to ask.

Private names (contract-tested): `ray._private.worker.global_worker`, `ReplicaActor._replica_impl._shutting_down`,
`ray.serve.context._get_global_client`.
"""

from __future__ import annotations

from ray._private import worker
from ray.serve.context import _get_global_client


def is_stopping() -> bool:
    """Whether Serve has asked this replica to stop: it finishes its requests, then ends."""
    global_worker = worker.global_worker
    actor = global_worker.actors[global_worker.core_worker.get_actor_id()]
    return bool(actor._replica_impl._shutting_down)


def http_host() -> str | None:
    """The address that Serve's HTTP proxies listen on (`http_options.host`), None if there are none."""
    host: str | None = _get_global_client().http_config.host
    return host
