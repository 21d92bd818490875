"""What the fleet costs over plain vLLM: time to first token, throughput, and where the CPU time goes."""

from __future__ import annotations

import argparse
import asyncio
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console

from loadgen import arguments, lengths
from loadgen.bench import pinning, servers
from loadgen.client import Prompt, StreamingClient, closed_loop
from loadgen.metrics import paired_ratio, percentile, summarise
from loadgen.report import Stamp, Steps, show

TITLE = "the fleet against a plain vLLM server: TTFT, throughput, CPU time by process (about 9 minutes)"
SEEDS = (0,)

ENGINE: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "block_size": 32,
    "kv_cache_memory_bytes": 512 << 20,
    "gpu_memory_utilization": 0.05,
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "dtype": "bfloat16",
}
START_TIMEOUT_S = 300.0
PROMPT_WORDS = 40
# streams in parallel, requests in all, tokens of each answer
LOADS = ((1, 20, 16), (16, 32, 64), (64, 64, 64))
ROLES = (
    ("engine core", ("EngineCore", "VLLM::Worker")),
    ("ingress", ("Ingress",)),
    ("replica front", ("ServeReplica",)),
    ("proxy", ("ProxyActor",)),
    ("Serve controller", ("ServeController",)),
    ("raylet and gcs", ("raylet/raylet", "gcs_server")),
    ("API server", ("vllm.entrypoints",)),
    ("driver", ("serve run", "bin/serve")),
)
REST = "rest of Ray"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `bench ingress`."""
    parser.add_argument(
        "--model", type=arguments.model_folder, default=None, help="local model folder (default: the default model)"
    )
    parser.add_argument(
        "--rounds", type=arguments.count, default=5, help="rounds, each measures both (default: %(default)s)"
    )


def role(title: str) -> str:
    """What a process is for, by its title."""
    return next((name for name, parts in ROLES if any(part in title for part in parts)), REST)


def prompts(n: int, output_len: int, rng: np.random.Generator) -> list[Prompt]:
    """n chat messages of 40 random words (about 50 tokens), all different."""
    return [Prompt(lengths.words(PROMPT_WORDS, rng), output_len) for _ in range(n)]


def run(args: argparse.Namespace, console: Console) -> Path:
    """Start both servers, measure them in turn (the other one idle), report ratios over the rounds."""
    cores = sorted(psutil.Process().cpu_affinity() or [])
    if len(cores) < 2:
        raise SystemExit("bench ingress needs two cores: one for the engine, one for everything else")
    engine_core, other_core = cores[:2]
    stamp = Stamp("ingress", vars(args), args.seeds)
    model = args.model or servers.default_model()
    with servers.session_folder(console) as folder, Steps(console, 2 + args.rounds * 2 * len(LOADS)) as steps:
        started: list[servers.Server] = []
        try:
            steps.begin("starting vllm")
            started.append(servers.start_plain(model, ENGINE, engine_core, folder))
            started[-1].wait_until_ready("/health", START_TIMEOUT_S)
            steps.done()
            steps.begin("starting tidegate")
            started.append(servers.start_fleet(model, ENGINE, folder))
            started[-1].wait_until_ready("/health", START_TIMEOUT_S)
            steps.done()
            for process in (p for server in started for p in server.processes()):
                pinning.pin(process, engine_core if role(pinning.title(process)) == "engine core" else other_core)
            pinning.pin(psutil.Process(), other_core)
            rounds = asyncio.run(_rounds(started, args, steps))
        finally:
            psutil.Process().cpu_affinity(cores)
            for server in reversed(started):
                server.stop()
    figures = _figures(rounds)
    _print(console, figures, args.rounds)
    loads = [dict(zip(("streams", "requests", "output_len"), load, strict=True)) for load in LOADS]
    return stamp.write({"engine_args": {**ENGINE, "model": model}, "loads": loads, **figures}, args.out)


async def _rounds(started: Sequence[servers.Server], args: argparse.Namespace, steps: Steps) -> list[dict[str, Any]]:
    rng = np.random.default_rng(args.seeds[0])
    results = []
    clients = {s.name: StreamingClient(s.url, servers.MODEL_NAME) for s in started}
    try:
        steps.begin("warming up")
        for server in started:
            failed = [r.error for r in await closed_loop(clients[server.name], prompts(64, 8, rng), 64) if r.error]
            if failed:
                raise RuntimeError(f"{server.name} fails: {failed[0]}\n{server.log_end()}")
        for i in range(args.rounds):
            for server in started if i % 2 == 0 else reversed(started):
                for streams, requests, output_len in LOADS:
                    steps.begin(f"round {i + 1}: {server.name}, {streams} streams")
                    asked = prompts(requests, output_len, rng)
                    figures = await _measure(server, started, clients[server.name], asked, streams)
                    results.append({"round": i, "server": server.name, "streams": streams, **figures})
                    steps.done()
    finally:
        for client in clients.values():
            await client.__aexit__()
    return results


async def _measure(
    server: servers.Server,
    all_servers: Sequence[servers.Server],
    client: StreamingClient,
    asked: Sequence[Prompt],
    streams: int,
) -> dict[str, Any]:
    members = {s.name: s.processes() for s in all_servers}
    titles = {p.pid: role(pinning.title(p)) for p in members[server.name]}
    me = [psutil.Process()]
    before = {name: pinning.cpu_seconds(p) for name, p in members.items()}, sum(pinning.cpu_seconds(me).values())
    records = await closed_loop(client, asked, streams)
    after = {name: pinning.cpu_seconds(p) for name, p in members.items()}, sum(pinning.cpu_seconds(me).values())
    used: dict[str, float] = defaultdict(float)
    for name, seconds in after[0].items():
        for pid, value in seconds.items():
            key = titles[pid] if name == server.name else f"idle {name}"
            used[key] += value - before[0][name].get(pid, value)
    used["load client"] = after[1] - before[1]
    errors = [r.error for r in records if r.error]
    if errors:
        raise RuntimeError(f"{server.name}: {len(errors)} of {len(records)} requests failed, first: {errors[0]}")
    keep = ("output_throughput", "duration", "p50_ttft_ms", "p95_ttft_ms", "p50_tpot_ms", "total_output_tokens")
    summary = summarise(records)
    return {
        **{key: summary[key] for key in keep},
        "ttfts_ms": [r.ttft * 1e3 for r in records] if streams == 1 else [],
        "cpu_seconds": dict(used),
    }


def _figures(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per load: medians over rounds, paired ratios fleet / plain, CPU microseconds per output token by role."""
    loads = {}
    for streams, *_ in LOADS:
        side = {name: [r for r in rounds if r["server"] == name and r["streams"] == streams] for name in _names(rounds)}
        plain, fleet = side["vllm"], side["tidegate"]
        loads[str(streams)] = {
            "ttft_ratio": _ratio(fleet, plain, "p50_ttft_ms"),
            "throughput_ratio": _ratio(fleet, plain, "output_throughput"),
            "added_ttft_ms": _added(fleet, plain),
            **{
                name: {
                    **{
                        key: float(np.median([r[key] for r in runs]))
                        for key in ("p50_ttft_ms", "p95_ttft_ms", "p50_tpot_ms", "output_throughput", "duration")
                    },
                    "cpu_us_per_output_token": _cpu(runs),
                }
                for name, runs in side.items()
            },
        }
    return {"by_streams": loads, "rounds": [{k: v for k, v in r.items() if k != "ttfts_ms"} for r in rounds]}


def _names(rounds: Sequence[dict[str, Any]]) -> list[str]:
    return sorted({r["server"] for r in rounds})


def _ratio(fleet: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    ratio = paired_ratio([r[key] for r in fleet], [r[key] for r in plain])
    return {"mean": ratio.mean, "low": ratio.low, "high": ratio.high, "kind": ratio.kind, "text": str(ratio)}


def _added(fleet: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Difference of the rounds' TTFT medians, ms: median, smallest and largest over the rounds."""
    added = [f["p50_ttft_ms"] - p["p50_ttft_ms"] for f, p in zip(fleet, plain, strict=True)]
    return {"median": percentile(added, 50), "low": min(added), "high": max(added)}


def _cpu(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    tokens = sum(r["total_output_tokens"] for r in runs)
    roles = sorted({name for r in runs for name in r["cpu_seconds"]})
    return {name: sum(r["cpu_seconds"].get(name, 0.0) for r in runs) * 1e6 / tokens for name in roles}


def _print(console: Console, figures: dict[str, Any], rounds: int) -> None:
    rows, cpu_rows = [], []
    for streams, load in figures["by_streams"].items():
        plain, fleet, added = load["vllm"], load["tidegate"], load["added_ttft_ms"]
        more = f"{added['median']:+.1f} ms [{added['low']:+.1f}, {added['high']:+.1f}]"
        rows.append((f"{streams} streams: TTFT p50, ms", plain["p50_ttft_ms"], fleet["p50_ttft_ms"], more))
        rows.append(
            (
                f"{streams} streams: output tokens/s",
                plain["output_throughput"],
                fleet["output_throughput"],
                load["throughput_ratio"]["text"],
            )
        )
        names = sorted({*plain["cpu_us_per_output_token"], *fleet["cpu_us_per_output_token"]})
        for name in names:
            cells = (side["cpu_us_per_output_token"].get(name) for side in (plain, fleet))
            cpu_rows.append((f"{streams} streams: {name}", *("-" if c is None else c for c in cells)))
    kind = next(iter(figures["by_streams"].values()))["throughput_ratio"]["kind"]
    show(console, f"medians over {rounds} rounds", ("", "vLLM", "Tidegate", f"Tidegate against vLLM [{kind}]"), rows)
    show(console, "CPU microseconds per output token", ("", "vLLM", "Tidegate"), cpu_rows)
