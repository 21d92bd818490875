"""A board as it is written here, and as Grafana's JSON.

Expressions may use `$__rate_interval` and `$tier` (a regular expression of tier names), as Grafana replaces them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard

TAG = "tidegate"
WIDTH = 24  # columns of Grafana's grid
SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
TIERS = "label_values(ray_tidegate_sequences_total, tier)"

Unit = Literal["s", "short", "reqps", "percentunit", "bytes", "Bps", "none"]


@dataclass(frozen=True, slots=True)
class Query:
    """One expression, and what its lines are called: Grafana replaces `{{label}}`."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot of lines, or (`single`) one number. `help` is shown at its title; `stacked`: lines are parts of one."""

    title: str
    unit: Unit
    help: str
    queries: tuple[Query, ...]
    single: bool = False
    stacked: bool = False
    width: int = 8


@dataclass(frozen=True, slots=True)
class Mark:
    """An annotation: a line through every plot where `signal` compares so with `limit`, such as `> 0`."""

    name: str
    color: str
    signal: str
    limit: str

    @property
    def expr(self) -> str:
        """What Grafana asks Prometheus."""
        return f"{self.signal} {self.limit}"


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard: rows of panels. Its `uid` never changes, so that a push finds it again."""

    uid: str
    title: str
    help: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    marks: tuple[Mark, ...] = ()

    @property
    def panels(self) -> list[Panel]:
        """Every panel, in order."""
        return [panel for _, panels in self.rows for panel in panels]


def grafana(board: Board) -> dict[str, Any]:
    """The board in Grafana's dashboard model (schema of Grafana 11), without `id` and `version`."""
    built = (
        builders.Dashboard(board.title)
        .uid(board.uid)
        .description(board.help)
        .tags([TAG])
        .editable()
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .with_variable(builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            builders.QueryVariable("tier")
            .label("tier")
            .datasource(SOURCE)
            .query(TIERS)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(dashboard.VariableOption(selected=True, text=["All"], value=["$__all"]))
            .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        )
        .link(
            builders.DashboardLink("Tidegate").type(dashboard.DashboardLinkType.DASHBOARDS).tags([TAG]).keep_time(True)
        )
    )
    for mark in board.marks:
        built = built.annotation(
            builders.AnnotationQuery()
            .name(mark.name)
            .datasource(SOURCE)
            .enable(True)
            .hide(False)
            .icon_color(mark.color)
            .expr(mark.expr)
        )
    number = 0
    for title, panels in board.rows:
        number += 1
        built = built.with_row(builders.Row(title).id(number))
        for panel in panels:
            number += 1
            built = built.with_panel(_panel(panel, number))
    model: dict[str, Any] = json.loads(json.dumps(built.build(), cls=JSONEncoder))
    return {key: value for key, value in model.items() if key not in ("id", "version")}


def _panel(panel: Panel, number: int) -> stat.Panel | timeseries.Panel:
    made = _number(panel) if panel.single else _lines(panel)
    made = (
        made.id(number)
        .title(panel.title)
        .description(panel.help)
        .unit(panel.unit)
        .datasource(SOURCE)
        .span(panel.width)
        .height(4 if panel.single else 8)
    )
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        asked = prometheus.Dataquery().datasource(SOURCE).expr(query.expr).ref_id(letter).range()
        made = made.with_target(asked.legend_format(query.legend or "__auto"))
    return made


def _number(panel: Panel) -> stat.Panel:
    latest = common_builders.ReduceDataOptions().calcs(["lastNotNull"]).values(False)
    return stat.Panel().reduce_options(latest).graph_mode(common.BigValueGraphMode.AREA)


def _lines(panel: Panel) -> timeseries.Panel:
    legend = (
        common_builders.VizLegendOptions()
        .display_mode(common.LegendDisplayMode.LIST)
        .placement(common.LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    made = timeseries.Panel().legend(legend).fill_opacity(10).axis_soft_min(0)
    if panel.stacked:
        made = made.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL)).fill_opacity(40)
    return made
