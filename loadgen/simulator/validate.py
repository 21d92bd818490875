"""`python -m loadgen validate`: the same traces on real engines and in the simulator, beside what real runs differ by.

Two engines play each trace at the same time, one on each of two cores: twins, whose difference is the noise of the
machine. Each run is simulated with step times fitted to all runs but it and its twin.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from rich.console import Console
from rich.markup import escape

from loadgen import arguments, arrivals, lengths
from loadgen.bench import engine_pair, servers
from loadgen.bench.engine_process import Plan
from loadgen.bench.policies import ENGINE
from loadgen.metrics import RequestRecord, summarise
from loadgen.report import RESULTS, Stamp, Steps, show
from loadgen.simulator import replay
from loadgen.simulator.calibrate import Measured, error, fit
from loadgen.simulator.hardware import MODELS
from loadgen.simulator.measure import Window, burst, played, rows_of
from policies.scheduling import SCHEDULING

if TYPE_CHECKING:
    from loadgen.simulator.engine import Shape
    from loadgen.simulator.step_cost import StepCost

TITLE = "the simulator against real engines on the same traces, beside the noise of two real runs (about 7 minutes)"
GOAL = 0.10  # of each figure
FIGURES = {"p50_ttft_ms": "TTFT p50", "p95_ttft_ms": "TTFT p95", "duration": "total time"}


@dataclass(frozen=True, slots=True)
class Trace:
    """What is played: lengths by the name of their model, load as a share of capacity (None: all at once), a policy."""

    lengths: str
    load: float | None
    policy: dict[str, Any]
    plan: Plan

    def __str__(self) -> str:
        how = "all at once" if self.load is None else f"load {self.load:g}"
        return f"{self.lengths}, {how}, {self.policy['name']}"


@dataclass(slots=True)
class Run:
    """A trace on one engine: in which round (twins have the same), what came of it, its steps."""

    trace: Trace
    round: int
    engine: str
    records: list[RequestRecord]
    preemptions: int
    window: Window
    rows: list[Measured] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """The figures that are compared."""
        return figures(self.records)


def figures(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Those of FIGURES, in the units that the names say."""
    summary = summarise(records)
    return {key: float(summary[key]) for key in FIGURES}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `validate`."""
    parser.add_argument("--model", type=arguments.model_folder, help="local model folder (default: the default model)")
    parser.add_argument("--lengths", nargs="+", choices=lengths.names(), default=["chat", "code"], help="default: both")
    parser.add_argument(
        "--loads",
        type=arguments.positive,
        nargs="+",
        default=[0.7, 1.1],
        metavar="SHARE",
        help="of what an engine can serve (default: 0.7 1.1)",
    )
    parser.add_argument(
        "--scheduling",
        type=partial(arguments.policy, SCHEDULING),
        nargs="+",
        default=[{"name": "fcfs"}],
        metavar="NAME[:PARAMETER=VALUE,...]",
        help="default: fcfs",
    )
    parser.add_argument("--rounds", type=arguments.count, default=3, help="runs of each trace, each with a twin (3)")
    parser.add_argument("--seconds", type=arguments.positive, default=20.0, help="in which requests arrive (20)")
    parser.add_argument("--burst", type=arguments.count, default=30, help="requests by which capacity is measured (30)")
    parser.add_argument("--seed", type=arguments.seed, default=0, help="default: %(default)s")
    parser.add_argument(
        "--logs", type=arguments.out_folder, metavar="FOLDER", help="keep the engines' step logs, for `replay`"
    )
    parser.add_argument(
        "--out", type=arguments.out_file, default=RESULTS / "validation.json", help="default: %(default)s"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Play, replay, simulate, compare; status 1 if the engines' schedules and the simulator's are not identical."""
    cores = sorted(psutil.Process().cpu_affinity() or [])
    if len(cores) < 2:
        console.print("[red]cores: two are needed, an engine and its twin must have one each[/red]")
        return 1
    stamp = Stamp("validate", vars(args), [args.seed])
    engine_args = {**ENGINE, "model": args.model or servers.default_model()}
    same = []
    with servers.session_folder(console) as folder:
        runs, capacity, logs = _live(args, engine_args, cores, folder, console)
        for log in logs:
            if args.logs is not None:
                args.logs.mkdir(parents=True, exist_ok=True)
                shutil.copy(log, args.logs / f"steps-{log.name}")
            try:
                same.append(str(replay.replay(replay.read(log))))
            except replay.Difference as difference:
                console.print(f"[red]{escape(f'{log}: {difference}')}[/red]")
                return 1
    compared = compare(runs, engine_args)
    summary = summed_up(compared)
    _print(console, compared, summary)
    for line in same:
        console.print(f"replay: {escape(line)}")
    path = stamp.write(
        {"engine_args": engine_args, "capacity": capacity, "goal": GOAL, "summary": summary, "replay": same,
         "runs": compared},
        args.out,
    )  # fmt: skip
    console.print(f"written: {path}")
    return 0


def _live(
    args: argparse.Namespace, engine_args: dict[str, Any], cores: Sequence[int], folder: Path, console: Console
) -> tuple[list[Run], dict[str, float], list[Path]]:
    """The runs, requests/s that an engine serves of each length model, the engines' step logs."""
    runs: list[Run] = []
    capacity: dict[str, float] = {}
    per_round = len(args.lengths) * len(args.loads) * len(args.scheduling)
    with Steps(console, 1 + len(args.lengths) + args.rounds * per_round) as steps:
        steps.begin("starting both engines")
        with engine_pair.started(engine_args, cores, folder, steps=True) as engines:
            steps.done()

            def play(trace: Trace, number: int) -> list[Run]:
                steps.begin(f"round {number}: {trace}")
                outcomes, window = played(engines, trace.policy, trace.plan)
                found = [
                    Run(trace, number, engine.name, outcome.records, outcome.preemptions, window)
                    for engine, outcome in zip(engines, outcomes, strict=True)
                ]
                runs.extend(found)
                steps.done()
                return found

            for name in args.lengths:
                rng = np.random.default_rng([args.seed, 0])
                prompts, answers = lengths.table(name).scaled(args.burst, engine_args["max_model_len"], rng)
                trace = Trace(name, None, args.scheduling[0], burst(prompts.tolist(), answers.tolist(), rng))
                total = np.mean([one.figures()["duration"] for one in play(trace, 0)])
                capacity[name] = args.burst / float(total)
            traces = list(_traces(args, capacity, engine_args["max_model_len"]))
            for number in range(1, args.rounds + 1):
                for trace in traces:
                    play(trace, number)
            logs = [engine.steps for engine in engines if engine.steps is not None]
    for engine, log in zip(engines, logs, strict=True):
        for one in (one for one in runs if one.engine == engine.name):
            one.rows = rows_of(log, {f"{one.trace}, round {one.round}, {one.engine}": one.window})
    return runs, capacity, logs


def _traces(args: argparse.Namespace, capacity: dict[str, float], context: int) -> Iterator[Trace]:
    for name in args.lengths:
        for load in args.loads:
            rng = np.random.default_rng([args.seed, 1])
            rate = load * capacity[name]
            count = max(4, round(rate * args.seconds))
            prompts, answers = lengths.table(name).scaled(count, context, rng)
            due = arrivals.poisson(count, rate, rng).tolist()
            plan = burst(prompts.tolist(), answers.tolist(), rng, due)
            for policy in args.scheduling:
                yield Trace(name, load, policy, plan)


def compare(runs: Sequence[Run], engine_args: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each run: its figures, the simulator's, the twin's, and those of the trace's other rounds, and the errors.

    Errors are shares of the run's own figure: above 0 is too long. `step_error` is that of its predicted step times.
    """
    found = []
    for one in runs:
        cost = fit([row for other in runs if not _together(one, other) for row in other.rows])
        live = one.figures()
        twins = [other for other in runs if _together(one, other) and other is not one]
        others = [other for other in runs if str(other.trace) == str(one.trace) and not _together(one, other)]
        simulated, preemptions = simulate(one.trace, cost, engine_args)
        found.append(
            {
                "trace": str(one.trace),
                "round": one.round,
                "engine": one.engine,
                "requests": len(one.records),
                "steps": len(one.rows),
                "preemptions": [one.preemptions, preemptions],
                "step_error": error(cost, one.rows),
                "live": live,
                "simulated": simulated,
                "error": {key: simulated[key] / live[key] - 1 for key in FIGURES},
                "twin": {key: _mean(abs(t.figures()[key] / live[key] - 1) for t in twins) for key in FIGURES},
                "rounds": {key: _mean(abs(o.figures()[key] / live[key] - 1) for o in others) for key in FIGURES},
            }
        )
    return found


def _together(one: Run, other: Run) -> bool:
    return (one.round, str(one.trace)) == (other.round, str(other.trace))


def _mean(values: Iterable[float]) -> float | None:
    collected = list(values)
    return float(np.mean(collected)) if collected else None


def shape_of(engine_args: dict[str, Any]) -> Shape:
    """The simulator's limits for an engine started with these arguments."""
    from loadgen.simulator.engine import Shape

    return Shape(
        kv_blocks=engine_args["num_gpu_blocks_override"] - 1,
        max_model_len=engine_args["max_model_len"],
        block_size=engine_args["block_size"],
        max_num_seqs=engine_args["max_num_seqs"],
        max_num_batched_tokens=engine_args["max_num_batched_tokens"],
        asynchronous=False,
    )


def simulate(trace: Trace, cost: StepCost, engine_args: dict[str, Any]) -> tuple[dict[str, float], int]:
    """Figures and preemptions of the trace on a simulated engine."""
    from loadgen.simulator.cluster import Cluster, Fleet, Job

    jobs = [
        Job(due, len(prompt), answer)
        for due, prompt, answer in zip(trace.plan.due, trace.plan.prompts, trace.plan.output_lens, strict=True)
    ]
    # What an engine holds in a KV block is of no account here, so any model will do.
    fleet = Fleet(MODELS["smollm2-135m"], shape_of(engine_args), cost, replicas=1, scheduling=trace.policy, oracle=True)
    outcome = Cluster(fleet).run(jobs)
    return figures(outcome.records), sum(outcome.preemptions)


def summed_up(compared: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """For each trace and for all: means over the runs of the absolute errors, and of what real runs differ by."""
    names = list(dict.fromkeys(one["trace"] for one in compared))
    groups = {name: [one for one in compared if one["trace"] == name] for name in names}
    groups["all"] = [one for one in compared if one["round"]] or list(compared)
    found: dict[str, Any] = {}
    for name, members in groups.items():
        found[name] = {
            "runs": len(members),
            "live": {key: _mean(one["live"][key] for one in members) for key in FIGURES},
            "error": {key: _mean(abs(one["error"][key]) for one in members) for key in FIGURES},
            "bias": {key: _mean(one["error"][key] for one in members) for key in FIGURES},
            **{
                noise: {
                    key: _mean(one[noise][key] for one in members if one[noise][key] is not None) for key in FIGURES
                }
                for noise in ("twin", "rounds")
            },
            "step_error": _mean(one["step_error"] for one in members),
        }
    return found


def _print(console: Console, compared: Sequence[dict[str, Any]], summary: dict[str, Any]) -> None:
    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.1%}"

    for key, title in FIGURES.items():
        unit = 1e-3 if key.endswith("_ms") else 1.0
        rows = []
        for name, one in summary.items():
            live = one["live"][key] * unit if name != "all" else ""
            errors = [share(one[kind][key]) for kind in ("error", "bias", "twin", "rounds")]
            rows.append((name, one["runs"], live, *errors))
        columns = ("", "runs", "live, s", "simulator off by", "of that bias", "twins differ by", "rounds differ by")
        show(console, title, columns, rows)
    total = summary["all"]
    within = all(total["error"][key] <= GOAL for key in FIGURES)
    console.print(
        f"Mean error of the simulator {'within' if within else 'above'} the goal of {GOAL:.0%}; step times "
        f"{total['step_error']:.1%} off. A run's step times are fitted to the other runs, without its twin."
    )
