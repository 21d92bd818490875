"""Dashboards, alert rules and the metrics page agree with the registry; files are what Prometheus and Grafana read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.dashboards.alerts import Alert, alerts, rules
from app.dashboards.boards import BOARDS
from app.dashboards.cli import main
from app.dashboards.files import ALERTS, export
from app.dashboards.model import WIDTH, Board, grafana
from app.dashboards.queries import FOREIGN
from app.metrics_page import page
from deployments.metrics import METRICS

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"\bray_[a-z0-9_]+")
EXISTING = {name for metric in METRICS for name in metric.exported} | FOREIGN


def expressions(board: Board) -> list[str]:
    """Everything that a board asks Prometheus."""
    return [query.expr for panel in board.panels for query in panel.queries] + [mark.expr for mark in board.marks]


def test_the_page_is_current() -> None:
    """docs/metrics.md is what the registry, the dashboards and the alerts say (python -m app.metrics_page)."""
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == page()


def test_every_metric_is_on_the_page() -> None:
    """Each series, label, dashboard and alert has its row."""
    text = page()
    assert not [metric.name for metric in METRICS if f"| `ray_{metric.name}` |" not in text]
    assert not [label for metric in METRICS for label in metric.labels if f"`{label}`: " not in text]
    assert not [board.title for board in BOARDS if f"| {board.title} |" not in text]
    assert not [alert.name for alert in alerts() if f"| `{alert.name}` |" not in text]


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_queries_name_existing_metrics(board: Board) -> None:
    """Each panel and annotation names metrics, and only such that exist; labels are those of the metric."""
    for expr in expressions(board):
        names = set(NAME.findall(expr))
        assert names, expr
        assert names <= EXISTING, expr
    labels = {name: set(metric.labels) for metric in METRICS for name in metric.exported}
    for expr in expressions(board):
        for name, matchers in re.findall(r"(ray_tidegate_\w+)\{([^}]*)\}", expr):
            assert set(re.findall(r"(\w+)(?:=~|!=|=)", matchers)) <= labels[name], expr


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name)
def test_alerts_name_existing_metrics(alert: Alert) -> None:
    """Each alert and its signals name metrics that exist; the alert asks for nothing that no signal shows."""
    names = set(NAME.findall(alert.expr))
    assert names
    assert names <= EXISTING
    assert names == set(NAME.findall(" ".join(alert.signals)))


def test_every_metric_is_shown() -> None:
    """No metric of ours is recorded for nobody: each is in a panel, an annotation or an alert."""
    asked = [expr for board in BOARDS for expr in expressions(board)] + [alert.expr for alert in alerts()]
    shown = {name for expr in asked for name in NAME.findall(expr)}
    assert not [metric.name for metric in METRICS if not shown & set(metric.exported)]


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)
def test_a_board_is_whole(board: Board) -> None:
    """Stable uid, unique ids, panels on the grid that do not overlap, a data source each, no version of its own."""
    model = grafana(board)
    assert model["uid"] == board.uid
    assert not {"id", "version"} & model.keys()
    ids = [panel["id"] for panel in model["panels"]]
    assert len(set(ids)) == len(ids)
    cells: Counter[tuple[int, int]] = Counter()
    for panel in model["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= WIDTH
        cells.update((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"]))
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert panel["title"]
            assert panel["description"]
            assert panel["targets"]
    assert set(cells.values()) == {1}
    assert {variable["name"] for variable in model["templating"]["list"]} == {"datasource", "tier"}
    assert grafana(board) == model


def test_uids_are_unique() -> None:
    """No two boards would overwrite each other."""
    assert len({board.uid for board in BOARDS}) == len(BOARDS) == 5


def test_export_writes_what_is_read(tmp_path: Path) -> None:
    """JSON of every board, provisioning that points to them, rules and a Prometheus configuration that loads them."""
    assert main(["export", str(tmp_path), "--discovery", "/somewhere/ports.json"]) == 0
    boards = {board.uid: grafana(board) for board in BOARDS}
    assert {p.stem: json.loads(p.read_text()) for p in (tmp_path / "dashboards").glob("*.json")} == boards
    provisioning = yaml.safe_load((tmp_path / "provisioning" / "dashboards" / "tidegate.yml").read_text())
    assert provisioning["providers"][0]["options"]["path"] == str(tmp_path / "dashboards")
    config = yaml.safe_load((tmp_path / "prometheus.yml").read_text())
    assert config["rule_files"] == [ALERTS]
    assert config["scrape_configs"][0]["file_sd_configs"] == [{"files": ["/somewhere/ports.json"]}]
    assert yaml.safe_load((tmp_path / ALERTS).read_text()) == rules()


def test_export_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that cannot be written is named, without a traceback."""
    (tmp_path / "file").write_text("")
    assert main(["export", str(tmp_path / "file")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err.replace("\n", "")


# promtool


def promtool(*arguments: str) -> None:
    """Run it; its output is in the failure."""
    path = shutil.which("promtool")
    assert path, "promtool is missing: install Debian's package `prometheus` (`make debian`, as root)"
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_files(tmp_path: Path) -> None:
    """Prometheus' own checker takes configuration and rules."""
    export(tmp_path, str(tmp_path / "ports.json"))
    (tmp_path / "ports.json").write_text('[{"labels": {"job": "ray"}, "targets": ["127.0.0.1:1"]}]')
    promtool("check", "config", str(tmp_path / "prometheus.yml"))
    promtool("check", "rules", "--lint=all", str(tmp_path / ALERTS))


def test_promtool_understands_every_query(tmp_path: Path) -> None:
    """Each expression of each board is PromQL once Grafana has replaced its variables."""
    asked = {expr.replace("$__rate_interval", "1m") for board in BOARDS for expr in expressions(board)}
    recorded = [{"record": f"test:expression:{i}", "expr": expr} for i, expr in enumerate(sorted(asked))]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "one", "rules": recorded}]}))
    promtool("check", "rules", str(tmp_path / "rules.yml"))


def _series(name: str, values: str, **labels: str) -> dict[str, str]:
    inside = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return {"series": f"{name}{{{inside}}}", "values": values}


#: alert -> series under which it must fire, its labels then, and series under which it must be silent (30 s steps).
SILENT_AND_LOUD: dict[str, tuple[list[dict[str, str]], dict[str, str], list[dict[str, str]]]] = {
    "TidegateSLOBurnFast": (
        [
            _series("ray_tidegate_slo_sequences_total", "0+80x200", tier="critical", result="met"),
            _series("ray_tidegate_slo_sequences_total", "0+20x200", tier="critical", result="ttft"),
        ],
        {"tier": "critical"},
        [
            _series("ray_tidegate_slo_sequences_total", "0+95x200", tier="critical", result="met"),
            _series("ray_tidegate_slo_sequences_total", "0+5x200", tier="critical", result="ttft"),
        ],
    ),
    "TidegateSLOBurnSlow": (
        [
            _series("ray_tidegate_slo_sequences_total", "0+90x200", tier="critical", result="met"),
            _series("ray_tidegate_slo_sequences_total", "0+10x200", tier="critical", result="failed"),
        ],
        {"tier": "critical"},
        [
            _series("ray_tidegate_slo_sequences_total", "0+98x200", tier="critical", result="met"),
            _series("ray_tidegate_slo_sequences_total", "0+2x200", tier="critical", result="failed"),
        ],
    ),
    "TidegateDrainStuck": (
        [_series("ray_tidegate_draining_seconds", "0+30x200", replica="a")],
        {"replica": "a"},
        [_series("ray_tidegate_draining_seconds", "0+30x20 0x180", replica="a")],
    ),
    "TidegateReportsStale": (
        [_series("ray_tidegate_report_age_seconds", "6x200", replica="a")],
        {"replica": "a"},
        [_series("ray_tidegate_report_age_seconds", "0.1x200", replica="a")],
    ),
    "TidegateCoordinatorDown": (
        [
            _series("ray_tidegate_kv_capacity_tokens", "9x200", replica="a"),
            _series("ray_tidegate_coordinator_up", "1x20 stale"),
        ],
        {},
        [
            _series("ray_tidegate_kv_capacity_tokens", "9x200", replica="a"),
            _series("ray_tidegate_coordinator_up", "1x200"),
        ],
    ),
    "TidegateRoutingBlind": (
        [
            _series("ray_tidegate_router_decisions_total", "0+8x200", policy="sal", reports="fresh"),
            _series("ray_tidegate_router_decisions_total", "0+2x200", policy="p2c", reports="stale"),
        ],
        {},
        [
            _series("ray_tidegate_router_decisions_total", "0+8x200", policy="sal", reports="fresh"),
            _series("ray_tidegate_router_decisions_total", "0x200", policy="p2c", reports="stale"),
        ],
    ),
    "TidegateReplicasCrash": (
        [_series("ray_tidegate_failovers_total", "0+1x200", reason="actor_died")],
        {},
        [_series("ray_tidegate_failovers_total", "0+1x200", reason="draining")],
    ),
}


def _case(alert: Alert, series: list[dict[str, str]], labels: dict[str, str] | None) -> dict[str, Any]:
    rule = alert.rule()
    fired: list[dict[str, Any]] = []
    if labels is not None:
        fired = [{"exp_labels": {**rule["labels"], **labels}}]
    return {
        "interval": "30s",
        "input_series": series,
        "alert_rule_test": [{"eval_time": "99m", "alertname": alert.name, "exp_alerts": fired}],
    }


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name)
def test_an_alert_fires_and_keeps_silent(alert: Alert, tmp_path: Path) -> None:
    """Under the trouble it is made for it fires, naming the tier or replica at fault; a little short of it, not."""
    loud, labels, silent = SILENT_AND_LOUD[alert.name]
    bare = {**alert.rule(), "annotations": {}}  # texts with the value of the moment are not compared
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "one", "rules": [bare]}]}))
    cases = {"rule_files": ["rules.yml"], "tests": [_case(alert, loud, labels), _case(alert, silent, None)]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(cases))
    promtool("test", "rules", str(tmp_path / "test.yml"))
