"""`python -m loadgen calibrate`: step times of a machine from steps that were measured on it."""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.markup import escape

from deployments.step_content import Step
from loadgen import arguments
from loadgen.report import RESULTS, Stamp, show
from loadgen.simulator.step_cost import Fitted

TITLE = "fit the step times of a machine to measured steps, for `simulate --fitted`"
LEAST = 12  # rows; fewer say little about six numbers

# Coefficient of Fitted -> what it is multiplied with.
_FEATURES = {
    "step": None,
    "prefill_token": "prefill_tokens",
    "prefill_request": "prefill_requests",
    "attention_pair": "attention",
    "decode": "decodes",
    "context_token": "context_tokens",
}

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Measured:
    """One step of an engine and its seconds; `run` names the run that it is from."""

    step: Step
    seconds: float
    run: str = ""


def fit(rows: Sequence[Measured]) -> Fitted:
    """The non-negative seconds per part that come closest to the rows; ValueError for too few.

    Least squares of the residuals over the square root of the time: long steps count more, but not by their square.
    Every set of coefficients at 0 is tried, which finds the exact minimum for six.
    """
    if len(rows) < LEAST:
        raise ValueError(f"rows: {len(rows)} steps are too few; measure {LEAST} at least")
    features, seconds = _matrix([row.step for row in rows]), np.array([row.seconds for row in rows])
    scale = features.max(axis=0)
    scale[scale == 0] = 1.0
    weight = 1 / np.sqrt(seconds)
    # An orthogonal change of rows keeps all distances: seven rows remain of any number.
    _, small = np.linalg.qr(np.column_stack([features / scale * weight[:, None], seconds * weight]))
    left, right = small[:, :-1], small[:, -1]
    best, least = np.zeros(left.shape[1]), math.inf
    for size in range(1, left.shape[1] + 1):
        for chosen in itertools.combinations(range(left.shape[1]), size):
            found = np.linalg.lstsq(left[:, chosen], right, rcond=None)[0]
            distance = float(np.sum((left[:, chosen] @ found - right) ** 2))
            if found.min() >= 0 and distance < least * (1 - 1e-12):
                best, least = np.zeros(left.shape[1]), distance
                best[list(chosen)] = found
    return Fitted(*(float(value) for value in best / scale))


def error(cost: Fitted, rows: Sequence[Measured]) -> float:
    """Mean absolute error of the predicted step times, as a share of the measured ones."""
    return float(np.mean([abs(cost.seconds(row.step) / row.seconds - 1) for row in rows]))


def unseen_error(rows: Sequence[Measured]) -> float | None:
    """The same for each run by a fit to the others, averaged over the runs; None where these are too few."""
    runs = sorted({row.run for row in rows})
    if min(sum(row.run != run for row in rows) for run in runs) < LEAST:
        return None
    errors = []
    for run in runs:
        others = [row for row in rows if row.run != run]
        errors.append(error(fit(others), [row for row in rows if row.run == run]))
    return float(np.mean(errors))


def _matrix(steps: Sequence[Step]) -> Floats:
    columns = [
        np.ones(len(steps)) if name is None else [getattr(s, name) for s in steps] for name in _FEATURES.values()
    ]
    return np.column_stack(columns).astype(np.float64)


def read(path: Path) -> list[Measured]:
    """Rows of a CSV file with the columns of Step, `seconds` and, if there is more than one, `run`.

    ValueError names the line that cannot be used.
    """
    with path.open(newline="", errors="replace") as file:
        reader = csv.DictReader(file)
        missing = {*Step._fields, "seconds"} - set(reader.fieldnames or ())
        if missing:
            raise ValueError(f"{path}: there is no column {', '.join(sorted(missing))}")
        rows = []
        for number, row in enumerate(reader, 2):
            try:
                step = Step(*(float(row[name]) for name in Step._fields))  # type: ignore[arg-type]  # counts as floats
                seconds = float(row["seconds"])
            except (TypeError, ValueError):
                raise ValueError(f"{path}, line {number}: not all columns hold numbers") from None
            if not (0 < seconds < math.inf and all(0 <= value < math.inf for value in step)):
                raise ValueError(f"{path}, line {number}: give seconds > 0, and nothing below 0")
            rows.append(Measured(step, seconds, row.get("run") or ""))
    return rows


def load(path: Path) -> Fitted:
    """The step times that `run` wrote; ValueError if the file is none of its."""
    try:
        fitted = Fitted(**json.loads(path.read_text())["seconds"])
        possible = all(0 <= seconds < math.inf for seconds in asdict(fitted).values()) and fitted.step > 0
    except (KeyError, TypeError, ValueError):
        possible = False
    if not possible:
        raise ValueError(f"{path}: is not a result of `python -m loadgen calibrate`")
    return fitted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `calibrate`."""
    columns = ", ".join((*Step._fields, "seconds"))
    parser.add_argument(
        "rows",
        type=Path,
        nargs="?",
        metavar="STEPS.csv",
        help=f"columns {columns}, and run if there are several; with --measure: where to keep what was measured",
    )
    parser.add_argument("--measure", action="store_true", help="measure a real engine on a core of this machine first")
    parser.add_argument(
        "--model", type=arguments.model_folder, help="with --measure: local model folder (default: the default model)"
    )
    parser.add_argument(
        "--runs", type=arguments.count, default=3, help="with --measure: sweeps of about 25 s (default: %(default)s)"
    )
    parser.add_argument("--seed", type=arguments.seed, default=0, help="with --measure (default: %(default)s)")
    parser.add_argument(
        "--out", type=arguments.out_file, default=RESULTS / "step-times.json", help="default: %(default)s"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure if asked to, fit, print what each part costs and how far off that is, write it.

    Status 1 and a message for bad rows, or for none.
    """
    stamp = Stamp("calibrate", vars(args), range(args.seed, args.seed + args.runs) if args.measure else ())
    try:
        rows = _measure(args, console) if args.measure else read(_given(args.rows))
        cost = fit(rows)
        unseen = unseen_error(rows)
    except (OSError, ValueError) as problem:
        console.print(f"[red]{escape(str(problem))}[/red]")
        return 1
    known = error(cost, rows)
    seconds = asdict(cost)
    show(
        console, "what a step takes, us", ("part", "us each"), [(name, value * 1e6) for name, value in seconds.items()]
    )
    far = f"{known:.1%} off on the {len(rows)} steps that it was fitted to"
    console.print(far + (f", {unseen:.1%} on runs that it was not" if unseen is not None else ""))
    figures: dict[str, Any] = {"seconds": seconds, "rows": len(rows), "error": known, "unseen_error": unseen}
    console.print(f"written: {stamp.write(figures, args.out)}")
    return 0


def _measure(args: argparse.Namespace, console: Console) -> list[Measured]:
    from loadgen.simulator import measure  # which uses this module

    rows = measure.measure(args.model, args.runs, args.seed, console)
    if args.rows is not None:
        measure.write(rows, args.rows)
    return rows


def _given(path: Path | None) -> Path:
    if path is None:
        raise ValueError("STEPS.csv: name a file with measured steps, or measure some with --measure")
    return path
