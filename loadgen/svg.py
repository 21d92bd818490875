"""Plots as SVG text without a plotting library: lines, dots, violins; nothing is loaded from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np
import numpy.typing as npt

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 30, 44  # margins, for tick labels and titles
#: Okabe and Ito's colours, told apart by all eyes.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a8a00", "#7f3fbf")
MOST_POINTS = 600  # of a line: more are thinned out
MOST_DOTS = 3000
KERNELS = 80  # heights at which a violin's width is found

Points = Sequence[tuple[float, float]]


def colour(i: int) -> str:
    """The i-th colour, from the beginning again after the last."""
    return COLOURS[i % len(COLOURS)]


@dataclass(slots=True)
class Scale:
    """From values to places on a side of the plot; `log` axes show only values above 0."""

    low: float
    high: float
    log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        low, high, v = (
            (math.log10(x) for x in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return (v - low) / (high - low)

    def ticks(self) -> list[float]:
        """Round values along the axis."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1, 2, 5) if last - first <= 3 else (1,)
            return [s * 10.0**p for p in range(first, last + 1) for s in steps if self.low <= s * 10.0**p <= self.high]
        span = self.high - self.low
        step = 10.0 ** math.floor(math.log10(span / 5))
        step *= next(m for m in (1, 2, 5, 10) if span / (step * m) <= 6)
        return [round(i * step, 12) for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def scale_for(values: Sequence[float], *, log: bool = False, zero: bool = False) -> Scale:
    """A scale on which all values fit; `zero` begins it at 0."""
    finite = [v for v in values if math.isfinite(v) and (not log or v > 0)]
    low, high = (min(finite), max(finite)) if finite else (1.0, 10.0)
    if log:
        return Scale(low / 1.2, high * 1.2, log=True)
    low = min(low, 0.0) if zero else low
    return Scale(low, high if high > low else low + 1.0)


@dataclass(slots=True)
class Plot:
    """One plot: give it scales and titles, draw on it, take its `svg()`."""

    title: str
    x_title: str
    y_title: str
    x: Scale
    y: Scale
    marks: list[str] = field(default_factory=list)
    legend: list[tuple[str, str]] = field(default_factory=list)
    x_ticks: list[tuple[float, str]] | None = None

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Pixels of a point."""
        across, up = self.x.place(x), self.y.place(y)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    def line(self, points: Points, name: str, paint: str) -> None:
        """A line through the points that the scales can show."""
        shown = [p for p in points if self._fits(*p)]
        thin = shown[:: max(1, len(shown) // MOST_POINTS)]
        if shown and thin[-1] != shown[-1]:
            thin.append(shown[-1])
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (self.at(*p) for p in thin))
        self.marks.append(f'<polyline fill="none" stroke="{paint}" stroke-width="1.6" points="{path}"/>')
        self._name(name, paint)

    def dots(self, points: Points, name: str, paint: str) -> None:
        """A dot at each point."""
        shown = [p for p in points if self._fits(*p)]
        for p in shown[:: max(1, math.ceil(len(shown) / MOST_DOTS))]:
            x, y = self.at(*p)
            self.marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.8" fill="{paint}" fill-opacity=".6"/>')
        self._name(name, paint)

    def upright(self, x: float, text: str) -> None:
        """A vertical line with a text at its top: something happened then."""
        if self._fits(x, self.y.high):
            across, top = self.at(x, self.y.high)
            self.marks.append(
                f'<line class="event" x1="{across:.1f}" x2="{across:.1f}" y1="{top}" y2="{HEIGHT - BOTTOM}"/>'
                f'<text class="small" x="{across + 3:.1f}" y="{top + 9}">{escape(text[:40])}</text>'
            )

    def violin(self, values: Sequence[float], place: float, half: float, paint: str) -> None:
        """The distribution of the values around `place` on the x axis, with its median; widths by a Gaussian kernel."""
        shown = np.asarray([v for v in values if self._fits(place, v)], float)
        if not len(shown):
            return
        heights, widths = density(np.log10(shown) if self.y.log else shown)
        heights = 10.0**heights if self.y.log else heights
        heights = np.clip(heights, self.y.low, self.y.high)
        right = [self.at(place + half * w, h) for h, w in zip(heights, widths, strict=True)]
        left = [self.at(place - half * w, h) for h, w in zip(heights[::-1], widths[::-1], strict=True)]
        outline = " ".join(f"{x:.1f},{y:.1f}" for x, y in (*right, *left))
        (x1, y), (x2, _) = (self.at(place + side * half * 0.5, float(np.median(shown))) for side in (-1, 1))
        self.marks.append(
            f'<polygon points="{outline}" fill="{paint}" fill-opacity=".35" stroke="{paint}"/>'
            f'<line x1="{x1:.1f}" x2="{x2:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{paint}" stroke-width="2.5"/>'
        )

    def svg(self, legend: bool = True) -> str:
        """The whole plot, with its legend unless the caller writes that itself."""
        bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">',
            f'<text class="title" x="{LEFT}" y="14">{escape(self.title)}</text>',
        ]
        ticks = [(v, f"{v:g}") for v in self.x.ticks()] if self.x_ticks is None else self.x_ticks
        for value, text in ticks:
            x = self.at(value, self.y.low)[0]
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
            parts.append(
                f'<text class="small" text-anchor="middle" x="{x:.1f}" y="{bottom + 14}">{escape(text)}</text>'
            )
        for value in self.y.ticks():
            y = self.at(self.x.low, value)[1]
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="small" text-anchor="end" x="{LEFT - 5}" y="{y + 3:.1f}">{value:g}</text>')
        middle = (TOP + bottom) / 2
        parts.append(
            f'<text class="small" text-anchor="middle" x="{(LEFT + right) / 2}" y="{HEIGHT - 12}">'
            f"{escape(self.x_title)}</text>"
            f'<text class="small" text-anchor="middle" transform="translate(12 {middle}) rotate(-90)">'
            f"{escape(self.y_title)}</text>"
        )
        parts += self.marks
        x = right
        for name, paint in reversed(self.legend if legend else []):
            x -= 12 + 6 * len(name)
            parts.append(f'<rect x="{x}" y="{TOP - 12}" width="8" height="8" fill="{paint}"/>')
            parts.append(f'<text class="small" x="{x + 10}" y="{TOP - 4}">{escape(name)}</text>')
        return "".join([*parts, "</svg>"])

    def _fits(self, x: float, y: float) -> bool:
        return self.x.low <= x <= self.x.high and self.y.low <= y <= self.y.high

    def _name(self, name: str, paint: str) -> None:
        if name and (name, paint) not in self.legend:
            self.legend.append((name, paint))


def cdf(values: Sequence[float]) -> list[tuple[float, float]]:
    """Points of the empirical distribution function, in percent."""
    ordered = np.sort(np.asarray(values, float))
    return [(float(v), 100.0 * (i + 1) / len(ordered)) for i, v in enumerate(ordered)]


def density(values: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """(heights, widths from 0 to 1) of a violin: Gaussian kernels of Silverman's width on the values' range."""
    spread = float(values.std())
    width = 1.06 * spread * len(values) ** -0.2 if spread > 0 else 1e-3 * max(1.0, abs(float(values[0])))
    heights = np.linspace(values.min() - width, values.max() + width, KERNELS)
    sample = values if len(values) <= MOST_DOTS else values[:: math.ceil(len(values) / MOST_DOTS)]
    widths = np.exp(-0.5 * ((heights[:, None] - sample[None, :]) / width) ** 2).sum(axis=1)
    return heights, widths / widths.max()
