"""A fleet that grows and shrinks with its load: freeness beside Serve's default autoscaling, on the same traffic."""

from __future__ import annotations

import argparse
import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from loadgen import arguments, arrivals, lengths
from loadgen.bench import autoscaling_live, scaling_figures
from loadgen.bench.scaling_figures import OURS, Rules
from loadgen.report import RESULTS, Stamp, Steps, show
from loadgen.simulator.hardware import DEVICES, MODELS, kv_blocks
from loadgen.simulator.scaling import Autoscaling
from loadgen.simulator.step_cost import Roofline

if TYPE_CHECKING:
    from loadgen.simulator.fleet import Job

TITLE = "autoscaling on freeness and on ongoing requests: TTFT, replica-seconds, reversals, zero (about 10 minutes)"
SEEDS = (0, 1, 2, 3, 4)

MODEL, DEVICE = "llama-3-8b", "a100-40g"  # one such replica serves about 6 SW-Chat requests/s
MOST = 4
WINDOWS = Autoscaling(most=MOST)  # the product's windows; 60 s of start-up
SERVE = replace(WINDOWS, up_s=30.0, down_s=600.0, interval_s=10.0, look_back_s=30.0)  # those of Ray Serve 2.60
SERVE_TARGET = 2  # Ray Serve's default target_ongoing_requests
WATCH_S = 900.0  # after the last arrival, twice that for a fleet that goes to zero: longer than any window


@dataclass(frozen=True, slots=True)
class Traffic:
    """Poisson arrivals under `curve`, [(seconds, requests/s), ...], for a fleet of `least` replicas or more."""

    name: str
    curve: tuple[tuple[float, float], ...]
    least: int = 1

    @property
    def seconds(self) -> float:
        """Until the last arrival, about."""
        return sum(lasting for lasting, _ in self.curve)

    @property
    def settled(self) -> float:
        """Two start-up times after the rate is first at its highest, seconds: help can be there by then."""
        high = max(rate for _, rate in self.curve)
        before = itertools.takewhile(lambda piece: piece[1] < high, self.curve)
        return sum(lasting for lasting, _ in before) + 2 * WINDOWS.startup_s

    @property
    def end(self) -> float:
        """Until nobody looks any more, seconds: the last replica has a window of its own."""
        return self.seconds + WATCH_S * (1 if self.least else 2)


def traffics(scale: float = 1.0) -> list[Traffic]:
    """The kinds of traffic; `scale` shortens them all, which leaves less than the windows need."""
    low, high, down = 1.0, 12.0, WINDOWS.down_s

    def cut(*pieces: tuple[float, float]) -> tuple[tuple[float, float], ...]:
        return tuple((seconds * scale, rate) for seconds, rate in pieces)

    return [
        Traffic("step", cut((120.0, low), (420.0, high))),
        Traffic("square, short lulls", cut(*[(down / 2, high), (down / 2, low)] * 4)),
        Traffic("square, lulls like the window", cut(*[(down + 30.0, high), (down + 10.0, low)] * 3)),
        Traffic("square, long lulls", cut(*[(300.0, high), (300.0, low)] * 2)),
        Traffic("zero and back", cut((60.0, low / 2), (420.0, 0.0), (120.0, high / 2)), least=0),
    ]


def contenders(targets: Sequence[int]) -> dict[str, Autoscaling]:
    """Label -> how the fleet scales."""

    def ongoing(target: int, windows: Autoscaling) -> Autoscaling:
        return replace(windows, policy={"name": "ongoing", "target_ongoing_requests": target})

    return {
        OURS: WINDOWS,
        "Serve's defaults": ongoing(SERVE_TARGET, SERVE),
        **{f"ongoing {target}": ongoing(target, WINDOWS) for target in targets},
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `bench autoscaling`."""
    parser.add_argument(
        "--targets",
        type=arguments.count,
        nargs="+",
        default=[SERVE_TARGET, 32],
        metavar="N",
        help="target_ongoing_requests to compare with, in freeness' windows (default: %(default)s)",
    )
    parser.add_argument(
        "--scale", type=arguments.share, default=1.0, help="shortens the traffic, for a try (default: %(default)s)"
    )
    live = parser.add_argument_group("on a real fleet")
    live.add_argument(
        "--live",
        action="store_true",
        help="instead: one step on a real fleet of one or two replicas (8 minutes); results/autoscaling-live.json",
    )
    autoscaling_live.add_arguments(live)


def run(args: argparse.Namespace, console: Console) -> Path:
    """Play each traffic and seed under each policy; or, with --live, one step on a real fleet under two."""
    if args.live:
        if args.out == RESULTS / "autoscaling.json":
            args.out = RESULTS / "autoscaling-live.json"
        return autoscaling_live.run(args, console)
    if not args.scale > 0:
        raise SystemExit("--scale 0 leaves no traffic: give a share above 0")
    stamp = Stamp("autoscaling", vars(args), args.seeds)
    rivals, kinds = contenders(args.targets), traffics(args.scale)
    runs: list[dict[str, Any]] = []
    with Steps(console, len(kinds) * len(args.seeds)) as steps:
        for seed in args.seeds:
            for traffic in kinds:
                steps.begin(f"seed {seed}: {traffic.name}")
                for label, scaling in rivals.items():
                    figures = play(traffic, scaling, seed)
                    runs.append({"traffic": traffic.name, "policy": label, "seed": seed, **figures})
                steps.done()
            result = _result(kinds, rivals, runs)
            path = stamp.write(result, args.out)  # a run that is cut has its whole seeds
    _print(console, result)
    return path


def _result(kinds: Sequence[Traffic], rivals: dict[str, Autoscaling], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    ratios = scaling_figures.compared(runs)
    return {
        "model": MODEL,
        "device": DEVICE,
        "traffic": [asdict(traffic) for traffic in kinds],
        "policies": {label: asdict(scaling) for label, scaling in rivals.items()},
        "freeness_over": ratios,
        "checks": scaling_figures.checks(runs, ratios),
        "seeds": sorted({run["seed"] for run in runs}),  # in place of those that were asked for
        "runs": runs,
    }


def requests(traffic: Traffic, longest: int, seed: int) -> list[tuple[float, int, int]]:
    """Due times (s), prompt and answer lengths (tokens) of one seed: SW-Chat lengths, the same for every policy."""
    rng = np.random.default_rng(seed)
    expected = sum(seconds * rate for seconds, rate in traffic.curve)
    enough = math.ceil(expected + 6.0 * math.sqrt(expected) + 10.0)
    due = arrivals.under_rate(enough, [*traffic.curve, (math.inf, 1.0)], rng)
    due = due[due < traffic.seconds]
    prompts, answers = lengths.table("chat").scaled(len(due), longest, rng)
    return [(float(t), int(p), int(a)) for t, p, a in zip(due, prompts, answers, strict=True)]


def play(traffic: Traffic, scaling: Autoscaling, seed: int) -> dict[str, Any]:
    """Figures of one run. One more request, long after all others, keeps time going until then and is not counted."""
    from loadgen.simulator.cluster import Cluster, Fleet, Job, Migration  # imports vLLM
    from loadgen.simulator.engine import Shape

    model, device = MODELS[MODEL], DEVICES[DEVICE]
    shape = Shape(kv_blocks(model, device), model.context)
    scaling = replace(scaling, least=traffic.least)
    work: list[Job] = [Job(*request) for request in requests(traffic, shape.longest, seed)]
    end = traffic.end
    fleet = Fleet(model, shape, Roofline(model, device), seed=seed, migration=Migration(), autoscaling=scaling)
    load = os.getloadavg()[0]
    outcome = Cluster(fleet).run([*work, Job(end, 16, 1)])
    scaled = [step for step in outcome.scaling if step.at < end]
    rules = Rules(traffic.least, scaling.up_s, scaling.down_s, scaling.interval_s + scaling.look_back_s)
    after = max(1, scaled[-1].target) * (outcome.duration - end)  # what the last request cost
    sizes = [(step.at, step.target) for step in scaled]
    return {
        **scaling_figures.of_run(outcome.records[:-1], sizes, rules, outcome.replica_s - after),
        "later_p95_ttft_ms": scaling_figures.later(outcome.records[:-1], traffic.settled),
        "moves": outcome.moves,
        "longest_pause_s": max(outcome.pauses, default=None),
        "scaling": [(step.at, step.target, step.running, step.reason) for step in scaled],
        "load_average": load,
    }


def _print(console: Console, result: dict[str, Any]) -> None:
    heads = (
        "",
        "TTFT p50, s",
        "p95",
        "p95 later",
        "replica-s",
        "most",
        "steps",
        "reversals",
        "in a window",
        "to min, s",
        "not whole",
    )
    for traffic in result["traffic"]:
        rows = []
        for policy in result["policies"]:
            runs = [r for r in result["runs"] if (r["traffic"], r["policy"]) == (traffic["name"], policy)]
            later = [r["later_p95_ttft_ms"] for r in runs if r["later_p95_ttft_ms"] is not None]
            ends = [math.inf if r["to_min_s"] is None else r["to_min_s"] for r in runs]
            rows.append(
                (
                    policy,
                    *(float(np.mean([r[key] for r in runs])) / 1e3 for key in ("p50_ttft_ms", "p95_ttft_ms")),
                    float(np.mean(later)) / 1e3 if later else "-",
                    float(np.mean([r["replica_s"] for r in runs])),
                    *(max(r[key] for r in runs) for key in ("most", "steps", "reversals", "reversals_in_window")),
                    max(ends),
                    sum(r["not_ok"] for r in runs),
                )
            )
        show(console, f"{traffic['name']}: means of {len(runs)} seeds, greatest of the counts and times", heads, rows)
    rows = [
        (f"{traffic}: {policy}", *(row[key]["text"] for key in scaling_figures.COMPARED))
        for traffic, others in result["freeness_over"].items()
        for policy, row in others.items()
    ]
    kind = next(iter(next(iter(result["freeness_over"].values())).values()))["replica_s"]["kind"]
    show(console, f"freeness over the other policy, by seed [{kind}]", ("", "TTFT p95", "replica-seconds"), rows)
    show(
        console,
        "what autoscaling on freeness promises",
        ("", "found", "met"),
        [(c["check"], c["found"], "yes" if c["met"] else "NO") for c in result["checks"]],
    )
