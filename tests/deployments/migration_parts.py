"""Parts of the fleet in migration_world.py: a replica, a client, a handle's call, what befalls a message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from app.stream import Stream
from deployments.migration.running import Migration
from deployments.migration.sequences import Sequences
from deployments.wire import Outcome

from .fake_engine import FakeEngine


@dataclass
class Fault:
    """What happens to a message, or to its answer, on the way."""

    lose: bool = False
    lose_answer: bool = False
    double_after: float | None = None  # seconds
    delay: float = 0.0
    delay_answer: float = 0.0
    then: Callable[[], None] | None = None  # as it leaves
    after: Callable[[], None] | None = None  # as its answer leaves


@dataclass
class Node:
    """A replica; `dead`: its process has ended."""

    name: str
    engine: FakeEngine
    sequences: Sequences
    migration: Migration
    state: str = "serving"
    dead: bool = False

    def die(self) -> None:
        """The process ends: nothing more leaves it."""
        self.dead = True
        self.state = "dead"
        self.migration.close()
        for sequence in self.sequences.running:
            sequence.shut(Outcome(0, fault="engine", message="dead"))
            sequence.cancel()
        self.engine.dead = True


class Response:
    """What a Serve handle's call returns."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.shield(self._task).__await__()

    def cancel(self) -> None:
        self._task.cancel()


@dataclass
class Method:
    """`handle.generate` and `handle.attach`."""

    call: Callable[..., Any]

    def remote(self, *args: Any, **keywords: Any) -> Response:
        return Response(asyncio.ensure_future(self.call(*args, **keywords)))


@dataclass(eq=False)
class Client:
    """One client's sequence at the ingress."""

    stream: Stream
    length: int
    task: asyncio.Task[None]
    taken: list[int] = field(default_factory=list)
    problem: Exception | None = None
