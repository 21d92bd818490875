"""A scripted fleet behind the real admin server: a coordinator and a Serve application that do as they are told."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette

from app.admin.fleet import FleetView
from app.admin.server import make_app
from app.admin.status import About, about
from app.config import load_config
from deployments.fleet_events import FleetEvents
from deployments.serve_config import Deployed, NotDeclaredError

TOKEN = "a-token-of-some-length"
ABOUT: About = about(load_config({}))


def row(state: str = "serving", **more: Any) -> dict[str, Any]:
    """What the coordinator says of one replica."""
    made: dict[str, Any] = {
        "state": state,
        "running": 0,
        "waiting": 0,
        "running_by_tier": [],
        "waiting_by_tier": [],
        "blocks_by_tier": [],
        "free_blocks": 512,
        "total_blocks": 512,
        "block_size": 32,
        "head_blocks": 0,
        "queued_tokens": 0,
        "max_num_seqs": 32,
        "preemptions": 0,
        "moving": [],
        "headroom_blocks": 0.0,
        "phi": 32.0,
        "blocked": False,
        "incoming": 0,
        "outgoing": 0,
        "report_age_s": 0.04,
    }
    return made | more


def busy_fleet() -> dict[str, dict[str, Any]]:
    """Three replicas: one full with a queue, one that drains and gives away, one nearly idle."""
    return {
        "k3x9q1ab": row(
            running=14, waiting=5, running_by_tier=[2, 9, 0, 3], waiting_by_tier=[0, 3, 0, 2],
            blocks_by_tier=[70, 240, 0, 110], free_blocks=82, head_blocks=90, blocked=True, phi=-0.31,
            headroom_blocks=143.4, queued_tokens=5120,
        ),
        "m7w2e5cd": row(
            "draining", running=6, running_by_tier=[1, 3, 2], blocks_by_tier=[20, 96, 60], free_blocks=336, phi=None,
            moving=["z1p8r4ef", "z1p8r4ef"], headroom_blocks=155.0,
        ),
        "z1p8r4ef": row(
            running=2, running_by_tier=[0, 1, 1], blocks_by_tier=[0, 30, 16], free_blocks=466, phi=11.2,
            headroom_blocks=52.2,
        ),
    }  # fmt: skip


class Coordinator:
    """The coordinator's methods over a table of rows; `away` makes it fail as a dead actor does."""

    def __init__(self, rows: dict[str, dict[str, Any]] | None = None) -> None:
        self.rows = busy_fleet() if rows is None else rows
        self.events = FleetEvents()
        self.paused = False
        self.away: Exception | None = None
        self.asked = 0
        now = time.time()
        self.events.note("serving", now - 610, "z1p8r4ef serves", "z1p8r4ef")
        self.events.note("order", now - 12, "m7w2e5cd was told to drain", "m7w2e5cd")
        self.events.note("draining", now - 12, "m7w2e5cd drains, 11 requests are to leave", "m7w2e5cd")

    def _answer(self, replica: str | None = None) -> None:
        if self.away is not None:
            raise self.away
        if replica is not None and replica not in self.rows:
            raise ValueError(f"no such replica: {replica!r}. There are: {', '.join(sorted(self.rows))}")

    async def state(self) -> dict[str, Any]:
        """As deployments.coordinator.Coordinator.state."""
        self._answer()
        self.asked += 1
        return {
            "replicas": {name: dict(row) for name, row in self.rows.items()},
            "moving": [],
            "moves": {"balance": {"done": 12, "aborted": 1}, "drain": {}},
            "enabled": True,
            "paused": self.paused,
            "events": self.events.recent(),
            "balancing": {"policy": "tiered_sal", "beta": 6.5, "stale_s": 1.0},
        }

    async def drain(self, replica: str) -> None:
        """Mark it as draining."""
        self._answer(replica)
        self.rows[replica]["state"] = "draining"
        self.events.note("order", time.time(), f"{replica} was told to drain", replica)

    async def undrain(self, replica: str) -> None:
        """Mark it as serving."""
        self._answer(replica)
        self.rows[replica]["state"] = "serving"

    async def pause(self, on: bool) -> None:
        """Remember it."""
        self._answer()
        self.paused = on

    async def note(self, kind: str, text: str) -> None:
        """Add an event."""
        self._answer()
        self.events.note(kind, time.time(), text)


class InServe:
    """The application in Serve; `declared` False: started without a file."""

    name = "tidegate"

    def __init__(self) -> None:
        self.user_config: dict[str, Any] = {"scheduling": {"policy": "larry", "alpha": 1.0}}
        self.declared = True

    def look(self) -> Deployed:
        """All is well."""
        running = {name: {"RUNNING": 1} for name in ("Ingress", "Coordinator", "Admin")}
        return Deployed(
            "RUNNING",
            "",
            {"EngineReplica": {"RUNNING": 3, "STARTING": 1}, **running},
            {"EngineReplica": 4},
            dict(self.user_config) if self.declared else None,
        )

    def change(self, user_config: dict[str, Any]) -> None:
        """Put it over what is there."""
        if not self.declared:
            raise NotDeclaredError("'tidegate' was not deployed from a Serve file")
        self.user_config |= user_config


class Rig:
    """Coordinator, application, and the ASGI app over both."""

    def __init__(
        self, token: str | None = TOKEN, public: bool = False, rows: dict[str, dict[str, Any]] | None = None
    ) -> None:
        self.coordinator = Coordinator(rows)
        self.serve = InServe()
        self._token, self._public = token, public

    def app(self) -> Starlette:
        """The server; make it in the loop that runs it."""
        view = FleetView(ABOUT, self.coordinator, self.serve, "10.0.0.5", self._token is not None)
        return make_app(view, self._token, self._public)


@contextlib.contextmanager
def listening(rig: Rig) -> Iterator[str]:
    """The server on a free port of this machine, in a thread; yields its URL."""
    server = uvicorn.Server(uvicorn.Config(rig.app(), port=0, log_level="warning", lifespan="off", ws="none"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
