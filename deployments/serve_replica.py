"""What Serve 2.60 knows about the replica that runs in this process but has no public way to ask.

Private names (contract-tested): `ray._private.worker.global_worker`, `ReplicaActor._replica_impl._shutting_down`,
`ray.serve.context._get_global_client`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler

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


@contextmanager
def log_kept() -> Iterator[None]:
    """Keep Serve's log file through what configures logging anew: vLLM does, when imported and with each engine.

    Python then closes every handler of the process, and Serve's, which writes through a buffer, would drop all that
    follows.
    """
    buffers = [handler for handler in logging.getLogger("ray.serve").handlers if isinstance(handler, MemoryHandler)]
    targets = [handler.target for handler in buffers]
    yield
    for handler, target in zip(buffers, targets, strict=True):
        handler.setTarget(target)
