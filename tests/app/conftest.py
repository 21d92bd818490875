"""vLLM's serving classes over a fleet of scripts: real tokenizer, real detokenizer, no engine, no cluster."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from app import fleet_client
from app.config import load_config
from app.model import default_model_path
from app.vllm_compat import ingress_config, renderer_from_config, serve_arguments

from .admin_rig import Rig, listening
from .scripted_fleet import FleetMaker

T = TypeVar("T")


@pytest.fixture(scope="session")
def loop_runner() -> Iterator[asyncio.Runner]:
    """One loop for all tests: vLLM's renderer starts tasks that belong to the loop of their first use."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def run(loop_runner: asyncio.Runner) -> Callable[[Coroutine[Any, Any, T]], T]:
    """Runs a coroutine to its end, which must come within two minutes."""

    def run(scenario: Coroutine[Any, Any, T]) -> T:
        return loop_runner.run(asyncio.wait_for(scenario, 120))

    return run


@pytest.fixture(scope="session")
def server_arguments() -> Namespace:
    """The default fleet's arguments of vLLM's server."""
    config = load_config({"engine_kwargs": {"max_model_len": 2048}, "ingress": {"enable_prompt_tokens_details": True}})
    return serve_arguments(config.engine_args(str(default_model_path())), config.ingress.front_end())


@pytest.fixture(scope="session")
def vllm_config(server_arguments: Namespace) -> Any:
    """The ingress's part of vLLM's config."""
    return ingress_config(server_arguments)


@pytest.fixture
def make_fleet(
    vllm_config: Any, server_arguments: Namespace, loop_runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FleetMaker]:
    """Makes scripted fleets; at the end of the test each must be empty."""
    monkeypatch.setattr(fleet_client, "renderer_from_config", lambda config: _renderer(config))  # a second to make
    maker = FleetMaker(vllm_config, server_arguments)
    yield maker
    loop_runner.run(maker.close())


_renderers: list[Any] = []


def _renderer(config: Any) -> Any:
    if not _renderers:
        _renderers.append(renderer_from_config(config))
    return _renderers[0]


@pytest.fixture
def rig() -> Rig:
    """An admin server's scripted fleet."""
    return Rig()


@pytest.fixture
def url(rig: Rig) -> Iterator[str]:
    """Where that admin server listens."""
    with listening(rig) as where:
        yield where


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses that were counted, in seconds."""
    seen: list[float] = []
    monkeypatch.setattr("app.fleet_client.metrics.paused", seen.append)
    return seen


@pytest.fixture
def failovers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Reasons of the fail-overs that were counted."""
    seen: list[str] = []
    monkeypatch.setattr("app.streams.metrics.failed_over", seen.append)
    return seen
