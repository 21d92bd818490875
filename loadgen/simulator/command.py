"""`python -m loadgen simulate`: a fleet that need not exist, under a workload, in seconds."""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.markup import escape

from loadgen import arguments
from loadgen.metrics import RequestRecord, summarise
from loadgen.report import RESULTS, Stamp, Steps, show
from loadgen.simulator import calibrate, options
from loadgen.simulator.hardware import DEVICES, GIB, MODELS, check_split, kv_blocks
from loadgen.simulator.step_cost import Roofline, StepCost
from loadgen.workloads import command as workloads
from policies.balancing import BALANCING
from policies.scheduling import SCHEDULING
from policies.tiers import MAX_TIERS, decaying_headroom

if TYPE_CHECKING:
    from loadgen.simulator.cluster import Fleet, Job, Outcome
    from loadgen.simulator.engine import Shape
    from loadgen.workloads.workload import Workload

TITLE = "simulate a fleet: real schedulers and policies, made-up time; waiting times by tier"
# keys in summarise(), what the table calls them, unit of the table over that of the key
COLUMNS = (
    ("p50_ttft_ms", "TTFT p50", 1e-3),
    ("p95_ttft_ms", "p95", 1e-3),
    ("p99_ttft_ms", "p99", 1e-3),
    ("p50_tpot_ms", "TPOT p50", 1),
    ("p95_tpot_ms", "p95", 1),
    ("p95_e2el_ms", "latency p95", 1e-3),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `simulate`."""
    engine = parser.add_argument_group("engine")
    engine.add_argument("--model", choices=MODELS, default="llama-3-8b", help="default: %(default)s")
    engine.add_argument("--device", choices=DEVICES, default="a100-40g", help="default: %(default)s")
    engine.add_argument("--tp", type=arguments.count, default=1, help="devices of a replica (default: %(default)s)")
    engine.add_argument(
        "--fitted", type=Path, metavar="FILE", help="step times by `loadgen calibrate`, instead of a device's"
    )
    engine.add_argument("--kv-blocks", type=arguments.count, help="default: what the device has room for")
    engine.add_argument("--block-size", type=arguments.count, default=16, help="tokens (default: %(default)s)")
    engine.add_argument("--max-num-seqs", type=arguments.count, default=256, help="default: %(default)s")
    engine.add_argument("--max-num-batched-tokens", type=arguments.count, default=2048, help="default: %(default)s")
    engine.add_argument(
        "--prefix-caching",
        action="store_true",
        help="keep KV blocks for later prompts that begin alike: agents, traces with hash ids (default: off)",
    )
    engine.add_argument("--sync", action="store_true", help="schedule a step when the one before has ended, as on CPU")
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument("--replicas", type=arguments.count, default=4, help="default: %(default)s")
    policy = "NAME[:PARAMETER=VALUE,...]"
    fleet.add_argument(
        "--scheduling",
        type=partial(arguments.policy, SCHEDULING),
        default={"name": "fcfs"},
        metavar=policy,
        help=f"{', '.join(SCHEDULING.names())} (default: fcfs)",
    )
    fleet.add_argument(
        "--balancing",
        type=partial(arguments.policy, BALANCING),
        default={"name": "sal"},
        metavar=policy,
        help=f"{', '.join(BALANCING.names())} (default: sal)",
    )
    fleet.add_argument("--routers", type=arguments.count, default=1, help="default: %(default)s")
    fleet.add_argument(
        "--report-hz", type=arguments.positive, metavar="HZ", help="reports of a replica (default: after each step)"
    )
    fleet.add_argument("--max-queued", type=arguments.count, help="requests without a token at a router (default: any)")
    fleet.add_argument(
        "--aging-s", type=arguments.positive, default=30.0, help="wait that lifts by a tier (default: 30)"
    )
    fleet.add_argument(
        "--kill",
        type=options.span,
        nargs="+",
        default=[],
        metavar="REPLICA@SECOND[+SECONDS]",
        help="replica 1 dies at second 30 and serves again 25 s later: 1@30+25",
    )
    options.add_arguments(parser)
    work = parser.add_argument_group("workload")
    work.add_argument("--workload", type=Path, metavar="FILE", help="workload or trace file, instead of a made one")
    workloads.add_model_arguments(parser, requests=1000, arrivals="poisson:rate=20")
    parser.add_argument(
        "--repeat", type=arguments.count, default=1, metavar="N", help="runs, with seeds from --seed on"
    )
    parser.add_argument("--plain", action="store_true", help="without short cuts: the same result, five times slower")
    parser.add_argument(
        "--out", type=arguments.out_file, default=RESULTS / "simulate.json", help="default: %(default)s"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Simulate, print a table by tier, write the figures; status 1 and a message if something does not fit."""
    seeds = range(args.seed, args.seed + args.repeat)
    try:
        workloads.settle(args, args.workload)
        stamp = Stamp("simulate", vars(args), seeds)
        runs = _runs(args, seeds, console)
    except (OSError, ValueError) as problem:
        console.print(f"[red]{escape(str(problem))}[/red]")
        return 1
    _print(console, runs, args)
    console.print(f"written: {stamp.write({'runs': runs}, args.out)}")
    return 0


def _runs(args: argparse.Namespace, seeds: Sequence[int], console: Console) -> list[dict[str, Any]]:
    from loadgen.simulator.cluster import Cluster  # imports vLLM

    runs = []
    with Steps(console, len(seeds)) as steps:
        for seed in seeds:
            steps.begin(f"seed {seed}")
            shape = _shape(args)
            workload = _workload(args, seed, shape.longest)
            work = jobs(workload)
            fleet = _fleet(args, shape, 1 + max(job.tier for job in work), seed, workload.block_tokens)
            began = time.process_time()
            outcome = Cluster(fleet, fast=not args.plain, coast=not args.plain).run(work)
            took = time.process_time() - began
            runs.append({"seed": seed, "workload": workload.about, "cpu_s": took, **figures(work, outcome)})
            steps.done()
    return runs


def _shape(args: argparse.Namespace) -> Shape:
    from loadgen.simulator.engine import Shape

    check_split(MODELS[args.model], args.tp)
    blocks = args.kv_blocks
    if blocks is None:
        if args.fitted is not None:
            raise ValueError("kv_blocks: give the engine's --kv-blocks with --fitted")
        blocks = kv_blocks(MODELS[args.model], DEVICES[args.device], args.tp, args.block_size)
    return Shape(
        kv_blocks=blocks,
        max_model_len=MODELS[args.model].context,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        asynchronous=not args.sync,
        prefix_caching=args.prefix_caching,
    )


def _fleet(args: argparse.Namespace, shape: Shape, tiers: int, seed: int, block_tokens: int) -> Fleet:
    from loadgen.simulator.cluster import Fleet, Outage

    if tiers > MAX_TIERS:
        raise ValueError(f"tiers: the workload has {tiers}, a fleet {MAX_TIERS} at most")
    cost: StepCost
    if args.fitted is None:
        cost = Roofline(MODELS[args.model], DEVICES[args.device], args.tp)
    else:
        cost = calibrate.load(args.fitted)
    return Fleet(
        MODELS[args.model],
        shape,
        cost,
        replicas=args.replicas,
        scheduling=args.scheduling,
        balancing=args.balancing,
        tiers={"headroom": list(decaying_headroom(tiers)), "aging_s": [args.aging_s] * tiers} if tiers > 1 else None,
        routers=args.routers,
        report_s=1 / args.report_hz if args.report_hz else 0.0,
        bounds=(args.max_queued, (None,) * tiers) if args.max_queued else None,
        outages=tuple(Outage(*outage) for outage in args.kill),
        oracle=True,
        seed=seed,
        block_tokens=block_tokens,
        **options.changes(args),
    )


def _workload(args: argparse.Namespace, seed: int, longest: int) -> Workload:
    """The workload of a seed, for requests of at most so many tokens."""
    if args.workload is not None:
        workload = workloads.file_of(argparse.Namespace(**{**vars(args), "seed": seed}))
        return workload.scaled(longest) if workload.context > longest else workload
    context = longest if args.context is None else min(args.context, longest)
    return workloads.make_from(argparse.Namespace(**{**vars(args), "seed": seed, "context": context}))


def jobs(workload: Workload) -> list[Job]:
    """The workload's requests for a cluster; ValueError for one without a length of its answer.

    Where the workload names no sessions, prompts that begin alike beyond what all have in common are of one session.
    """
    from loadgen.simulator.cluster import Job

    found = []
    common = _common([request.blocks for request in workload.requests])
    for number, request in enumerate(workload.requests):
        if not request.output_tokens:
            raise ValueError(f"request {number} leaves the length of its answer to the server: give it output_tokens")
        patience, left = request.deadline, "unfinished"
        if request.cancel_after is not None and (patience is None or request.cancel_after < patience):
            patience, left = request.cancel_after, "cancelled"
        if request.session is not None:
            session: int | None = zlib.crc32(request.session.encode())
        else:
            session = request.blocks[common] if len(request.blocks) > common else None
        found.append(
            Job(
                request.due,
                max(1, request.prompt_tokens),
                request.output_tokens,
                request.tier or 0,
                session,
                patience,
                left,
                blocks=request.blocks,
            )
        )
    if not found:
        raise ValueError("the workload has no requests")
    return found


def _common(contents: Sequence[tuple[int, ...]]) -> int:
    """How many blocks all prompts begin with."""
    first, last = min(contents, default=()), max(contents, default=())
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


def figures(work: Sequence[Job], outcome: Outcome) -> dict[str, Any]:
    """What is kept of a run: summarise() of all and of each tier, and what the replicas did."""
    records, tiers = outcome.records, sorted({job.tier for job in work})
    by_tier = {t: [record for record, job in zip(records, work, strict=True) if job.tier == t] for t in tiers}
    return {
        "simulated_s": outcome.duration,
        "total": _summary(records),
        "tiers": {str(tier): _summary(of) for tier, of in by_tier.items()},
        "steps": outcome.steps,
        "preemptions": outcome.preemptions,
        "busy": [busy / outcome.duration for busy in outcome.busy_s],
        "requests": [outcome.replica.count(i) for i in range(len(outcome.steps))],
        "prefix": {
            "queried_tokens": (queried := sum(outcome.prefix_queries)),
            "hit_tokens": sum(outcome.prefix_hits),
            "hit_rate": sum(outcome.prefix_hits) / queried if queried else None,
        },
        "replica_s": outcome.replica_s,
        "moves": outcome.moves,
        "moved_gib": outcome.moved_bytes / GIB,
        "pauses_s": dict(zip(("p50", "p99", "max"), _quantiles(outcome.pauses), strict=True)),
        "scaling": [[step.at, step.target, step.running, step.reason] for step in outcome.scaling],
    }


def _quantiles(pauses: Sequence[float]) -> list[float | None]:
    return [float(x) for x in np.quantile(pauses, (0.5, 0.99, 1.0))] if pauses else [None] * 3


def _summary(records: Sequence[RequestRecord]) -> dict[str, Any]:
    counts: dict[str, int] = {}
    for record in records:
        counts[record.outcome] = counts.get(record.outcome, 0) + 1
    return {"outcomes": counts, **summarise(records)}


def _print(console: Console, runs: Sequence[dict[str, Any]], args: argparse.Namespace) -> None:
    def row(name: str, summaries: Sequence[dict[str, Any]]) -> list[object]:
        asked = sum(sum(summary["outcomes"].values()) for summary in summaries)
        good = sum(summary["outcomes"].get("ok", 0) for summary in summaries)
        means = [sum(s[key] for s in summaries) / len(summaries) * unit for key, _, unit in COLUMNS]
        return [name, asked, asked - good, *means]

    where = args.fitted.name if args.fitted else f"{args.tp} x {args.device}"
    policies = f"{args.scheduling['name']} + {args.balancing['name']}"
    many = f" (means of {len(runs)} runs)" if len(runs) > 1 else ""
    title = f"{args.replicas} replicas of {args.model} on {where}, {policies}{many}: seconds, TPOT in ms"
    tiers = sorted({tier for one in runs for tier in one["tiers"]}, key=int)
    rows = [row("all", [one["total"] for one in runs])]
    if len(tiers) > 1:
        rows += [row(f"tier {t}", [one["tiers"][t] for one in runs if t in one["tiers"]]) for t in tiers]
    show(console, title, ("", "sent", "not ok", *(name for _, name, _ in COLUMNS)), rows)
    for one in runs:
        busy = " ".join(f"{share:.0%}" for share in one["busy"][:16])
        console.print(
            f"seed {one['seed']}: {one['total']['output_throughput']:.0f} output tokens/s, replicas busy {busy}, "
            f"{sum(one['preemptions'])} preemptions; {one['simulated_s']:.0f} s simulated in {one['cpu_s']:.1f} CPU s"
        )
        if one["prefix"]["hit_rate"] is not None:
            console.print(
                f"  prefix cache: {one['prefix']['hit_rate']:.1%} of {one['prefix']['queried_tokens']} prompt tokens"
            )
        if one["moves"]:
            told = ", ".join(
                f"{reason} {' '.join(f'{ended} {count}' for ended, count in sorted(outcomes.items()))}"
                for reason, outcomes in sorted(one["moves"].items())
            )
            longest = one["pauses_s"]["max"]
            pause = f"; pauses p50 {one['pauses_s']['p50']:.3f}, longest {longest:.3f} s" if longest else ""
            console.print(f"  moves: {told}; {one['moved_gib']:.2f} GiB of KV{pause}")
        if one["scaling"]:
            most = max(step[1] for step in one["scaling"])
            console.print(
                f"  autoscaling: {len(one['scaling']) - 1} changes, {most} replicas at most, "
                f"{one['replica_s'] / 3600:.2f} replica-hours"
            )
