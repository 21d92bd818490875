"""`python -m loadgen advise`: the cheapest fleet that keeps its promises under a workload, by the simulator."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from loadgen import arguments
from loadgen.report import RESULTS, Stamp, Steps, show
from loadgen.run.slo import Slos, slo_of, slos
from loadgen.simulator import calibrate
from loadgen.simulator.command import jobs
from loadgen.simulator.hardware import DEVICES, MODELS, check_split, kv_blocks
from loadgen.simulator.step_cost import Roofline, StepCost
from loadgen.workloads import command as workloads
from loadgen.workloads.workload import Workload
from policies.balancing import BALANCING
from policies.scheduling import SCHEDULING
from policies.tiers import MAX_TIERS, decaying_headroom

if TYPE_CHECKING:
    from loadgen.advisor.advise import Advice
    from loadgen.advisor.serve_config import Machine
    from loadgen.advisor.trial import Pair
    from loadgen.simulator.cluster import Fleet, Job

TITLE = "search policies and replica counts in the simulator: the cheapest fleet that keeps the SLOs of a trace"
SCHEDULERS = ("fcfs", "larry", "guarded_larry")
BALANCERS = ("tiered_sal", "sal", "llumnix")
AGING_S = 30.0  # the product's default
CPU_BLOCK = 32  # tokens: what the CPU kernels take
NOTHING = 3  # exit status: no configuration keeps the SLOs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `advise`."""
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="trace or workload file to be served")
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--gpu", choices=DEVICES, help="device (with --fitted alone: this machine's CPU)")
    parser.add_argument("--tp", type=arguments.count, default=1, help="devices of a replica (default: %(default)s)")
    parser.add_argument("--fitted", type=Path, metavar="FILE", help="step times by `loadgen calibrate`, not a roofline")
    parser.add_argument(
        "--slo",
        action="append",
        required=True,
        metavar="[TIER:]ttft=MS,tpot=MS,e2el=MS",
        help="bounds, for all tiers or one; tiers without any are not judged",
    )
    parser.add_argument(
        "--attain", type=arguments.share, default=0.99, help="share of each tier within them (default: %(default)s)"
    )
    parser.add_argument("--max-replicas", type=arguments.count, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--policies",
        type=pair,
        nargs="+",
        metavar="SCHEDULING+BALANCING",
        help=f"each NAME[:PARAMETER=VALUE,...] (default: {', '.join(SCHEDULERS)} with {', '.join(BALANCERS)})",
    )
    parser.add_argument("--price", type=arguments.positive, metavar="P", help="of a GPU hour, in any currency")
    parser.add_argument(
        "--no-migration", action="store_true", help="requests stay on their replica (default: they move)"
    )
    parser.add_argument("--kv-blocks", type=arguments.count, help="default: what the device has room for")
    parser.add_argument("--block-size", type=arguments.count, help="tokens (default: 16, on CPU 32)")
    parser.add_argument("--max-num-seqs", type=arguments.count, default=256, help="default: %(default)s")
    parser.add_argument("--max-num-batched-tokens", type=arguments.count, default=2048, help="default: %(default)s")
    parser.add_argument(
        "--coarse",
        type=arguments.count,
        default=1000,
        metavar="N",
        help="busiest requests in a row, for the first search (default: %(default)s)",
    )
    parser.add_argument("--seeds", type=arguments.count, default=3, help="runs that must hold (default: %(default)s)")
    workloads.add_trace_arguments(parser)
    parser.add_argument(
        "--out", type=arguments.out_folder, default=RESULTS / "advice", metavar="DIR", help="default: %(default)s"
    )


def pair(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both policies of `SCHEDULING+BALANCING`."""
    scheduling, plus, balancing = text.partition("+")
    if not plus:
        raise argparse.ArgumentTypeError(f"{text}: write SCHEDULING+BALANCING, larry+sal say")
    return arguments.policy(SCHEDULING, scheduling), arguments.policy(BALANCING, balancing)


def run(args: argparse.Namespace, console: Console) -> int:
    """Search, print and write the advice; status 1 if the options do not fit, 3 if no configuration is enough."""
    from loadgen.advisor import page, serve_config, words
    from loadgen.advisor.advise import advise, steps
    from loadgen.advisor.trial import Pair

    seeds = range(args.seed, args.seed + args.seeds)
    stamp = Stamp("advise", vars(args), seeds)
    chosen = args.policies or [({"name": s}, {"name": b}) for s in SCHEDULERS for b in BALANCERS]
    pairs = [Pair(*each) for each in chosen]
    try:
        known = slos(args.slo)
        machine, cost, error = _machine(args)
        work, notes = {}, list[str]()
        for seed in seeds:
            workload = workloads.read_from(argparse.Namespace(**{**vars(args), "seed": seed}))
            work[seed], notes = _fitting(workload, machine, known)
        workloads.tell_bad_rows(workload, console)
        with Steps(console, steps(pairs)) as bar:
            advice = advise(
                _fleet(machine, cost, known, max(map(_tiers, work.values()))),
                work,
                known,
                pairs,
                target=args.attain,
                most=args.max_replicas,
                coarse=args.coarse,
                tell=bar.begin,
                step=bar.done,
            )
    except (OSError, ValueError) as problem:
        console.print(f"advise: {escape(str(problem))}")
        return 1
    best = advice.best
    sentences = [
        *words.answer(advice, machine, known, args.price),
        *notes,
        *words.caveats(pairs, best.pair if best else None),
    ]
    trust = words.confidence(machine, args.fitted.name if args.fitted else None, error, advice)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "advice.html").write_text(page.page(advice, pairs, sentences, trust))
    stamp.write(_figures(advice, pairs, workload, sentences, trust), args.out / "advice.json")
    file = args.out / "serve_config.yaml"
    file.unlink(missing_ok=True)
    if best is not None:
        tiers = range(max(map(_tiers, work.values())))
        counts = [sum(job.tier == tier for job in work[args.seed]) for tier in tiers]
        file.write_text(serve_config.written(machine, best.pair, best.replicas, known, counts, "\n".join(sentences)))
    _print(console, advice, pairs)
    for line in (*sentences, *trust):
        console.print(escape(line))
    console.print(f"written: {args.out}: " + ", ".join(sorted(f.name for f in args.out.glob("*.*"))))
    return 0 if best is not None else NOTHING


def _machine(args: argparse.Namespace) -> tuple[Machine, StepCost, float | None]:
    """The replica that is simulated, its step times, and how far off these were on steps unseen (None: not known)."""
    from loadgen.advisor.serve_config import Machine
    from loadgen.simulator.engine import Shape

    model = MODELS[args.model]
    if args.gpu is None and args.fitted is None:
        raise ValueError("gpu: name the device (--gpu), or give step times measured on this machine (--fitted FILE)")
    check_split(model, args.tp)
    block_size = args.block_size or (16 if args.gpu else CPU_BLOCK)
    blocks = args.kv_blocks
    if blocks is None:
        if args.gpu is None:
            raise ValueError("kv_blocks: give the engine's --kv-blocks; this machine's memory does not tell them")
        blocks = kv_blocks(model, DEVICES[args.gpu], args.tp, block_size)
    shape = Shape(
        kv_blocks=blocks,
        max_model_len=min(model.context, blocks * block_size),
        block_size=block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        asynchronous=args.gpu is not None,
    )
    kv_bytes = None if args.kv_blocks is None else blocks * block_size * model.kv_bytes // args.tp
    machine = Machine(args.model, args.gpu, args.tp, shape, kv_bytes, migration=not args.no_migration)
    if args.fitted is None:
        return machine, Roofline(model, DEVICES[args.gpu], args.tp), None
    cost = calibrate.load(args.fitted)
    return machine, cost, json.loads(args.fitted.read_text()).get("unseen_error")


def _fitting(workload: Workload, machine: Machine, known: Slos) -> tuple[list[Job], list[str]]:
    """The jobs that the engine can take, and a line about those that it would refuse; ValueError if nothing is left."""
    longest = machine.shape.longest
    every = jobs(workload)
    taken = [job for job in every if job.prompt_tokens + job.output_tokens <= longest]
    if not taken:
        raise ValueError(f"context: no request fits {longest} tokens; --context scales them, or take another --gpu")
    tiers = {job.tier for job in taken}
    if max(tiers) >= MAX_TIERS:
        raise ValueError(f"tiers: the workload has {max(tiers) + 1}, a fleet {MAX_TIERS} at most")
    if strangers := sorted(tier for tier in known if tier is not None and tier not in tiers):
        raise ValueError(f"slo: no request of the workload is of tier {strangers[0]}; --tiers gives tiers to a trace")
    if all(slo_of(known, tier) is None for tier in tiers):
        raise ValueError(f"slo: none is for a tier of the workload, which has {', '.join(map(str, sorted(tiers)))}")
    left = len(every) - len(taken)
    note = f"{left} of {len(every)} requests are longer than the {longest} tokens that a replica takes: left out."
    return taken, [note] if left else []


def _tiers(work: Sequence[Job]) -> int:
    return max(job.tier for job in work) + 1


def _fleet(machine: Machine, cost: StepCost, known: Slos, tiers: int) -> Fleet:
    from loadgen.simulator.cluster import Fleet
    from loadgen.simulator.transfer import Migration

    bounds = [slo_of(known, tier) for tier in range(tiers)]
    return Fleet(
        MODELS[machine.model],
        machine.shape,
        cost,
        tiers={
            "headroom": list(decaying_headroom(tiers)) if tiers > 1 else [0.0],
            "aging_s": [AGING_S] * tiers,
            "ttft_slo_s": [_seconds(slo.ttft) if slo else None for slo in bounds],
            "tpot_slo_s": [_seconds(slo.tpot) if slo else None for slo in bounds],
        },
        oracle=True,
        migration=Migration() if machine.migration else None,
    )


def _seconds(milliseconds: float) -> float | None:
    return milliseconds / 1e3 if milliseconds < float("inf") else None


def _figures(
    advice: Advice, pairs: Sequence[Pair], workload: Workload, sentences: Sequence[str], trust: Sequence[str]
) -> dict[str, Any]:
    def trial(found: Any) -> dict[str, Any] | None:
        return None if found is None else {**asdict(found), "within": found.worst}

    return {
        "answer": list(sentences),
        "confidence": list(trust),
        "workload": workload.about,
        "best": trial(advice.best),
        "shaky": advice.shaky,
        "nearest": trial(advice.nearest),
        "alone": advice.alone,
        "hopeless": advice.hopeless,
        "pairs": [str(each) for each in pairs],
        "needs": advice.needs,
        "dropped": advice.dropped,
        "slower": advice.slower,
        "attainment": [[str(t.pair), t.replicas, len(t.runs), _known(t.worst)] for t in advice.fine],
        "attainment_coarse": [[str(t.pair), t.replicas, _known(t.worst)] for t in advice.coarse],
    }


def _known(share: float) -> float | None:
    """A share as JSON has it; None: the run was given up."""
    return None if math.isnan(share) else share


def _print(console: Console, advice: Advice, pairs: Sequence[Pair]) -> None:
    from loadgen.advisor import page

    if advice.hopeless:
        return
    rows = [(str(each), page.need(advice, str(each))) for each in pairs]
    show(console, "replicas that each pair of policies needs", ("scheduling + balancing", "replicas"), rows)
    chosen = advice.best or advice.nearest
    if chosen is None:
        return
    tiers = sorted({tier for run in chosen.runs for tier in run.tiers})
    of = {tier: [run.tiers[tier] for run in chosen.runs if tier in run.tiers] for tier in tiers}
    show(
        console,
        f"{chosen.pair} on {chosen.replicas}: worst of {len(chosen.runs)} runs",
        ("", "requests", "within, %", "TTFT p95, s", "TPOT p95, ms", "latency p95, s"),
        [
            (
                f"tier {tier}",
                each[0].judged,
                100 * min(o.within for o in each),
                max(o.p95_ttft for o in each),
                1e3 * max(o.p95_tpot for o in each),
                max(o.p95_e2el for o in each),
            )
            for tier, each in of.items()
        ],
    )
