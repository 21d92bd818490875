"""What the load client costs: streams per second of its CPU time, against a server that costs next to nothing."""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from rich.console import Console

from loadgen import arguments, arrivals
from loadgen.client import Prompt, StreamingClient
from loadgen.metrics import percentile
from loadgen.report import ROOT, Stamp, Steps, show
from loadgen.run.drive import Watch, drive
from loadgen.workloads.workload import Request

TITLE = "the load client alone: streams that one core can send and read, and how well it keeps its times (a minute)"
SEEDS = (0,)
GOAL = 500.0  # streams per second of CPU time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `bench client`."""
    parser.add_argument("--tokens", type=arguments.count, default=50, help="of each answer (default: %(default)s)")
    parser.add_argument(
        "--rates",
        type=arguments.positive,
        nargs="+",
        default=[50.0, 200.0, 500.0],
        help="streams/s (default: 50 200 500)",
    )
    parser.add_argument(
        "--seconds", type=arguments.positive, default=5.0, help="arrivals at each rate, s (default: %(default)s)"
    )


def run(args: argparse.Namespace, console: Console) -> Path:
    """Measure each rate and seed; the figures say whether one core is enough for the goal."""
    stamp = Stamp("client", vars(args), args.seeds)
    rows = []
    with token_server(args.tokens) as url, Steps(console, len(args.rates) * len(args.seeds)) as steps:
        for rate in args.rates:
            for seed in args.seeds:
                steps.begin(f"{rate:g} streams/s of {args.tokens} tokens, seed {seed}")
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    rows.append(runner.run(measure(url, rate, round(rate * args.seconds), args.tokens, seed)))
                steps.done()
    # At a low rate every token wakes the client by itself, which costs more and does not matter.
    fastest = min(row["streams_per_cpu_second"] for row in rows if row["rate"] == max(args.rates))
    heads = ("streams/s asked", "ended well", "per CPU second", "CPU ms each", "late p50, ms", "p99", "load average")
    show(
        console,
        f"one core sends and reads {fastest:.0f} streams/s of {args.tokens} tokens (goal {GOAL:g})",
        heads,
        [
            (
                *(row["rate"], f"{row['ok']} of {row['streams']}", row["streams_per_cpu_second"], row["cpu_ms"]),
                *(row["late_p50_ms"], row["late_p99_ms"], row["load_average"]),
            )
            for row in rows
        ],
    )
    return stamp.write({"rows": rows, "goal": GOAL, "met": fastest >= GOAL}, args.out)


async def measure(url: str, rate: float, streams: int, tokens: int, seed: int) -> dict[str, Any]:
    """So many streams, Poisson at `rate`: CPU seconds of this process from the first to the last, and lateness."""
    times = arrivals.poisson(streams, rate, np.random.default_rng(seed))
    requests = [Request(due=float(t), prompt_tokens=2, output_tokens=tokens) for t in times]
    async with StreamingClient(url, "bench") as client:
        warm = [Request(due=0.0, prompt_tokens=2, output_tokens=tokens)] * 20
        await drive(client, warm, [Prompt("two words", tokens)] * 20, drain=60.0, watch=Watch(20))
        load, cpu = os.getloadavg()[0], time.process_time()
        asked = [Prompt("two words", tokens)] * streams
        records = await drive(client, requests, asked, drain=60.0, watch=Watch(streams))
        cpu = time.process_time() - cpu
    late = [(record.sent - record.due) * 1e3 for record in records]
    return {
        "rate": rate,
        "seed": seed,
        "streams": streams,
        "ok": sum(record.outcome == "ok" and record.output_len == tokens for record in records),
        "cpu_ms": cpu / streams * 1e3,
        "streams_per_cpu_second": streams / cpu,
        "late_p50_ms": percentile(late, 50),
        "late_p99_ms": percentile(late, 99),
        "load_average": load,
    }


@contextmanager
def token_server(tokens: int) -> Iterator[str]:
    """URL of a server in a process of its own that answers with so many tokens."""
    command = [sys.executable, "-m", "loadgen.bench.token_server", str(tokens)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()
            process.wait(10)
