"""`python -m loadgen workload create | read | describe`: workload files."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from loadgen import arguments, tiers
from loadgen.report import rounded, show
from loadgen.workloads import readers
from loadgen.workloads.arrival_models import ARRIVALS, arrival_model
from loadgen.workloads.json_traces import estimated
from loadgen.workloads.length_models import LENGTHS
from loadgen.workloads.make import cancelling, make, tiered, with_deadline
from loadgen.workloads.specs import usage
from loadgen.workloads.workload import Workload, describe

TITLE = "create, read and describe workloads: files of requests with their times, lengths and tiers"
COARSE = 0.3  # share of requests due at the same time as the one before, above which a hint is printed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sub-commands of `workload`."""
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    new = commands.add_parser("create", help="from models of lengths, arrivals and tiers")
    add_model_arguments(new)
    _add_common(new)
    new.set_defaults(workload=make_from)
    trace = commands.add_parser("read", help="from a trace: Azure, BurstGPT, Mooncake, ShareGPT, evalscope")
    trace.add_argument("trace", type=Path, help="file of the trace")
    add_trace_arguments(trace)
    _add_common(trace)
    trace.set_defaults(workload=read_from)
    look = commands.add_parser("describe", help="what is in a workload or trace file")
    look.add_argument("trace", type=Path, help="file")
    add_trace_arguments(look)
    look.set_defaults(workload=read_from, out=None)


def add_model_arguments(parser: argparse.ArgumentParser, requests: int = 200, arrivals: str = "poisson:rate=1") -> None:
    """Options that make a workload from models, and how many requests and which arrivals if none are named."""
    made = {"requests": requests, "lengths": "chat", "arrivals": arrivals}
    parser.set_defaults(made=made)
    parser.add_argument("--requests", type=arguments.count, help=f"default: {requests}")
    parser.add_argument("--lengths", metavar="MODEL", help=f"{models(LENGTHS)}; default: {made['lengths']}")
    parser.add_argument(
        "--arrivals", metavar="MODEL", help=f"{models(ARRIVALS)} | trace:FILE[,rate=N]; default: {arrivals}"
    )
    add_change_arguments(parser)


def settle(args: argparse.Namespace, file: Path | None) -> None:
    """Fill in what `add_model_arguments` lets open; ValueError for an option that has no meaning beside a file."""
    for name, default in vars(args).pop("made").items():
        if getattr(args, name) is None:
            setattr(args, name, None if file is not None else default)
        elif file is not None:
            remedy = "leave it out, or change the file with `python -m loadgen workload read`"
            raise ValueError(f"{name}: --{name} is for requests that models make, {file} has its own: {remedy}")


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Options for a trace."""
    parser.add_argument("--format", choices=(*readers.FORMATS, readers.OURS), help="default: by content")
    parser.add_argument(
        "--skip-bad",
        type=arguments.share,
        default=readers.ALLOWED,
        metavar="SHARE",
        help="share of rows that may be bad: they are reported and left out (default: %(default)s)",
    )
    parser.add_argument("--tokenizer", type=Path, metavar="tokenizer.json", help="counts tokens of ShareGPT's texts")
    parser.add_argument("--first", type=arguments.count, metavar="N", help="only the first N requests")
    parser.add_argument("--jitter", type=arguments.positive, metavar="S", help="spread coarse stamps over S seconds")
    time = parser.add_mutually_exclusive_group()
    time.add_argument("--speed", type=arguments.positive, help="compress time by this factor")
    time.add_argument("--rate", type=arguments.positive, help="compress time to this mean rate, requests/s")
    time.add_argument("--arrivals", metavar="MODEL", help="forget the times: " + models(ARRIVALS))
    add_change_arguments(parser)


def add_change_arguments(parser: argparse.ArgumentParser) -> None:
    """Options for both."""
    parser.add_argument("--context", type=arguments.count, metavar="TOKENS", help="scale lengths to this window")
    parser.add_argument(
        "--tiers", metavar="MIX", help=f"{', '.join(tiers.MIXES)}, or weights like 1,2,3 (default: none)"
    )
    parser.add_argument(
        "--tier-count", type=arguments.count, default=4, help="tiers of a named mix (default: %(default)s)"
    )
    parser.add_argument("--deadline", type=arguments.positive, metavar="S", help="clients give up S seconds after due")
    parser.add_argument("--cancel-rate", type=arguments.share, default=0.0, help="share of clients that leave early")
    parser.add_argument(
        "--cancel-delay", type=arguments.positive, default=1.0, help="mean seconds until they do (default: %(default)s)"
    )
    parser.add_argument("--seed", type=arguments.seed, default=0, help="default: %(default)s")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=arguments.out_file, required=True, metavar="FILE.jsonl")


def models(known: dict[str, type[Any]]) -> str:
    """The models of an option, as they are written; % doubled for argparse."""
    return " | ".join(usage(name, model) for name, model in known.items()).replace("%", "%%")


def make_from(args: argparse.Namespace) -> Workload:
    """The workload that the options ask for."""
    return changed(
        make(args.requests, lengths_model=args.lengths, arrivals=args.arrivals, context=args.context, seed=args.seed),
        args,
    )


def read_from(args: argparse.Namespace) -> Workload:
    """The workload of a trace, as the options change it."""
    count = estimated if args.tokenizer is None else readers.token_counter(args.tokenizer)
    workload = readers.read(args.trace, args.format, allowed=args.skip_bad, count=count)
    if args.first is not None:
        workload = workload.first(args.first)
    rng = np.random.default_rng([args.seed, len("trace")])
    if args.jitter is not None:
        workload = readers.jittered(workload, args.jitter, rng)
    if args.speed is not None:
        workload = readers.faster(workload, args.speed)
    if args.rate is not None:
        workload = readers.at_rate(workload, args.rate)
    if args.arrivals is not None:
        times = arrival_model(args.arrivals).times(len(workload.requests), rng)
        workload = workload.retimed(times, {"arrivals": args.arrivals, "seed": args.seed})
    if args.context is not None:
        workload = workload.scaled(args.context)
    return changed(workload, args)


def file_of(args: argparse.Namespace) -> Workload:
    """The workload of the file `args.workload`, with the window, tiers, cancellations and deadlines asked for."""
    workload = readers.read(args.workload)
    if not workload.requests:
        raise ValueError(f"workload: {args.workload} has no request")
    if args.context is not None:
        workload = workload.scaled(args.context)
    return changed(workload, args)


def changed(workload: Workload, args: argparse.Namespace) -> Workload:
    """The workload with the tiers, cancellations and deadlines that the options ask for."""
    if args.tiers is not None:
        count = args.tiers.count(",") + 1 if args.tiers not in tiers.MIXES else args.tier_count
        workload = tiered(workload, args.tiers, count, args.seed)
    if args.cancel_rate:
        workload = cancelling(workload, args.cancel_rate, args.cancel_delay, args.seed)
    if args.deadline is not None:
        workload = with_deadline(workload, args.deadline)
    return workload


def run(args: argparse.Namespace, console: Console) -> int:
    """Make or read the workload, write it if a file is named, print what is in it; status 1 if it cannot be had."""
    try:
        if "made" in args:
            settle(args, None)
        workload: Workload = args.workload(args)
        if args.out is not None:
            workload.save(args.out)
    except (OSError, ValueError) as error:
        console.print(f"workload: {escape(str(error))}")
        return 1
    tell_bad_rows(workload, console)
    show(console, "workload", ("", ""), _rows(describe(workload)))
    dues = [r.due for r in workload.requests]
    equal = sum(a == b for a, b in itertools.pairwise(dues))
    if len(dues) > 1 and equal > COARSE * len(dues):
        console.print(
            f"{equal} of {len(dues)} requests are due at the same time as the one before: "
            "the trace's stamps are coarse; --jitter spreads them, --arrivals replaces them"
        )
    if args.out is not None:
        console.print(f"written: {args.out}")
    return 0


def tell_bad_rows(workload: Workload, console: Console) -> None:
    """Say which rows of the trace were left out."""
    found = workload.about.get("read", {})
    if found.get("bad_rows"):
        console.print(f"{found['bad_rows']} of {found['rows']} rows were left out:")
        for row in found["bad"]:
            console.print(f"  {escape(row)}")


def _rows(found: dict[str, Any], under: str = "") -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    for key, value in found.items():
        name = f"{under}{key}"
        if isinstance(value, dict):
            rows += _rows(value, f"{name}.")
        elif value is not None:
            rows.append((name, rounded(float(value), 4) if isinstance(value, float) else value))
    return rows
