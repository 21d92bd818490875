"""What the virtual cluster costs: CPU seconds of one core, and how they grow with requests and replicas."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from loadgen import arguments
from loadgen.report import Stamp, Steps, show
from loadgen.simulator.hardware import DEVICES, MODELS, kv_blocks
from loadgen.simulator.step_cost import Roofline
from loadgen.workloads.make import make

TITLE = "the virtual cluster: CPU time for 10,000 requests, and how it grows with requests and replicas (7 minutes)"
SEEDS = (0,)
GOAL_S = 60.0  # CPU seconds for 10,000 SW-Chat requests on four replicas
LINEAR = 1.15  # greatest exponent of growth that still counts as linear
MODEL, DEVICE = "llama-3-8b", "a100-40g"
RATE = 5.0  # requests/s for each replica, which it can serve
PER_REPLICA = 625  # requests, where the number of replicas grows


@dataclass(frozen=True, slots=True)
class Case:
    """One run: Poisson arrivals of `rate` requests/s for each replica."""

    group: str
    requests: int
    replicas: int
    rate: float = RATE
    lengths: str = "chat"
    prefix_caching: bool = False
    plain: bool = False  # vLLM's code untouched


def cases(counts: Sequence[int], replicas: Sequence[int], main: int = 10_000) -> list[Case]:
    """The run of the goal, those that grow, and what changes the cost."""
    found = [Case("requests", count, 4) for count in counts]
    found += [Case("replicas", PER_REPLICA * many * main // 10_000, many) for many in replicas]
    found += [
        Case("more than it can serve", main, 4, rate=7.5),
        Case("agents", main, 4, rate=1.0, lengths="agents"),
        Case("agents, prefix caching", main, 4, rate=1.0, lengths="agents", prefix_caching=True),
        Case("without short cuts", main // 10, 4, plain=True),
    ]
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `bench simulator`."""
    parser.add_argument(
        "--requests",
        type=arguments.count,
        nargs="+",
        default=[1000, 10_000, 100_000],
        help="on four replicas (default: 1000 10000 100000)",
    )
    parser.add_argument(
        "--replicas",
        type=arguments.count,
        nargs="+",
        default=[4, 16, 64],
        help=f"with {PER_REPLICA} requests each (default: 4 16 64)",
    )
    parser.add_argument(
        "--main", type=arguments.count, default=10_000, help="requests of the other runs (default: %(default)s)"
    )


def run(args: argparse.Namespace, console: Console) -> Path:
    """Simulate each case and seed; the figures say whether the goal was met and how the cost grows."""
    stamp = Stamp("simulator", vars(args), args.seeds)
    rows = []
    todo = cases(args.requests, args.replicas, args.main)
    measure(Case("imports", 50, 4), 0)  # and all that is made once in a process
    with Steps(console, len(todo) * len(args.seeds)) as steps:
        for case in todo:
            for seed in args.seeds:
                steps.begin(f"{case.group}: {case.requests} requests, {case.replicas} replicas, seed {seed}")
                rows.append({**asdict(case), "seed": seed, **measure(case, seed)})
                steps.done()
    asked = [row["cpu_s"] for row in rows if row["group"] == "requests" and row["requests"] == 10_000]
    figures = {
        "rows": rows,
        "growth": {group: growth([row for row in rows if row["group"] == group]) for group in ("requests", "replicas")},
        "goal_s": GOAL_S,
        "met": max(asked) <= GOAL_S if asked else None,
        "linear": LINEAR,
    }
    _print(console, figures)
    return stamp.write(figures, args.out)


def measure(case: Case, seed: int) -> dict[str, Any]:
    """CPU seconds of this process, from a workload to its outcome, and what was simulated in them."""
    from loadgen.simulator.cluster import Cluster, Fleet  # imports vLLM
    from loadgen.simulator.command import jobs
    from loadgen.simulator.engine import Shape

    model, device = MODELS[MODEL], DEVICES[DEVICE]
    shape = Shape(kv_blocks(model, device), model.context, prefix_caching=case.prefix_caching)
    workload = make(
        case.requests,
        lengths_model=case.lengths,
        arrivals=f"poisson:rate={case.rate * case.replicas}",
        context=shape.longest,
        seed=seed,
    )
    work = jobs(workload)
    fleet = Fleet(model, shape, Roofline(model, device), case.replicas, seed=seed, block_tokens=workload.block_tokens)
    load, began = os.getloadavg()[0], time.process_time()
    outcome = Cluster(fleet, fast=not case.plain, coast=not case.plain).run(work)
    cpu = time.process_time() - began
    return {
        "cpu_s": cpu,
        "cpu_ms_per_request": cpu / case.requests * 1e3,
        "steps": sum(outcome.steps),
        "steps_per_cpu_s": sum(outcome.steps) / cpu,
        "output_tokens": sum(job.output_tokens for job in work),
        "simulated_s": outcome.duration,
        "preemptions": sum(outcome.preemptions),
        "prefix_hit_rate": sum(outcome.prefix_hits) / queries if (queries := sum(outcome.prefix_queries)) else None,
        "load_average": load,
    }


def growth(rows: Sequence[dict[str, Any]]) -> float | None:
    """Exponent e of cost ~ requests^e, by least squares over the logarithms; None for one size."""
    sizes = np.log([row["requests"] for row in rows])
    if len(set(sizes)) < 2:
        return None
    return float(np.polyfit(sizes, np.log([row["cpu_s"] for row in rows]), 1)[0])


def _print(console: Console, figures: dict[str, Any]) -> None:
    heads = (
        "",
        "requests",
        "replicas",
        "requests/s each",
        "CPU s",
        "CPU ms each",
        "steps/CPU s",
        "prefix hits",
        "load",
    )
    rows = [
        (
            *(row["group"], row["requests"], row["replicas"], row["rate"], row["cpu_s"], row["cpu_ms_per_request"]),
            *(row["steps_per_cpu_s"], "-" if row["prefix_hit_rate"] is None else row["prefix_hit_rate"]),
            row["load_average"],
        )
        for row in figures["rows"]
    ]
    show(console, f"{MODEL} on {DEVICE}, SAL, FCFS: goal for 10,000 on four replicas {GOAL_S:g} CPU s", heads, rows)
    for group, exponent in figures["growth"].items():
        if exponent is not None:
            verdict = "linear" if exponent <= LINEAR else "NOT linear"
            console.print(f"cost grows with {group} to the power {exponent:.2f}: {verdict} (up to {LINEAR:g})")
