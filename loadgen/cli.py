"""Command line of loadgen: `python -m loadgen bench [NAME ...]`, `workload`, `run`, `record-lengths`, ..."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.markup import escape

from loadgen import arguments, report
from loadgen.advisor import command as advisor
from loadgen.bench import autoscaling, chaos, client, ingress, larry, migration, policies, rebalance, router, tiers
from loadgen.bench import simulator as simulator_cost
from loadgen.experiments import command as experiments
from loadgen.predictor import command as predictor
from loadgen.run import command as replays
from loadgen.simulator import calibrate, replay, validate
from loadgen.simulator import command as simulator
from loadgen.workloads import command as workloads


class Bench(Protocol):
    """What a module of loadgen.bench offers: its default SEEDS, and run(), which returns the path of its JSON."""

    @property
    def TITLE(self) -> str: ...
    @property
    def SEEDS(self) -> Sequence[int]: ...
    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None: ...
    def run(self, args: argparse.Namespace, console: Console, /) -> Path: ...


BENCHES: dict[str, Bench] = {
    "policies": policies,
    "larry": larry,
    "tiers": tiers,
    "migration": migration,
    "rebalance": rebalance,
    "chaos": chaos,
    "autoscaling": autoscaling,
    "router": router,
    "ingress": ingress,
    "client": client,
    "simulator": simulator_cost,
}


def parser() -> argparse.ArgumentParser:
    """The whole command line; every sub-command sets `call`, a function of (args, console) -> exit status."""
    top = argparse.ArgumentParser(prog="python -m loadgen", description="Load and measurements for Tidegate.")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    bench = commands.add_parser("bench", help="measure; without NAME: list the benches")
    bench.set_defaults(call=_list_benches)
    names = bench.add_subparsers(metavar="NAME")
    for name, module in BENCHES.items():
        one = names.add_parser(name, help=module.TITLE, description=module.TITLE)
        one.add_argument(
            "--seeds",
            type=arguments.seed,
            nargs="+",
            default=list(module.SEEDS),
            metavar="N",
            help="default: %(default)s",
        )
        one.add_argument(
            "--out", type=arguments.out_file, default=report.RESULTS / f"{name}.json", help="default: %(default)s"
        )
        module.add_arguments(one)
        one.set_defaults(call=_run_bench, bench=name)
    workload = commands.add_parser("workload", help=workloads.TITLE, description=workloads.TITLE)
    workloads.add_arguments(workload)
    workload.set_defaults(call=workloads.run)
    load = commands.add_parser("run", help=replays.TITLE, description=replays.TITLE)
    replays.add_arguments(load)
    load.set_defaults(call=replays.run)
    pages = commands.add_parser("report", help=replays.REPORT_TITLE, description=replays.REPORT_TITLE)
    replays.add_report_arguments(pages)
    pages.set_defaults(call=replays.run_report)
    fleet = commands.add_parser("simulate", help=simulator.TITLE, description=simulator.TITLE)
    simulator.add_arguments(fleet)
    fleet.set_defaults(call=simulator.run)
    repeated = commands.add_parser("experiment", help=experiments.TITLE, description=experiments.TITLE)
    experiments.add_arguments(repeated)
    repeated.set_defaults(call=experiments.run)
    advice = commands.add_parser("advise", help=advisor.TITLE, description=advisor.TITLE)
    advisor.add_arguments(advice)
    advice.set_defaults(call=advisor.run)
    steps = commands.add_parser("calibrate", help=calibrate.TITLE, description=calibrate.TITLE)
    calibrate.add_arguments(steps)
    steps.set_defaults(call=calibrate.run)
    validation = commands.add_parser("validate", help=validate.TITLE, description=validate.TITLE)
    validate.add_arguments(validation)
    validation.set_defaults(call=validate.run)
    again = commands.add_parser("replay", help=replay.TITLE, description=replay.TITLE)
    replay.add_arguments(again)
    again.set_defaults(call=replay.run)
    record = commands.add_parser("record-lengths", help=predictor.RECORD, description=predictor.RECORD)
    predictor.add_record_arguments(record)
    record.set_defaults(call=predictor.run_record)
    train = commands.add_parser("train-predictor", help=predictor.TRAIN, description=predictor.TRAIN)
    predictor.add_train_arguments(train)
    train.set_defaults(call=predictor.run_train)
    return top


def _list_benches(_: argparse.Namespace, console: Console) -> int:
    report.show(console, "python -m loadgen bench NAME", ("name", "what it measures"), _titles())
    return 0


def _titles() -> list[tuple[str, str]]:
    return [(name, module.TITLE) for name, module in BENCHES.items()]


def _run_bench(args: argparse.Namespace, console: Console) -> int:
    # TERM must unwind like ctrl-C does, or the servers that a bench started would stay behind.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        path = BENCHES[args.bench].run(args, console)
    finally:
        signal.signal(signal.SIGTERM, before)
    console.print(f"written: {path}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, 130 if it was interrupted."""
    args = parser().parse_args(argv)
    call = vars(args).pop("call")
    console = Console()
    try:
        status: int = call(args, console)
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    except OSError as error:  # of a result that cannot be written, above all
        console.print(f"[red]{escape(str(error))}[/red]")
        return 1
    return status
