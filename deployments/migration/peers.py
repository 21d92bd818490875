"""Calls from replica to replica, through this replica's own handle to its deployment.

Private name of Serve (contract-tested): `DeploymentHandle._init`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence as Many

import numpy as np
import ray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from deployments.migration.engine_kv import LONG_COPY
from deployments.migration.messages import Answer, Message, decode_answer, encode
from deployments.migration.source import DestinationDead, Unreachable
from deployments.router import FleetRouter
from deployments.routing import NoReplicaError, find_router
from policies.migration.standing import Standing, standing

logger = logging.getLogger(f"ray.serve.{__name__}")

_KNOWN_S = 3.0  # until a router that has just been made knows the fleet
_LOOK_S = 0.02


class Peers:
    """The other replicas of the deployment `name` of application `app`; the handle is made when it is first needed."""

    def __init__(self, name: str, app: str) -> None:
        self._name = name
        self._app = app
        self._handle: DeploymentHandle | None = None

    def router(self) -> FleetRouter | None:
        """This replica's view of the fleet; it is empty for a moment after the first call."""
        self._connect()
        return find_router(self._name)

    def _connect(self) -> DeploymentHandle:
        if self._handle is None:
            self._handle = serve.get_deployment_handle(self._name, self._app)
            self._handle._init()
        return self._handle

    async def ready(self, replica: str) -> None:
        """Wait, but not for ever, until the router knows a replica."""
        end = asyncio.get_running_loop().time() + _KNOWN_S
        while (router := self.router()) is None or replica not in router.reports:
            if asyncio.get_running_loop().time() > end:
                return
            await asyncio.sleep(_LOOK_S)

    def serving(self) -> list[Standing]:
        """The replicas that take requests, by their last reports."""
        try:
            router = self.router()
        except (RayError, RayServeException) as error:  # the application is being deleted, or Serve itself
            logger.warning("the fleet is not known: %s", error)
            return []
        if router is None:
            return []
        reports = (heard.report for heard in router.fresh(time.monotonic()))
        return [standing(report.replica, report, router.tiers) for report in reports if report.state == "serving"]

    async def call(self, replica: str, message: Message, parts: Many[np.ndarray]) -> Answer | None:
        """Send a message with its KV through the object store; returns the answer."""
        handle = self._connect()
        refs = [await _put(part) for part in parts]  # they live until the answer is here
        try:
            return decode_answer(await handle.migration.remote(encode(message), *refs, target_replica=replica))
        except NoReplicaError as error:
            raise Unreachable(str(error)) from None
        except RayActorError as error:
            raise DestinationDead(str(error)) from None


async def _put(part: np.ndarray) -> ray.ObjectRef:
    return await asyncio.to_thread(ray.put, part) if part.nbytes > LONG_COPY else ray.put(part)
