"""Steps of a real engine on this machine: a sweep over what a step may consist of, read from the engine's step log."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console

from deployments.step_content import Step
from loadgen import lengths
from loadgen.bench import engine_pair, servers
from loadgen.bench.engine_process import Outcome, Plan
from loadgen.bench.policies import ENGINE
from loadgen.report import Steps
from loadgen.simulator.calibrate import Measured

LEAD_S = 0.1  # nothing is timed from outside, so a burst may begin a little late
BATCHES = (1, 2, 4, 8, 16, 32)
ANSWER = 16  # tokens of each answer in those
PROMPTS = (24, 60, 120, 250, 500, 1000, 1900)
VOCABULARY = 40_000
POLICY = {"name": "fcfs"}


@dataclass(frozen=True, slots=True)
class Window:
    """The wall-clock seconds in which an engine played something."""

    begin: float
    end: float


def burst(prompts: Sequence[int], answers: Sequence[int], rng: np.random.Generator, due: Sequence[float] = ()) -> Plan:
    """Requests of these lengths (tokens) with random content, all at once unless it is said when they are due."""
    return Plan(
        t0=0.0,
        policy={},
        due=list(due) or [0.0] * len(prompts),
        prompts=[rng.integers(100, VOCABULARY, n).tolist() for n in prompts],
        output_lens=[int(n) for n in answers],
    )


def sweep(seed: int, engine_args: dict[str, Any]) -> list[tuple[str, Plan]]:
    """One run of a calibration: bursts for an idle engine, each with a name.

    Decodes of every batch size at short and at long contexts, single prompts and many together, and both traces.
    """
    rng = np.random.default_rng(seed)
    context, room = (
        engine_args["max_model_len"],
        (engine_args["num_gpu_blocks_override"] - 1) * engine_args["block_size"],
    )
    found = []
    for size in (n for n in BATCHES if n <= engine_args["max_num_seqs"]):
        longest = min(context, room // size) - ANSWER - engine_args["block_size"]  # none is preempted
        for share in (0.1, 0.9):
            prompt = max(1, int(longest * share * rng.uniform(0.8, 1.0)))
            found.append((f"{size} decodes behind {prompt} tokens", burst([prompt] * size, [ANSWER] * size, rng)))
    for size in (n for n in PROMPTS if n < context):
        found.append((f"a prompt of {size} tokens", burst([int(size * rng.uniform(0.8, 1.0))], [1], rng)))
    for count in (4, 8, 16):
        prompts = rng.integers(8, max(9, room // count // 2), count)
        found.append((f"{count} prompts", burst(prompts.tolist(), [1] * count, rng)))
    for trace in lengths.names():
        prompts, answers = lengths.table(trace).scaled(10, context, rng)
        found.append((f"10 requests of SW-{trace.capitalize()}", burst(prompts.tolist(), answers.tolist(), rng)))
    return found


def measure(model: str | None, runs: int, seed: int, console: Console) -> list[Measured]:
    """The steps of so many sweeps on one engine, which has one core of this machine; about 25 s each.

    `model` is a folder, None the default model.
    """
    engine_args = {**ENGINE, "model": model or servers.default_model()}
    core = max(psutil.Process().cpu_affinity() or [0])
    windows: dict[str, Window] = {}
    sweeps = [(f"run{number}", sweep(seed + number, engine_args)) for number in range(runs)]
    with servers.session_folder(console) as folder, Steps(console, sum(len(each) for _, each in sweeps)) as steps:
        with engine_pair.started(engine_args, [core], folder, steps=True) as (engine,):
            for name, plans in sweeps:
                begin = 0.0
                for what, plan in plans:
                    steps.begin(f"{name}: {what}")
                    window = played([engine], POLICY, plan, lead_s=LEAD_S)[1]
                    begin = begin or window.begin
                    steps.done()
                windows[name] = Window(begin, window.end)
        assert engine.steps is not None
        return rows_of(engine.steps, windows)


def played(
    engines: Sequence[engine_pair.Engine], policy: dict[str, Any], plan: Plan, *, lead_s: float = engine_pair.LEAD_S
) -> tuple[list[Outcome], Window]:
    """Outcomes of a plan on all the engines at the same time, under one policy, and when that was."""
    begin = time.time()
    outcomes = engine_pair.play([(engine, policy) for engine in engines], plan, lead_s=lead_s)
    return outcomes, Window(begin, time.time())


def rows_of(log: Path, windows: dict[str, Window]) -> list[Measured]:
    """The steps that an engine's log has for each window, under the window's name; others belong to no run."""
    found = []
    with log.open(newline="") as file:
        for row in csv.DictReader(file):
            now = float(row["now"])
            name = next((name for name, window in windows.items() if window.begin <= now <= window.end), None)
            if name is not None:
                step = Step(*(float(row[field]) for field in Step._fields))  # type: ignore[arg-type]  # counts as floats
                found.append(Measured(step, float(row["seconds"]), name))
    return found


def write(rows: Iterable[Measured], path: Path) -> None:
    """Write rows as the CSV file that `calibrate` reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*Step._fields, "seconds", "run"))
        writer.writerows((*row.step, row.seconds, row.run) for row in rows)
