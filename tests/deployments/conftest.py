"""Runs router scenarios."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from deployments.router import FleetRouter


@pytest.fixture
def run() -> Iterator[Callable[[Callable[[], Awaitable[None]]], None]]:
    """Runs a coroutine function in a loop of its own and closes the subscribers of the routers made in it."""
    made: list[FleetRouter] = []
    build = FleetRouter.initialize_state

    def remember(self: FleetRouter, **keywords: Any) -> None:
        made.append(self)
        build(self, **keywords)

    def run(scenario: Callable[[], Awaitable[None]]) -> None:
        async def body() -> None:
            try:
                await scenario()
            finally:
                for router in made:
                    if router._subscriber is not None:
                        router._subscriber.close()

        asyncio.run(body())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FleetRouter, "initialize_state", remember)
        yield run
