"""The cells of an experiment that have been simulated, in one small JSON file that grows cell by cell."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from loadgen import report
from loadgen.experiments.estimate import METHOD, Estimate, mean, ratio
from loadgen.experiments.experiment import Condition, Experiment

FOLDER = report.RESULTS / "experiments"


class Cell(msgspec.Struct, frozen=True):
    """One simulated condition and seed; `cpu_s`: seconds of CPU that it took."""

    condition: dict[str, str | int | float | bool]
    seed: int
    cpu_s: float
    figures: dict[str, float | None]  # None: there were no values


class ResultsError(ValueError):
    """A result file that cannot be continued; the message says what to do."""


class Results:
    """Cells of one experiment at one scale, read from and written to `path`."""

    def __init__(self, experiment: Experiment, path: Path, scale: float = 1.0) -> None:
        self.experiment, self.path, self.scale = experiment, path, scale
        self.cells: list[Cell] = []
        self._versions: dict[str, Any] | None = None

    @classmethod
    def load(cls, experiment: Experiment, path: Path, scale: float = 1.0, *, fresh: bool = False) -> Results:
        """The results so far; without a file, or `fresh`, none. ResultsError: made at another scale or under others."""
        results = cls(experiment, path, scale)
        if fresh or not path.exists():
            return results
        try:
            found = json.loads(path.read_text())
            cells = msgspec.convert(found.pop("cells"), list[Cell])
            under = found["scale"], found["settings"]
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise ResultsError(f"{path}: no result of an experiment ({problem}); delete it or give --fresh") from None
        if under != (scale, _plain(experiment.settings)):
            raise ResultsError(f"{path}: made at another scale or under other settings; give --fresh or another --out")
        results.cells = [cell for cell in cells if _key(cell.condition) in _keys(experiment)]
        return results

    @property
    def seeds(self) -> list[int]:
        """Seeds of which there are cells."""
        return sorted({cell.seed for cell in self.cells})

    def missing(self, seeds: Sequence[int]) -> list[tuple[Condition, int]]:
        """What is left to do, seed by seed."""
        done = {(_key(cell.condition), cell.seed) for cell in self.cells}
        return [
            (condition, seed)
            for seed in seeds
            for condition in self.experiment.conditions
            if (_key(condition), seed) not in done
        ]

    def add(self, cell: Cell) -> None:
        """Take in a cell and write the file, in the order of the grid."""
        self.cells.append(cell)
        order = {key: i for i, key in enumerate(_keys(self.experiment))}
        self.cells.sort(key=lambda each: (order[_key(each.condition)], each.seed))
        self.save()

    def save(self) -> None:
        """Write the file beside and move it in place: it is whole at any time."""
        self._versions = self._versions or report.versions()
        head = {
            "experiment": self.experiment.name,
            "interval": METHOD,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": report.machine(),
            "versions": self._versions,
            "scale": self.scale,
            "settings": _plain(self.experiment.settings),
        }
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        cells = ",\n".join(json.dumps(report.rounded(msgspec.to_builtins(cell))) for cell in self.cells)
        text = "{\n" + ",\n".join([*lines, f'"cells": [\n{cells}\n]']) + "\n}\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(self.path.name + ".part")
        partial.write_text(text)
        partial.replace(self.path)

    def pick(self, where: Condition) -> Condition:
        """The one condition of the grid that has these values; ValueError if it is none or several."""
        found = [c for c in self.experiment.conditions if where.items() <= c.items()]
        if len(found) != 1:
            raise ValueError(f"{self.experiment.name}: {dict(where)} picks {len(found)} conditions, not one")
        return found[0]

    def values(self, figure: str, where: Condition) -> dict[int, float]:
        """The figure in the one condition with these values, by seed; nan where there was none."""
        key = _key(self.pick(where))
        found = {cell.seed: cell.figures.get(figure) for cell in self.cells if _key(cell.condition) == key}
        return {seed: math.nan if value is None else value for seed, value in sorted(found.items())}

    def mean(self, figure: str, where: Condition) -> Estimate:
        """Mean over the seeds with its interval."""
        return mean(list(self.values(figure, where).values()))

    def ratio(self, figure: str, over: Condition, of: Condition) -> Estimate:
        """How many times larger the figure is under `over` than under `of`, over the seeds that have both."""
        above, below = self.values(figure, over), self.values(figure, of)
        seeds = sorted(above.keys() & below.keys())
        return ratio([above[s] for s in seeds], [below[s] for s in seeds])


def _keys(experiment: Experiment) -> dict[str, None]:
    return {_key(condition): None for condition in experiment.conditions}


def _key(condition: Mapping[str, Any]) -> str:
    return json.dumps(condition, sort_keys=True)


def _plain(settings: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(settings))


def load_all(experiments: Iterable[Experiment], folder: Path = FOLDER) -> list[Results]:
    """Results of each experiment, as far as there are any."""
    return [Results.load(one, folder / f"{one.name}.json") for one in experiments]
