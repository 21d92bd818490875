"""A real Prometheus that scrapes a test fleet, configured by the files that users get."""

from __future__ import annotations

import math
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import yaml

from app.dashboards.alerts import alerts
from app.dashboards.boards import BOARDS
from app.dashboards.files import export, prometheus

from .servers import Server, free_port, until

REMEDY = "install Debian's package `prometheus`: `make debian`, as root"


def program(name: str) -> str:
    """Path of `prometheus` or `promtool`; says how to get it where it is missing."""
    path = shutil.which(name)
    assert path is not None, f"{name} is missing; {REMEDY}"
    return path


def ports_files(server: Server) -> list[Path]:
    """Where Ray lists the metrics ports of this fleet's nodes."""
    assert server.ray_dir is not None
    return [p for p in server.ray_dir.rglob("prom_metrics_service_discovery.json") if not p.is_symlink()]


def expressions() -> dict[str, str]:
    """Every expression of the boards and every signal of marks and alerts, by what it is, as Grafana would ask."""
    asked = {
        f"{board.uid}: {panel.title}, {query.legend}": query.expr
        for board in BOARDS
        for panel in board.panels
        for query in panel.queries
    }
    asked |= {f"mark: {mark.name}": mark.signal for board in BOARDS for mark in board.marks}
    asked |= {f"{alert.name} {i}": signal for alert in alerts() for i, signal in enumerate(alert.signals)}
    return {name: expr.replace("$__rate_interval", "1m").replace("$tier", ".*") for name, expr in asked.items()}


class Prometheus:
    """Scrapes once a second what the file `discovery` lists; files and data are in `folder`."""

    def __init__(self, discovery: Path, folder: Path) -> None:
        export(folder)
        config = folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(prometheus(str(discovery), "1s")))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = (folder / "prometheus.log").open("wb")
        self._began = time.time()
        self._process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        until(self._answers, 60, f"Prometheus answers, see {folder}/prometheus.log", every=0.2)

    def _answers(self) -> bool:
        assert self._process.poll() is None, f"Prometheus ended with {self._process.returncode}"
        try:
            return httpx.get(f"{self.url}/-/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def _ask(self, path: str, **parameters: Any) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=60).json()
        assert answer["status"] == "success", (parameters, answer)
        return answer["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        """What an expression is now: a list of series; AssertionError if Prometheus refuses it."""
        return self._ask("query", query=expr)["result"]

    def finite(self, expr: str) -> int:
        """How many finite values an expression has had, every 2 s since the start; refuses as `query`."""
        now = time.time()
        found = self._ask("query_range", query=expr, start=self._began, end=now, step=2)["result"]
        return sum(math.isfinite(float(value)) for series in found for _, value in series["values"])

    def names(self) -> set[str]:
        """Every series name that it has seen."""
        return set(self._ask("label/__name__/values"))

    def rules(self) -> list[dict[str, Any]]:
        """The alert rules that it evaluates, with their health."""
        return [rule for group in self._ask("rules")["groups"] for rule in group["rules"]]

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait(timeout=30)
        self._log.close()
