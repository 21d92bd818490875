"""FCFS and LARRY at the same time on two real engines, one on each core, under the same overload."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console

from loadgen import arguments, arrivals, lengths
from loadgen.bench import pinning, servers
from loadgen.bench.larry_engine import EngineSpec, Outcome, Plan, engine_process
from loadgen.metrics import RequestRecord, paired_ratio, summarise
from loadgen.report import Stamp, Steps, show

TITLE = "LARRY against FCFS on the real engine: waiting times under overload (about 5 minutes)"
SEEDS = (0, 1, 2, 3)

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
START_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 300.0
# key in summarise(), what the table calls it
FIGURES = {
    "p50_ttft_ms": "TTFT p50, ms",
    "p95_ttft_ms": "TTFT p95, ms",
    "mean_ttft_ms": "TTFT mean, ms",
    "p50_normalized_ttft_ms": "normalised TTFT p50, ms per prompt token",
    "p95_normalized_ttft_ms": "normalised TTFT p95, ms per prompt token",
    "p50_tgt_s": "TGT p50, s",
    "p95_tgt_s": "TGT p95, s",
    "duration": "total time, s",
    "output_throughput": "output tokens/s",
    "preemptions": "preemptions",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `bench larry`."""
    parser.add_argument("--model", default=None, help="local model folder (default: the default model)")
    parser.add_argument("--requests", type=arguments.count, default=90, help="requests per seed (default: %(default)s)")
    parser.add_argument(
        "--rate", type=arguments.positive, default=10.0, help="arrivals, requests/s (default: %(default)s)"
    )
    parser.add_argument(
        "--alpha", type=arguments.positive, default=1.0, help="LARRY's weight of waiting (default: %(default)s)"
    )
    parser.add_argument("--trace", choices=lengths.names(), default="chat", help="lengths (default: %(default)s)")


@dataclass(slots=True)
class _Engine:
    name: str
    process: SpawnProcess
    pipe: Connection
    log: str

    def receive(self, timeout_s: float) -> Any:
        """Next message of the child; RuntimeError with the child's own words if it failed or is silent."""
        deadline = time.monotonic() + timeout_s
        while not self.pipe.poll(0.5):
            if not self.process.is_alive() and not self.pipe.poll(0):
                raise RuntimeError(f"the {self.name} engine ended with code {self.process.exitcode}; log: {self.log}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the {self.name} engine said nothing for {timeout_s:.0f} s; log: {self.log}")
        message = self.pipe.recv()
        if isinstance(message, str) and message != "ready":
            raise RuntimeError(f"the {self.name} engine failed; log: {self.log}\n{message}")
        return message


def plan(seed: int, requests: int, rate: float, trace: str, vocabulary: int = 40_000) -> Plan:
    """The burst of one seed, the same for every policy: Poisson arrivals, trace lengths, random token ids."""
    rng = np.random.default_rng(seed)
    prompts, answers = lengths.table(trace).scaled(requests, CONTEXT, rng)
    due = arrivals.poisson(requests, rate, rng)
    return Plan(
        t0=0.0,
        due=due.tolist(),
        prompts=[rng.integers(100, vocabulary, n).tolist() for n in prompts],
        output_lens=answers.tolist(),
    )


def run(args: argparse.Namespace, console: Console) -> Path:
    """Start both engines, play every seed on both at once (cores swapped from seed to seed), report."""
    cores = sorted(psutil.Process().cpu_affinity() or [])
    if len(cores) < 2:
        raise SystemExit("bench larry needs two cores: each engine must have one of its own")
    stamp = Stamp("larry", vars(args), args.seeds)
    policies = {"fcfs": {"name": "fcfs"}, "larry": {"name": "larry", "alpha": args.alpha}}
    engine_args = {**ENGINE, "model": args.model or default_model()}
    rounds: list[dict[str, Any]] = []
    with (
        servers.session_folder(console) as folder,
        Steps(console, len(args.seeds) + 1) as steps,
    ):
        engines = {
            name: _start(name, EngineSpec(policy, engine_args, core, str(folder / f"{name}.log")))
            for (name, policy), core in zip(policies.items(), cores, strict=False)
        }
        try:
            steps.begin("starting both engines")
            for engine in engines.values():
                engine.receive(START_TIMEOUT_S)
            steps.done()
            for i, seed in enumerate(args.seeds):
                steps.begin(f"seed {seed}, both policies at once")
                order = cores[:2] if i % 2 == 0 else cores[1::-1]
                rounds.append(_play(engines, order, plan(seed, args.requests, args.rate, args.trace), seed))
                steps.done()
            for engine in engines.values():
                engine.pipe.send(None)
                engine.process.join(20)
        finally:
            for engine in engines.values():
                if engine.process.pid:
                    pinning.stop(engine.process.pid, grace_s=5)
    ratios = {key: _ratio(rounds, key) for key in FIGURES if key != "preemptions"}
    _print(console, rounds, ratios, args)
    return stamp.write({"engine_args": engine_args, "rounds": rounds, "fcfs_over_larry": ratios}, args.out)


def default_model() -> str:
    """Folder of the default model; SystemExit saying how to get it if it is not there."""
    folder = Path.home() / ".cache" / "tidegate" / "models" / "smollm2-135m-instruct"
    if not (folder / "config.json").exists():
        raise SystemExit(f"no model at {folder}: run `make setup` once, or give --model FOLDER")
    return str(folder)


def _start(name: str, spec: EngineSpec) -> _Engine:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=engine_process, args=(spec, there), name=f"bench-{name}")
    process.start()
    there.close()
    return _Engine(name, process, here, spec.log)


def _play(engines: dict[str, _Engine], cores: list[int], burst: Plan, seed: int) -> dict[str, Any]:
    for engine, core in zip(engines.values(), cores, strict=True):
        assert engine.process.pid
        for process in pinning.family(engine.process.pid):
            pinning.pin(process, core)
    start = Plan(time.time() + 1.0, burst.due, burst.prompts, burst.output_lens)
    for engine in engines.values():
        engine.pipe.send(start)
    result: dict[str, Any] = {"seed": seed}
    for (name, engine), core in zip(engines.items(), cores, strict=True):
        outcome: Outcome = engine.receive(RUN_TIMEOUT_S)
        result[name] = {"core": core, "preemptions": outcome.preemptions, **_figures(outcome.records)}
    return result


def _figures(records: list[RequestRecord]) -> dict[str, Any]:
    """summarise(), and the same TTFT for the longer and the shorter half of the prompts: who pays, who gains."""
    middle = float(np.median([r.prompt_len for r in records]))
    halves = {
        "p50_ttft_short_ms": [r.ttft * 1e3 for r in records if r.prompt_len <= middle],
        "p50_ttft_long_ms": [r.ttft * 1e3 for r in records if r.prompt_len > middle],
    }
    return {**summarise(records), **{k: float(np.median(v)) for k, v in halves.items() if v}}


def _ratio(rounds: list[dict[str, Any]], key: str) -> dict[str, Any]:
    ratio = paired_ratio([r["fcfs"][key] for r in rounds], [r["larry"][key] for r in rounds])
    return {"mean": ratio.mean, "low": ratio.low, "high": ratio.high, "kind": ratio.kind, "text": str(ratio)}


def _print(console: Console, rounds: list[dict[str, Any]], ratios: dict[str, Any], args: argparse.Namespace) -> None:
    rows = []
    for key, label in FIGURES.items():
        fcfs, larry = (float(np.mean([r[name][key] for r in rounds])) for name in ("fcfs", "larry"))
        rows.append((label, fcfs, larry, ratios[key]["text"] if key in ratios else "-"))
    kind = next(iter(ratios.values()))["kind"]
    show(
        console,
        f"{args.requests} requests at {args.rate:g}/s, SW-{args.trace.capitalize()} lengths for a window of {CONTEXT}, "
        f"{len(rounds)} seeds; means over seeds",
        ("", "FCFS", f"LARRY alpha={args.alpha:g}", f"FCFS / LARRY [{kind}]"),
        rows,
    )
