"""The Serve deployment of the admin server: one replica on the cluster's head node, restarted by Serve if it dies.

It needs neither engines nor ingress: only the coordinator's handle and Serve's controller, and it outlives both.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
import uvicorn
from ray import serve
from ray.serve.handle import DeploymentHandle

from app.admin.fleet import FleetView
from app.admin.server import make_app
from app.admin.status import About
from app.config.admin import AdminConfig
from deployments import serve_config
from deployments.serve_config import Deployed

logger = logging.getLogger(f"ray.serve.{__name__}")

AGAIN_S = 2.0  # an older replica may have the port for as long as it takes Serve to end it
SAY_AFTER = 5  # attempts


@dataclass(frozen=True, slots=True)
class Calls:
    """app.admin.fleet.Asked over the coordinator's Serve handle."""

    handle: DeploymentHandle

    async def state(self) -> dict[str, Any]:
        """Its view of the fleet."""
        return await self.handle.state.remote()

    async def drain(self, replica: str) -> None:
        """Order a drain."""
        await self.handle.drain.remote(replica)

    async def undrain(self, replica: str) -> None:
        """Take it back."""
        await self.handle.undrain.remote(replica)

    async def pause(self, on: bool) -> None:
        """Pause moves by policy."""
        await self.handle.pause.remote(on)

    async def note(self, kind: str, text: str) -> None:
        """Add to its list of events."""
        await self.handle.note.remote(kind, text)


@dataclass(frozen=True, slots=True)
class InServe:
    """app.admin.fleet.ServeApp: this application in the Serve that runs it."""

    name: str

    def look(self) -> Deployed:
        """What Serve says of it."""
        return serve_config.deployed(self.name)

    def change(self, user_config: dict[str, Any]) -> None:
        """Change the engines' live settings."""
        serve_config.change_user_config(self.name, user_config)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # they are Serve's


class Admin:
    """Listens while it lives; `status` gives the facts of the page to Python handles."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: AdminConfig, about: About, coordinator: DeploymentHandle
    ) -> None:
        token = config.token(os.environ)
        name = serve.get_replica_context().app_name
        node = ray.util.get_node_ip_address()
        self._view = FleetView(about, Calls(coordinator), InServe(name), node, token is not None)
        app = make_app(self._view, token, config.is_public)
        self._server: _Server | None = None
        self._listening = asyncio.create_task(self._listen(config, app))

    async def status(self) -> dict[str, Any]:
        """As `/status.json`."""
        answer: dict[str, Any] = json.loads((await self._view.status()).model_dump_json())
        return answer

    async def check_health(self) -> None:
        """Raise what ended the server, so that Serve starts another."""
        if self._listening.done():
            self._listening.result()
            raise RuntimeError("the admin server has ended")

    async def _listen(self, config: AdminConfig, app: Any) -> None:
        attempts = 0
        while (listener := _bound(config.host, config.port)) is None:
            attempts += 1
            if attempts % SAY_AFTER == 0:
                logger.error(
                    "the status page waits for its port: %s:%d is in use, end what has it or set another admin.port",
                    *(config.host, config.port),
                )
            await asyncio.sleep(AGAIN_S)
        settings = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", loop="none", ws="none", server_header=False,
            timeout_keep_alive=75, timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = _Server(settings)
        logger.info("status page on http://%s:%d/status", config.host, config.port)
        await self._server.serve(sockets=[listener])

    async def __del__(self) -> None:
        if (server := getattr(self, "_server", None)) is not None:
            server.should_exit = True
            await asyncio.wait([self._listening], timeout=2.0)


def _bound(host: str, port: int) -> socket.socket | None:
    """A listening socket, None if the port is in use."""
    bare = host.strip("[]")
    listener = socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((bare, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        logger.debug("cannot listen on %s:%d: %s", host, port, error)
        return None
    listener.setblocking(False)
    return listener
