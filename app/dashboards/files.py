"""Writes dashboards, rules and the configuration of Prometheus and Grafana as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from app.dashboards.alerts import rules
from app.dashboards.boards import BOARDS
from app.dashboards.model import grafana

#: Where Ray lists the metrics ports of its nodes, with its default temporary folder.
DISCOVERY = "/tmp/ray/session_latest/prom_metrics_service_discovery.json"
ALERTS = "tidegate-alerts.yml"


def export(folder: Path, discovery: str = DISCOVERY) -> list[Path]:
    """Write everything into `folder` (made if it is missing) and return the files; raises OSError."""
    texts = {f"dashboards/{board.uid}.json": json.dumps(grafana(board), indent=1) + "\n" for board in BOARDS}
    texts["provisioning/dashboards/tidegate.yml"] = _yaml(provider(folder.resolve() / "dashboards"))
    texts[ALERTS] = _yaml(rules())
    texts["prometheus.yml"] = _yaml(prometheus(discovery))
    written = []
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def provider(dashboards: Path) -> dict[str, Any]:
    """Grafana's provisioning of the boards in a folder."""
    source = {"name": "Tidegate", "folder": "Tidegate", "type": "file", "options": {"path": str(dashboards)}}
    return {"apiVersion": 1, "providers": [source]}


def prometheus(discovery: str = DISCOVERY, interval: str = "10s") -> dict[str, Any]:
    """A configuration of Prometheus that finds every node of the Ray cluster and loads the rules beside it."""
    return {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [ALERTS],
        "scrape_configs": [{"job_name": "ray", "file_sd_configs": [{"files": [discovery]}]}],
    }


def _yaml(content: Any) -> str:
    return yaml.safe_dump(content, sort_keys=False, width=120)
