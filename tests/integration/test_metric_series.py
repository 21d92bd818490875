"""Ray's way to a real Prometheus, without engines: actors record what a fleet's processes do, and every query asks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.dashboards.queries import FOREIGN
from deployments.metric_series import EXPORTED
from deployments.metrics import METRICS, PREFIX

from .metric_source import REPLICAS
from .prometheus_server import Prometheus, expressions
from .servers import ROOT, ray_environment, until

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def source() -> Iterator[subprocess.Popen[str]]:
    """The processes; the first line of their output is the metrics port."""
    folder = Path(tempfile.mkdtemp(prefix="tg", dir="/tmp"))
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.metric_source", str(folder)],
        cwd=ROOT,
        env={**os.environ, **ray_environment(folder), "RAY_metrics_report_interval_ms": "2000"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield child
    assert child.stdin is not None
    child.stdin.close()
    child.wait(timeout=60)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def prometheus(source: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus that scrapes them."""
    folder = tmp_path_factory.mktemp("prometheus")
    assert source.stdout is not None
    address = json.loads(source.stdout.readline())
    ports = folder / "ports.json"
    ports.write_text(json.dumps([{"labels": {"job": "ray"}, "targets": [address]}]))
    made = Prometheus(ports, folder)
    yield made
    made.close()


def test_every_expression_of_ours_finds_values(prometheus: Prometheus) -> None:
    """Each panel, annotation and alert signal that asks for nothing of vLLM's has finite values."""
    empty = {name: expr for name, expr in expressions().items() if not any(series in expr for series in FOREIGN)}
    assert len(empty) > 50
    deadline = time.monotonic() + 120
    while empty and time.monotonic() < deadline:
        empty = {name: expr for name, expr in empty.items() if not prometheus.finite(expr)}
        time.sleep(1)
    assert not empty, "\n".join(f"{name}: {expr}" for name, expr in empty.items())


def test_all_metrics_arrive(prometheus: Prometheus) -> None:
    """Every metric of the registry arrives under the names that the page gives, and no other with our prefix."""
    ours = {name for name in prometheus.names() if name.startswith(EXPORTED + PREFIX)}
    assert {metric.name for metric in METRICS if not ours & set(metric.exported)} == set()
    assert ours <= {name for metric in METRICS for name in metric.exported}


def test_a_dead_replicas_gauges_are_dropped(source: subprocess.Popen[str], prometheus: Prometheus) -> None:
    """Gauges of a killed replica vanish, its own and those that others told of it; the other's stay."""
    gone, stays = (f'{{__name__=~"{EXPORTED}{PREFIX}.+",replica="{name}"}}' for name in REPLICAS)
    assert prometheus.query(gone)
    assert source.stdin is not None
    source.stdin.write("kill\n")
    source.stdin.flush()
    until(lambda: not prometheus.query(gone), 60, "the dead replica's gauges are gone", every=0.5)
    assert prometheus.query(stays)
