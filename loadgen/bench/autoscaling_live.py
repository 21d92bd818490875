"""`bench autoscaling --live`: a step of load on a real fleet that Serve's controller scales, and what its clients see.

A replica counts from the start of its process to its end. When the step is over, long streams are opened, as many as
one replica can hold, and the fleet shrinks under them: the replica that ends must give its ones away.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from loadgen import arguments, arrivals, lengths
from loadgen.bench import pinning, scaling_figures, servers
from loadgen.bench.chaos_figures import KINDS
from loadgen.bench.fleet_control import FleetControl, settle
from loadgen.bench.rebalance import difference
from loadgen.bench.scaling_figures import OURS, Rules
from loadgen.bench.tiers import ENGINE, PUNCTUAL_S, STANDARD, START_TIMEOUT_S, prompts
from loadgen.client import Prompt, StreamingClient, closed_loop, open_loop
from loadgen.metrics import RequestRecord, percentile
from loadgen.report import Stamp, Steps, show

LEAST, MOST = 1, 2
WINDOWS = {"upscale_delay_s": 3.0, "downscale_delay_s": 15.0, "metrics_interval_s": 1.0, "look_back_period_s": 5.0}
POLICIES: dict[str, dict[str, Any]] = {OURS: {}, "ongoing 2": {"target_ongoing_requests": 2}}
END_S = 20.0  # beyond the window: Serve looks at the load, requests move away, the process ends
LOW_S, LOW_RPS = 10.0, 0.5  # before the step
LONG, LONG_PROMPT, LONG_ANSWER = 2, 64, 850  # streams, words, tokens: half a minute or more on one CPU core
MAX_QUEUED = 512  # requests that may wait for their first token: more than come
LOOK_S = 1.0


def add_arguments(parser: Any) -> None:
    """Options of `bench autoscaling --live`."""
    parser.add_argument("--model", default=None, help="local model folder (default: the default model)")
    parser.add_argument(
        "--policies", nargs="+", choices=POLICIES, default=list(POLICIES), help="in turn (default: all of them)"
    )
    parser.add_argument(
        "--rate", type=arguments.positive, default=6.0, help="requests/s of the step (default: %(default)s)"
    )
    parser.add_argument("--hold", type=arguments.positive, default=75.0, help="its length, s (default: %(default)s)")
    parser.add_argument(
        "--silence",
        type=arguments.positive,
        default=75.0,
        help="time watched after its last arrival, s (default: %(default)s)",
    )


def run(args: argparse.Namespace, console: Console) -> Path:
    """Start a fleet for each policy and seed, send it the step, watch it shrink."""
    stamp = Stamp("autoscaling-live", vars(args), args.seeds[:1])
    model = args.model or servers.default_model()
    seed, runs = args.seeds[0], []
    pinning.go_first()
    with Steps(console, len(args.policies)) as steps:
        for policy in args.policies:
            steps.begin(f"{policy}: starting tidegate")
            with servers.session_folder(console) as folder:
                scaling = {"min_replicas": LEAST, "max_replicas": MOST, **WINDOWS, **POLICIES[policy]}
                fleet = servers.start_fleet(
                    model,
                    ENGINE,
                    folder,
                    deployment_config={"autoscaling_config": scaling},
                    ingress={"max_queued_requests": MAX_QUEUED},
                )
                try:
                    fleet.wait_until_ready("/health/ready", START_TIMEOUT_S)
                    measured = asyncio.run(_measure(fleet, args, seed, policy, steps))
                finally:
                    fleet.stop()
            runs.append({"traffic": "step", "policy": policy, "seed": seed, **figures(**measured)})
            steps.done()
    rivals = len(args.policies) > 1 and OURS in args.policies
    ratios = scaling_figures.compared(runs) if rivals else {}
    result = {
        "engine_args": {**ENGINE, "model": model},
        "autoscaling_config": {policy: {**WINDOWS, **POLICIES[policy]} for policy in args.policies},
        "freeness_over": ratios,
        "checks": checks(runs, ratios),
        "runs": runs,
    }
    _print(console, result)
    return stamp.write(result, args.out)


async def _measure(
    fleet: servers.Server, args: argparse.Namespace, seed: int, policy: str, steps: Steps
) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    curve = [(LOW_S, LOW_RPS), (args.hold, args.rate)]
    loaded = sum(seconds for seconds, _ in curve)
    due = arrivals.under_rate(round(2 * args.rate * loaded) + 20, [*curve, (float("inf"), 1.0)], rng)
    due = due[due < loaded]
    sizes: list[tuple[float, int, int]] = []
    async with StreamingClient(fleet.url, servers.MODEL_NAME) as client, FleetControl(fleet) as control:
        await settle(control, LEAST, START_TIMEOUT_S)
        await closed_loop(client, prompts([STANDARD] * 2, rng), 1)  # warms everything up
        before, load = await control.coordinator("state"), os.getloadavg()[0]
        t0 = time.perf_counter()
        watch = asyncio.create_task(_watch(fleet, control, t0, sizes))
        steps.begin(f"{policy}: {args.hold:.0f} s at {args.rate:g} requests/s")
        records = await open_loop(client, prompts([STANDARD] * len(due), rng), due.tolist())
        steps.begin(f"{policy}: {LONG} streams, then nothing")
        asked = [Prompt(lengths.words(LONG_PROMPT, rng), LONG_ANSWER) for _ in range(LONG)]
        streams = await asyncio.gather(*(client.ask(prompt, t0) for prompt in asked))
        await asyncio.sleep(max(0.0, t0 + loaded + args.silence - time.perf_counter()))
        watched_s = time.perf_counter() - t0
        if watch.done():
            watch.result()  # it never ends by itself
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        after = await control.coordinator("state")
    return {
        "records": records,
        "streams": list(streams),
        "sizes": sizes,
        "watched_s": watched_s,
        "span_s": loaded + args.silence,
        "moves": difference(after["moves"], before["moves"]),
        "load": load,
    }


async def _watch(fleet: servers.Server, control: FleetControl, t0: float, sizes: list[tuple[float, int, int]]) -> None:
    """Note how many replicas have a process, and how many of them serve, whenever that changes."""
    while True:
        processes = len(await asyncio.to_thread(fleet.named, KINDS["replica"]))
        now = (processes, len(await control.serving()))
        if not sizes or sizes[-1][1:] != now:
            sizes.append((time.perf_counter() - t0 if sizes else 0.0, *now))
        await asyncio.sleep(LOOK_S)


def figures(
    records: list[RequestRecord],
    streams: list[RequestRecord],
    sizes: list[tuple[float, int, int]],
    watched_s: float,
    span_s: float,
    moves: dict[str, dict[str, int]],
    load: float,
) -> dict[str, Any]:
    """Figures of one run; `sizes` are times, processes of replicas and those that serve. Replica-seconds: of `span_s`.

    `open`: long streams that were open when the first process of a replica was seen to be gone, or at the end.
    """
    processes = [(at, n) for at, n, _ in sizes]
    rules = Rules(LEAST, WINDOWS["upscale_delay_s"], WINDOWS["downscale_delay_s"], END_S)
    found = scaling_figures.of_run(records, processes, rules, scaling_figures.replica_seconds(processes, span_s))
    shrank = next((at for at, by in scaling_figures.steps(processes) if by < 0), watched_s)
    # Serve decides, requests move away, and then the process ends: they were open for that if they began before.
    window = (shrank - END_S, shrank)
    return {
        **found,
        "cut": found["cut"] + sum(record.outcome == "cut" for record in streams),
        "not_ok": found["not_ok"] + sum(record.outcome != "ok" for record in streams),
        "requests": found["requests"] + len(streams),
        "open": sum(s.due < window[1] and s.due + s.latency > window[0] for s in streams),
        "streams_s": [[s.due, s.due + s.latency] for s in streams],
        "late_p99_s": percentile([r.sent - r.due for r in records], 99),
        "sizes": sizes,
        "watched_s": watched_s,
        "moves": moves,
        "load_average": load,
    }


def checks(runs: list[dict[str, Any]], ratios: dict[str, Any]) -> list[dict[str, Any]]:
    """The checks of the simulated runs where freeness ran, and what a live run must have shown to be worth anything."""
    found = scaling_figures.checks(runs, ratios) if any(run["policy"] == OURS for run in runs) else []
    for run in runs:
        moved = sum(run["moves"].get("drain", {}).values())
        shrunk = f"{run['open']} streams were open, {moved} moved, {run['cut']} of {run['requests']} requests cut"
        ok = run["most"] == MOST and run["to_min_s"] is not None and run["open"] > 0 == run["cut"]
        found.append({"check": f"{run['policy']}: it shrinks under open streams and cuts none", "found": shrunk,
                      "met": ok})  # fmt: skip
    late = max(run["late_p99_s"] for run in runs)
    punctual = "the load client kept its times: p99 late <= 0.1 s"
    return [*found, {"check": punctual, "found": f"{late:.3f} s", "met": bool(late <= PUNCTUAL_S)}]


def _print(console: Console, result: dict[str, Any]) -> None:
    rows = [
        (
            run["policy"],
            run["p50_ttft_ms"] / 1e3,
            run["p95_ttft_ms"] / 1e3,
            run["replica_s"],
            run["most"],
            run["reversals"],
            "never" if run["to_min_s"] is None else run["to_min_s"],
            run["not_ok"],
            sum(outcomes.get("done", 0) for outcomes in run["moves"].values()),
        )
        for run in result["runs"]
    ]
    heads = ("", "TTFT p50, s", "p95", "replica-s", "most", "reversals", "to min, s", "not whole", "moved")
    show(console, "a step of load on a real fleet", heads, rows)
    show(
        console,
        "what autoscaling promises",
        ("", "found", "met"),
        [(c["check"], c["found"], "yes" if c["met"] else "NO") for c in result["checks"]],
    )
