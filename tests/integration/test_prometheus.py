"""A real Prometheus scrapes a running fleet: every panel, annotation and alert finds what it asks for."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.dashboards.alerts import alerts
from deployments.metric_series import EXPORTED, OTHER
from deployments.metrics import METRICS, PREFIX

from .moves import Mover, Request, reading
from .prometheus_server import Prometheus, expressions, ports_files
from .servers import MODEL, Server, start_fleet, until, wait_ready
from .shapes import CHAT

pytestmark = [pytest.mark.integration, pytest.mark.slow]

REPORT_MS = 2000
TIERS = [
    {"name": "critical", "ttft_slo_s": 600.0, "tpot_slo_s": 600.0},
    {"name": "standard", "ttft_slo_s": 0.001},
    {"name": "background"},
]
#: Series of the autoscaler exist since its policy runs, though the fleet's size is fixed.
FIXED = {"num_replicas": None, "autoscaling_config": {"min_replicas": 2, "max_replicas": 2, "metrics_interval_s": 1.0}}


@pytest.fixture(scope="module")
def observed() -> Iterator[Server]:
    """Two float32 replicas under the autoscaler's policy, whose Ray collects metrics every two seconds."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_metrics_report_interval_ms", str(REPORT_MS))
        server = start_fleet(
            replicas=2,
            dtype="float32",
            engine_kwargs={"max_model_len": 1024, "kv_cache_memory_bytes": 128 << 20},
            deployment_config=FIXED,
            tiers={"levels": TIERS, "default": "standard"},
        )
    try:
        wait_ready(server, "/health/ready", timeout=400)
        yield server
    finally:
        left = server.stop()
    assert not left, left


@pytest.fixture(scope="module")
def prometheus(observed: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus on that fleet, after some load of each tier and two moves, and with more load running."""
    folder: Path = tmp_path_factory.mktemp("prometheus")
    until(lambda: ports_files(observed), 60, "Ray's list of metrics ports", every=0.5)
    (discovery,) = ports_files(observed)
    asked = Prometheus(discovery, folder)
    mover = Mover(observed)
    try:
        first, second = mover.pair()
        for source, destination in ((first, second), (second, first), (first, second)):
            _move(mover, source, destination)
            time.sleep(2 * REPORT_MS / 1000)  # what appears with a value is no increase: each report shows another
        yield asked
    finally:
        mover.close()
        asked.close()


def _request(name: str, tier: int, tokens: int) -> Request:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Count from one. {name}"}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "priority": tier,
    }
    return Request(name, CHAT, body)


def _move(mover: Mover, source: str, destination: str) -> None:
    requests = [_request(f"{time.time_ns()}-{tier}", tier, 160) for tier in range(len(TIERS))]
    with mover.streams_on(source, requests):
        ended = mover.move(source=source, destination=destination)
    assert [move["outcome"] for move in ended] == ["done"], ended


def test_every_expression_finds_values(observed: Server, prometheus: Prometheus) -> None:
    """Each panel, annotation and alert signal has finite values on a fleet under load; no expression is refused."""
    requests = [_request(f"load-{i}", i % len(TIERS), 400) for i in range(6)]
    empty = expressions()
    with reading(observed, requests):
        deadline = time.monotonic() + 60
        while empty and time.monotonic() < deadline:
            empty = {name: expr for name, expr in empty.items() if not prometheus.finite(expr)}
            time.sleep(1)
    assert not empty, "\n".join(f"{name}: {expr}" for name, expr in empty.items())


def test_alerts_are_loaded_and_healthy(prometheus: Prometheus) -> None:
    """Prometheus evaluates each alert rule of the exported file without error."""
    until(lambda: all(rule["health"] == "ok" for rule in prometheus.rules()), 30, "each rule evaluated", every=0.5)
    assert {rule["name"] for rule in prometheus.rules()} == {alert.name for alert in alerts()}


def test_series_are_those_of_the_registry(prometheus: Prometheus) -> None:
    """Every series with our prefix is a documented one, and every documented one that a load makes is there."""
    ours = {name for name in prometheus.names() if name.startswith(EXPORTED + PREFIX)}
    known = {name for metric in METRICS for name in metric.exported}
    assert ours <= known, ours - known
    missing = {metric.name for metric in METRICS if not ours & set(metric.exported)}
    assert missing == set()


def test_labels_stay_few(observed: Server, prometheus: Prometheus) -> None:
    """Tenants and routes that nobody knows are counted as other, and no label holds what a client made up."""
    answer = httpx.get(f"{observed.url}/v1/made-up", headers={"Authorization": "Bearer made-up"}, timeout=30)
    assert answer.status_code == 404
    until(
        lambda: prometheus.query(f'ray_tidegate_http_responses_total{{route="{OTHER}",status="404"}} > 0'),
        30,
        "the unknown route is counted",
        every=0.5,
    )
    assert not prometheus.query('{__name__=~"ray_tidegate_.+",route=~".*made-up.*"}')
    (model,) = {row["metric"]["model"] for row in prometheus.query("ray_tidegate_sequences_total")}
    assert model == MODEL


def test_promises_are_judged(prometheus: Prometheus) -> None:
    """A tier whose promise cannot be kept misses it by name, one with a generous promise or none keeps it."""
    judged = {
        (row["metric"]["tier"], row["metric"]["result"]): float(row["value"][1])
        for row in prometheus.query("sum by (tier, result) (ray_tidegate_slo_sequences_total) > 0")
    }
    assert set(judged) == {("critical", "met"), ("standard", "ttft"), ("background", "met")}


def test_dead_replicas_gauges_are_dropped(observed: Server, prometheus: Prometheus) -> None:
    """The gauges of a replica that is killed vanish, its requests go on and are counted as failed over."""
    mover = Mover(observed)
    try:
        victim, _ = mover.pair()
        with mover.streams_on(victim, [_request("victim", 0, 200)]):
            os.kill(mover.probe.pid(victim), signal.SIGKILL)
        gone = f'{{__name__=~"{EXPORTED}{PREFIX}.+",replica="{re.escape(victim)}"}}'
        until(lambda: not prometheus.query(gone), 60, f"no gauge of {victim}", every=0.5)
        until(lambda: prometheus.query("sum(ray_tidegate_failovers_total) > 0"), 30, "a fail-over", every=0.5)
    finally:
        mover.close()
