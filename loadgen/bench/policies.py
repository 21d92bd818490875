"""Each scheduling policy and FCFS at the same time on two real engines, one on each core, under the same overload."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console

from loadgen import arguments, arrivals, lengths
from loadgen.bench import engine_pair, servers
from loadgen.bench.engine_process import Outcome, Plan
from loadgen.metrics import paired_ratio, summarise
from loadgen.report import Stamp, Steps, rounded, show
from policies.scheduling import SCHEDULING

TITLE = "scheduling policies against FCFS on the real engine: waiting times under overload (about 25 minutes)"
SEEDS = (0, 1, 2)
REFERENCE = "fcfs"

CONTEXT = 2048
ENGINE: dict[str, Any] = {
    "max_model_len": CONTEXT,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "block_size": 32,
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 128 << 20,
    "num_gpu_blocks_override": 129,  # 128 usable blocks, 4096 tokens: memory, not only the batch, is short
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
}
# keys in summarise(), what the tables call them
WAITING = {
    "p50_ttft_ms": "TTFT p50, ms",
    "p95_ttft_ms": "TTFT p95, ms",
    "p50_normalized_ttft_ms": "per prompt token p50, ms",
    "p95_normalized_ttft_ms": "per prompt token p95, ms",
}
RUNNING = {
    "p50_tgt_s": "TGT p50, s",
    "p95_tgt_s": "TGT p95, s",
    "duration": "total time, s",
    "output_throughput": "output tokens/s",
}
MORE = ("completed", "mean_ttft_ms", "total_input_tokens", "total_output_tokens", "p99_queue_time_s")


@dataclass(frozen=True, slots=True)
class Choice:
    """A policy to measure: how the command line names it, and its spec `{"name": ..., **parameters}`."""

    label: str
    spec: dict[str, Any]

    def __str__(self) -> str:
        return self.label


def choice(text: str) -> Choice:
    """`name`, or `name:parameter=value,...`; where the policy wants answer lengths it gets the true ones."""
    return Choice(text, arguments.policy(SCHEDULING, text))


def add_arguments(parser: argparse.ArgumentParser, policies: Sequence[str] = ()) -> None:
    """Options of `bench policies`; `policies` are the default ones (none: all but FCFS)."""
    names = list(policies) or [name for name in SCHEDULING.names() if name != REFERENCE]
    parser.add_argument(
        "--policies",
        type=choice,
        nargs="+",
        default=[choice(name) for name in names],
        metavar="NAME[:PARAMETER=VALUE,...]",
        help=f"policies to compare with {REFERENCE} (default: {' '.join(names)})",
    )
    parser.add_argument(
        "--model", type=arguments.model_folder, default=None, help="local model folder (default: the default model)"
    )
    parser.add_argument("--requests", type=arguments.count, default=36, help="requests per seed (default: %(default)s)")
    parser.add_argument(
        "--rate", type=arguments.positive, default=10.0, help="arrivals, requests/s (default: %(default)s)"
    )
    parser.add_argument("--trace", choices=lengths.names(), default="chat", help="lengths (default: %(default)s)")
    parser.add_argument(
        "--resume", action="store_true", help="keep the pairs that the result file has from a run that was cut"
    )


def plan(seed: int, requests: int, rate: float, trace: str, vocabulary: int = 40_000) -> Plan:
    """The burst of one seed, the same for every policy: Poisson arrivals, trace lengths, random token ids."""
    rng = np.random.default_rng(seed)
    prompts, answers = lengths.table(trace).scaled(requests, CONTEXT, rng)
    due = arrivals.poisson(requests, rate, rng)
    return Plan(
        t0=0.0,
        policy={},
        due=due.tolist(),
        prompts=[rng.integers(100, vocabulary, n).tolist() for n in prompts],
        output_lens=answers.tolist(),
    )


def run(args: argparse.Namespace, console: Console) -> Path:
    """Play every seed under every policy, FCFS beside it (cores swapped from pair to pair), write after each pair."""
    cores = sorted(psutil.Process().cpu_affinity() or [])
    if len(cores) < 2:
        raise SystemExit("this bench needs two cores: each engine must have one of its own")
    stamp = Stamp(args.bench, {**vars(args), "policies": [str(p) for p in args.policies]}, args.seeds)
    conditions = {
        "workload": {"requests": args.requests, "rate": args.rate, "trace": args.trace},
        "engine_args": {**ENGINE, "model": args.model or servers.default_model()},
    }
    pairs = _kept(args.out, conditions) if args.resume else []
    done = {(pair["policy"], pair["seed"]) for pair in pairs}
    todo = [(i + j, seed, policy) for i, seed in enumerate(args.seeds) for j, policy in enumerate(args.policies)]
    todo = [entry for entry in todo if (entry[2].label, entry[1]) not in done]
    with servers.session_folder(console) as folder, Steps(console, len(todo) + 1) as steps:
        steps.begin("starting both engines")
        with engine_pair.started(conditions["engine_args"], cores, folder) as engines:
            steps.done()
            for number, seed, policy in todo:
                steps.begin(f"seed {seed}: {policy} beside {REFERENCE}")
                burst = plan(seed, args.requests, args.rate, args.trace)
                pairs.append(_pair(engines, number % 2 == 0, policy, burst, seed))
                stamp.write({**conditions, "ratios": ratios(pairs), "pairs": pairs}, args.out)
                steps.done()
    _print(console, pairs, conditions["workload"])
    return stamp.write({**conditions, "ratios": ratios(pairs), "pairs": pairs}, args.out)


def _kept(path: Path, conditions: dict[str, Any]) -> list[dict[str, Any]]:
    """Pairs of an earlier result made under the same conditions; SystemExit if they were others."""
    if not path.exists():
        return []
    earlier = json.loads(path.read_text())
    if any(earlier.get(key) != json.loads(json.dumps(rounded(value))) for key, value in conditions.items()):
        raise SystemExit(f"{path} was measured under other conditions: leave --resume out, or give another --out")
    pairs: list[dict[str, Any]] = earlier["pairs"]
    return pairs


def _pair(
    engines: Sequence[engine_pair.Engine], straight: bool, policy: Choice, burst: Plan, seed: int
) -> dict[str, Any]:
    reference, other = engines if straight else reversed(engines)
    load = os.getloadavg()[0]
    outcomes = engine_pair.play([(reference, {"name": REFERENCE}), (other, policy.spec)], burst)
    sides = {"reference": (reference.core, outcomes[0]), "measured": (other.core, outcomes[1])}
    figures = {name: {"core": core, **_figures(outcome)} for name, (core, outcome) in sides.items()}
    return {"policy": policy.label, "spec": policy.spec, "seed": seed, "load_average": load, **figures}


def _figures(outcome: Outcome) -> dict[str, Any]:
    """What is kept of summarise(), and TTFT for the longer and the shorter half of the prompts: who pays, who gains."""
    summary, records = summarise(outcome.records), outcome.records
    middle = float(np.median([r.prompt_len for r in records]))
    halves = {
        "p50_ttft_short_ms": [r.ttft * 1e3 for r in records if r.prompt_len <= middle],
        "p50_ttft_long_ms": [r.ttft * 1e3 for r in records if r.prompt_len > middle],
    }
    return {
        **{key: summary[key] for key in (*WAITING, *RUNNING, *MORE)},
        **{key: float(np.median(values)) for key, values in halves.items() if values},
        "preemptions": outcome.preemptions,
    }


def ratios(pairs: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per policy: each figure over that of FCFS beside it, and preemptions per run, the policy's and FCFS's."""
    found: dict[str, dict[str, Any]] = {}
    for label in dict.fromkeys(pair["policy"] for pair in pairs):
        mine = [pair for pair in pairs if pair["policy"] == label]
        found[label] = {}
        for key in (*WAITING, *RUNNING):
            ratio = paired_ratio([p["measured"][key] for p in mine], [p["reference"][key] for p in mine])
            found[label][key] = {"mean": ratio.mean, "low": ratio.low, "high": ratio.high, "text": str(ratio)}
        found[label] |= {"interval": ratio.kind, "pairs": ratio.pairs}
        for side, name in (("measured", "preemptions"), ("reference", f"{REFERENCE}_preemptions")):
            found[label][name] = float(np.mean([p[side]["preemptions"] for p in mine]))
    return found


def _print(console: Console, pairs: Sequence[dict[str, Any]], workload: dict[str, Any]) -> None:
    found = ratios(pairs)
    kinds = sorted({f"{each['interval']} of {each['pairs']} pairs" for each in found.values()})
    title = (
        f"{workload['requests']} requests at {workload['rate']:g}/s, SW-{workload['trace'].capitalize()} lengths for a "
        f"window of {CONTEXT}: ratio to {REFERENCE} beside it, below 1 is less [{', '.join(kinds)}]"
    )
    for figures in (WAITING, RUNNING):
        itself = [float(np.mean([p["reference"][key] for p in pairs])) for key in figures]
        rows: list[list[object]] = [[f"{REFERENCE} itself", *itself]]
        rows += [[label, *(each[key]["text"] for key in figures)] for label, each in found.items()]
        show(console, title, ("", *figures.values()), rows)
    preempted = [(label, each["preemptions"], each[f"{REFERENCE}_preemptions"]) for label, each in found.items()]
    show(console, "preemptions per run", ("", "policy", f"{REFERENCE} beside it"), preempted)
