"""Simulate what is missing of an experiment, in several processes, and keep each cell as soon as it is there."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from rich.console import Console

from loadgen.experiments.experiment import Condition
from loadgen.experiments.results import Cell, Results
from loadgen.report import Steps, rounded


def run(results: Results, seeds: Sequence[int], processes: int, console: Console) -> None:
    """Add all missing cells of these seeds; interrupted, it goes on from the last cell the next time."""
    missing = results.missing(seeds)
    name, scale = results.experiment.name, results.scale
    with Steps(console, len(missing)) as steps:
        if missing:
            steps.begin(f"{name}: {len(missing)} cells")
        for cell in _cells(name, missing, scale, processes):
            results.add(cell)
            steps.done()
            steps.begin(f"{name}: {describe(cell.condition)}, seed {cell.seed}: {cell.cpu_s:.1f} s of CPU")


def _cells(name: str, missing: Sequence[tuple[Condition, int]], scale: float, processes: int) -> Iterator[Cell]:
    if min(processes, len(missing)) <= 1:
        yield from (simulate(name, condition, seed, scale) for condition, seed in missing)
        return
    # Spawned: the simulator loads vLLM and torch, whose threads do not survive a fork.
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=_leave_interrupts) as pool:
        futures = [pool.submit(simulate, name, dict(condition), seed, scale) for condition, seed in missing]
        try:
            yield from (future.result() for future in as_completed(futures))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _leave_interrupts() -> None:
    """Ctrl-C is for the process that hands out the cells."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def simulate(name: str, condition: Condition, seed: int, scale: float) -> Cell:
    """One cell of the experiment of that name, and what it cost."""
    import loadgen.simulator.cluster  # noqa: F401  # loads vLLM, which is not the cell's cost
    from loadgen.experiments.registry import EXPERIMENTS

    began = time.process_time()
    figures = EXPERIMENTS[name].cell(condition, seed, scale)
    kept: dict[str, float | None] = rounded({key: None if v != v else float(v) for key, v in figures.items()})
    return Cell(dict(condition), seed, round(time.process_time() - began, 2), kept)


def describe(condition: Condition) -> str:
    """A condition in a line."""
    return ", ".join(f"{axis} {value}" for axis, value in condition.items())
