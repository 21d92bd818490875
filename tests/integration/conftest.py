"""Servers shared by the integration tests: each is started once per session, when the first test asks for it."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from .servers import Server, running, start_elastic, start_fleet, start_pair, start_plain, wait_ready


def _run(server: Server, ready: str) -> Iterator[Server]:
    try:
        if server.process is not None:
            wait_ready(server, ready)
        yield server
    finally:
        left = server.stop()
    assert not left, f"{server.name} left processes behind: {left}\n{server.tail()}"


@pytest.fixture(scope="session")
def plain() -> Iterator[Server]:
    """vLLM's own OpenAI server in float32."""
    yield from _run(running("plain") or start_plain(), "/health")


@pytest.fixture(scope="session")
def fleet() -> Iterator[Server]:
    """Our fleet: one float32 replica."""
    yield from _run(running("fleet") or start_fleet(replicas=1, dtype="float32"), "/health/ready")


@pytest.fixture(scope="module")
def fleet2() -> Iterator[Server]:
    """Our fleet with two float32 replicas, new for each module: for tests that kill parts of it."""
    yield from _run(start_fleet(replicas=2, dtype="float32"), "/health/ready")


@pytest.fixture(scope="module")
def pair() -> Iterator[Server]:
    """Our fleet with two float32 replicas and room for long prompts, new for each module: for moves between them."""
    yield from _run(running("pair") or start_pair(), "/health/ready")


@pytest.fixture(scope="module")
def elastic() -> Iterator[Server]:
    """Our fleet with two small float32 replicas, new for each module: for tests that kill and replace parts of it."""
    yield from _run(running("elastic") or start_elastic(), "/health/ready")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the tail of each server's log to the report of a failed test."""
    report = yield
    if report.failed:
        servers = [v for v in getattr(item, "funcargs", {}).values() if isinstance(v, Server)]
        report.sections += [(f"log of {s.name}", s.tail()) for s in servers]
    return report
