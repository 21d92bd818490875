"""Where a process finds its routers.

Serve ships a router class by value, module globals included, so state shared with the rest of the process lives here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deployments.router import FleetRouter

_routers: dict[str, FleetRouter] = {}


class NoReplicaError(RuntimeError):
    """No replica can take the request: none runs, all are draining or dead, or the wanted one is gone."""


def register_router(deployment: str, router: FleetRouter) -> None:
    """Make a router findable by the name of the deployment that it routes to."""
    _routers[deployment] = router


def find_router(deployment: str) -> FleetRouter | None:
    """This process's router to a deployment, once a handle has made one."""
    return _routers.get(deployment)
