"""examples/tracing: the collector prints what the fleet sends, and the Serve file sends it there."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

from app.config import load_config
from app.config.model import DEFAULT_MODEL_ID
from deployments import tracing
from deployments.run_spans import Run, traced
from deployments.settings import TracingSettings
from deployments.wire import Outcome, Submit
from tests.recorded_spans import CLIENT, TRACE

from .scripted_fleet import FleetMaker, says

EXAMPLE = Path(__file__).parents[2] / "examples" / "tracing"
BODY = {"model": DEFAULT_MODEL_ID, "prompt": "Hi", "max_tokens": 3}


@pytest.fixture
def printed() -> Iterator[IO[str]]:
    """What a collector of its own prints."""
    command = [sys.executable, str(EXAMPLE / "collector.py"), "--port", "0", "--wait", "0.3"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.stdout
    process.terminate()
    process.wait(10)


def test_a_port_that_is_taken() -> None:
    """A collector that runs already is what the user is told of, not a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        port = str(somebody.getsockname()[1])
        command = [sys.executable, str(EXAMPLE / "collector.py"), "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert (
        done.stderr == f"port {port}: Address already in use. Is a collector there already? --port names another one\n"
    )


async def broken(submit: Submit, entries: Any, emit: Any, run: Run | None = None) -> Outcome:
    """An engine that takes nothing."""
    return Outcome(0, fault="engine", message="broken")


def test_the_collector_prints_a_tree(run: Any, make_fleet: FleetMaker, printed: IO[str]) -> None:
    """A request's spans, sent by OTLP, come out as the tree of their parents with times and attributes."""
    tracing.start(TracingSettings("otlp", printed.readline().split()[-1]), "Test", "test")

    async def scenario() -> None:
        fleet = await make_fleet(says([504]))
        headers = {"traceparent": f"00-{TRACE}-{CLIENT}-01"}
        assert (await fleet.post("/v1/completions", BODY, headers=headers)).status == 200
        replica = traced(broken, tracing.current(), "r1", lambda submit: None)
        await replica(fleet.replicas.calls[0].submit, {}, lambda delta: None)

    try:
        run(scenario())
    finally:
        tracing.stop(10)
    lines = [printed.readline() for _ in range(3)]
    assert lines[0] == f"trace {TRACE}\n"
    assert lines[1].startswith("  ingress ")
    assert " http.route=/v1/completions " in lines[1]
    assert lines[2].startswith("    queue FAILED ")
    assert " replica=r1 " in lines[2]


def test_the_serve_file_sends_to_the_collector() -> None:
    """The example's endpoint is the port that the collector listens on by default."""
    (application,) = yaml.safe_load((EXAMPLE / "serve_config.yaml").read_text())["applications"]
    settings = load_config(application["args"], "cpu").tracing.settings()
    assert settings == TracingSettings("otlp", "http://127.0.0.1:4318/v1/traces")
    assert "port: int = 4318" in (EXAMPLE / "collector.py").read_text()
