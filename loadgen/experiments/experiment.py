"""What an experiment is: conditions to simulate with several seeds, and what papers say that should come out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from loadgen.experiments.results import Results
    from loadgen.svg import Plot

#: One place of the grid: what is varied, by axis; values are plain, as they stand in the result file.
Condition: TypeAlias = Mapping[str, str | int | float | bool]
Figures: TypeAlias = Mapping[str, float]
SEEDS = (0, 1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class Claim:
    """One figure of a paper, and how ours is had.

    Ours is the figure `figure` of the condition that `of` picks; with `over`, how many times that of `over` is larger,
    seed by seed (both on the same workload). Each picks exactly one condition. `paper`: smallest and largest value that
    our notes of the paper give; None: not in our notes. `why`: what explains a difference, where there is one.
    """

    what: str
    figure: str
    of: Condition
    over: Condition | None = None
    paper: tuple[float, float] | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A grid of conditions, each simulated once per seed.

    `cell(condition, seed, scale)` simulates one; it is a function of a module (other processes call it) and gives the
    same figures for the same arguments; `scale` is the share of its usual requests. What is random comes from `seed`
    only, so that conditions are compared on common random numbers. `figures`: key in the cells -> heading of the
    page's table, with its unit. `settings`: what all cells share; results under other settings are not continued.
    `source`: which figures or tables of which paper; `remarks`: what reproduces, what does not, and why.
    """

    name: str
    title: str
    source: str
    conditions: Sequence[Condition]
    cell: Callable[[Condition, int, float], Figures]
    figures: Mapping[str, str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    claims: Sequence[Claim] = ()
    plots: Callable[[Results], Mapping[str, Plot]] = lambda results: {}
    remarks: Sequence[str] = ()
    seeds: Sequence[int] = SEEDS


def grid(**axes: Sequence[str | int | float | bool]) -> list[Condition]:
    """All combinations of the axes' values, the last axis fastest."""
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
