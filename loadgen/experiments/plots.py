"""Plots of an experiment's results: curves over an axis, points at named places; means with their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from loadgen.experiments.estimate import Estimate
from loadgen.experiments.experiment import Condition
from loadgen.experiments.results import Results
from loadgen.svg import Plot, Scale, colour, scale_for

#: A series: how the legend calls it, and which conditions it takes.
Series = tuple[str, Condition]
_STYLE = (
    "<style>text{font:12px sans-serif;fill:#222}.small{font-size:10px}.title{font-weight:bold}"
    ".grid{stroke:#ddd;stroke-width:.7}.event{stroke:#888;stroke-dasharray:3 3}</style>"
    '<rect width="100%" height="100%" fill="#fff"/>'
)


def curve(
    results: Results,
    axis: str,
    figure: str,
    series: Sequence[Series],
    *,
    title: str,
    x_title: str,
    y_title: str,
    log_x: bool = False,
    log_y: bool = False,
) -> Plot:
    """A line for each series over the numbers of an axis."""
    lines = [(name, _along(results, axis, figure, where)) for name, where in series]
    xs = [x for _, points in lines for x, _ in points]
    plot = Plot(title, x_title, y_title, scale_for(xs, log=log_x), _heights([e for _, p in lines for _, e in p], log_y))
    for i, (name, points) in enumerate(lines):
        plot.line([(x, e.mean) for x, e in points], name, colour(i))
        _draw(plot, points, name, i)
    return plot


def places(
    results: Results,
    figure: str,
    groups: Sequence[Series],
    series: Sequence[Series],
    *,
    title: str,
    y_title: str,
    log_y: bool = False,
) -> Plot:
    """A point for each series in each named group, side by side; a group's and a series' condition are joined."""
    found = [
        (
            name,
            [(_beside(g, i, len(series)), _estimate(results, figure, {**at, **of})) for g, (_, at) in _count(groups)],
        )
        for i, (name, of) in _count(series)
    ]
    plot = Plot(
        title,
        "",
        y_title,
        Scale(-0.6, len(groups) - 0.4),
        _heights([e for _, points in found for _, e in points], log_y),
    )
    plot.x_ticks = [(float(g), name) for g, (name, _) in _count(groups)]
    for i, (name, points) in enumerate(found):
        _draw(plot, points, name, i)
    return plot


def write(plot: Plot, path: Path) -> None:
    """The plot as a file of its own, for pages that show pictures."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(plot))


def text(plot: Plot) -> str:
    """The plot as an SVG document."""
    opening, _, rest = plot.svg().partition(">")
    return f'{opening} xmlns="http://www.w3.org/2000/svg">{_STYLE}{rest}\n'


def _count(series: Sequence[Series]) -> list[tuple[int, Series]]:
    return list(enumerate(series))


def _beside(group: int, place: int, count: int) -> float:
    return group + 0.7 * ((place + 0.5) / count - 0.5)


def _along(results: Results, axis: str, figure: str, where: Condition) -> list[tuple[float, Estimate]]:
    conditions = [c for c in results.experiment.conditions if where.items() <= c.items()]
    return [(float(c[axis]), _estimate(results, figure, c)) for c in sorted(conditions, key=lambda c: float(c[axis]))]


def _estimate(results: Results, figure: str, where: Condition) -> Estimate:
    return results.mean(figure, where)


def _heights(estimates: Sequence[Estimate], log: bool) -> Scale:
    return scale_for([v for e in estimates for v in (e.mean, e.low, e.high)], log=log, zero=not log)


def _draw(plot: Plot, points: Sequence[tuple[float, Estimate]], name: str, i: int) -> None:
    plot.dots([(x, e.mean) for x, e in points if not math.isnan(e.mean)], name, colour(i))
    for x, e in points:
        if not math.isnan(e.low):
            low, high = max(e.low, plot.y.low), min(e.high, plot.y.high)
            plot.line([(x, low), (x, high)], "", colour(i))
