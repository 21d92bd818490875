"""`python -m loadgen experiment NAME`: repeat what a paper shows, and say beside it what it said."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from loadgen import arguments, report
from loadgen.experiments import page, runner
from loadgen.experiments.experiment import Experiment
from loadgen.experiments.registry import EXPERIMENTS
from loadgen.experiments.results import FOLDER, Results, ResultsError, load_all

TITLE = "repeat both papers' experiments in the simulator; without NAME: list them"
ALL = "all"
QUICK_SCALE, QUICK_SEEDS = 0.1, (0, 1)
QUICK_FOLDER = report.ROOT / "runs" / "experiments-quick"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `experiment`."""
    parser.add_argument("names", nargs="*", type=_name, metavar="NAME", help=f"or `{ALL}`")
    parser.add_argument("--list", action="store_true", help="list them, with what is done and what the rest will cost")
    parser.add_argument(
        "--seeds", type=arguments.seed, nargs="+", metavar="N", help="default: 0 1 2 3 4, and 0 1 with --quick"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="a tenth of the requests: to see that it runs")
    size.add_argument(
        "--scale",
        type=arguments.positive,
        default=1.0,
        metavar="X",
        help="times the requests; other than 1 needs --out",
    )
    parser.add_argument("--processes", type=arguments.count, default=2, help="default: %(default)s")
    parser.add_argument("--fresh", action="store_true", help="forget the cells that are there")
    parser.add_argument("--out", type=arguments.out_folder, help="folder of the results (default: results/experiments)")
    parser.add_argument("--page", action="store_true", help="only make docs/experiments.md and the plots anew")


def _name(text: str) -> str:
    if text != ALL and text not in EXPERIMENTS:
        raise argparse.ArgumentTypeError(f"there is no {text!r}; choose of {', '.join((*EXPERIMENTS, ALL))}")
    return text


def run(args: argparse.Namespace, console: Console) -> int:
    """List, simulate or write the page; status 1 and a message where a result cannot be continued, 130 if cut."""
    folder = args.out or (QUICK_FOLDER if args.quick else FOLDER)
    scale = QUICK_SCALE if args.quick else args.scale
    try:
        if scale != 1 and folder == FOLDER:
            raise ResultsError(f"--scale {scale:g}: give a folder with --out; those of the page are at scale 1")
        if args.page:
            console.print(f"written: {page.write(load_all(EXPERIMENTS.values()))}")
            return 0
        if args.list or not args.names:
            _list(folder, scale, console)
            return 0
        names = list(EXPERIMENTS) if ALL in args.names else list(dict.fromkeys(args.names))
        for name in names:
            _simulate(EXPERIMENTS[name], args, folder, scale, console)
    except ResultsError as problem:
        console.print(f"[red]{escape(str(problem))}[/red]")
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on from here")
        return 130
    if folder == FOLDER:
        console.print(f"written: {page.write(load_all(EXPERIMENTS.values()))}")
    return 0


def _simulate(experiment: Experiment, args: argparse.Namespace, folder: Path, scale: float, console: Console) -> None:
    results = Results.load(experiment, folder / f"{experiment.name}.json", scale, fresh=args.fresh)
    runner.run(results, args.seeds or (QUICK_SEEDS if args.quick else experiment.seeds), args.processes, console)
    _show(results, console)
    console.print(f"written: {results.path}")


def _show(results: Results, console: Console) -> None:
    experiment = results.experiment
    rows = [
        [runner.describe(condition), *(str(results.mean(figure, condition)) for figure in experiment.figures)]
        for condition in experiment.conditions
    ]
    report.show(console, experiment.title, ("", *experiment.figures.values()), rows)
    said = []
    for claim in experiment.claims:
        ours = page.ours_of(results, claim)
        paper = "-".join(f"{v:g}" for v in dict.fromkeys(claim.paper)) if claim.paper else page.NOT_KNOWN
        said.append([claim.what, str(ours), paper, page.verdict(claim, ours) if claim.paper else ""])
    if said:
        report.show(console, f"{experiment.name}: the paper's figures", ("", "ours", "the paper's", ""), said)


def _list(folder: Path, scale: float, console: Console) -> None:
    rows = []
    for name, experiment in EXPERIMENTS.items():
        results = Results.load(experiment, folder / f"{name}.json", scale)
        total = len(experiment.conditions) * len(experiment.seeds)
        spent = sum(cell.cpu_s for cell in results.cells)
        left = len(results.missing(experiment.seeds))
        cost = f"{spent / len(results.cells) * left:.0f}" if results.cells else "not known yet"
        rows.append([name, experiment.title, f"{total - left} of {total}", f"{spent:.0f}", cost])
    columns = ("name", "what it repeats", "cells done", "CPU s", "CPU s to go")
    report.show(console, "python -m loadgen experiment NAME", columns, rows)
