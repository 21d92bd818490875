"""Priority tiers on the real fleet at twice its capacity: who waits, who is refused, and what the tiers change."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from loadgen import arguments, arrivals, lengths, tiers
from loadgen.bench import pinning, servers
from loadgen.client import Prompt, StreamingClient, closed_loop, open_loop
from loadgen.metrics import RequestRecord, percentile, summarise
from loadgen.report import Stamp, Steps, show

TITLE = "priority tiers on the real fleet at twice its capacity: TTFT, goodput and refusals by tier (about 6 minutes)"
SEEDS = (0, 1)

NAMES = ("critical", "standard", "relaxed", "background")  # the fleet's default tiers
STANDARD = 1
SLO_S = (2.0, 5.0, 15.0, 60.0)  # TTFT that counts as good
ENGINE: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
    "gpu_memory_utilization": 0.05,
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "dtype": "bfloat16",
}
MAX_QUEUED = 512  # requests that may wait for their first token: more than come
QUEUE_BOUNDS = {"background": 24}  # of the tier: more are refused, and those that are in can be followed to their end
TEMPLATE_TOKENS = 30  # what the model's chat template adds to a message
ALONE_TOKENS = 4  # answer of an unloaded request, of which only the wait for the first token counts
START_TIMEOUT_S = 300.0
SLACK = 1.5  # of the top tier's unloaded p99
PUNCTUAL_S = 0.1  # a client that is later measures itself


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `bench tiers`."""
    parser.add_argument(
        "--model", type=arguments.model_folder, default=None, help="local model folder (default: the default model)"
    )
    parser.add_argument("--replicas", type=arguments.count, default=2, help="engine replicas (default: %(default)s)")
    parser.add_argument(
        "--mix",
        type=mix,
        default=mix("enterprise"),
        metavar="NAME",
        help=f"shares of the tiers: {', '.join(tiers.MIXES)} or {len(NAMES)} weights (default: enterprise)",
    )
    parser.add_argument(
        "--overload", type=arguments.positive, default=2.0, help="arrivals over capacity (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=arguments.positive, default=40.0, help="arrivals of each run, s (default: %(default)s)"
    )
    parser.add_argument(
        "--unloaded", type=arguments.count, default=40, help="requests alone on the fleet (default: %(default)s)"
    )


def mix(text: str) -> tiers.Shares:
    """Shares of the default tiers; argparse's error says what is wrong."""
    try:
        return tiers.mix(text, len(NAMES))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def prompts(drawn: Sequence[int], rng: np.random.Generator) -> list[Prompt]:
    """A request for each tier: SW-Chat lengths for the engine's window, the tier in its header."""
    inputs, outputs = lengths.table("chat").scaled(len(drawn), int(ENGINE["max_model_len"]), rng)
    return [
        Prompt(lengths.words(max(1, int(n) - TEMPLATE_TOKENS), rng), int(m), {"X-Vllm-Priority": str(tier)})
        for n, m, tier in zip(inputs, outputs, drawn, strict=True)
    ]


def run(args: argparse.Namespace, console: Console) -> Path:
    """Start a fleet, measure it empty and full, then overload it with tiers and, by the same requests, without."""
    stamp = Stamp("tiers", vars(args), args.seeds)
    model = args.model or servers.default_model()
    with servers.session_folder(console) as folder, Steps(console, 3 + 2 * len(args.seeds)) as steps:
        steps.begin("starting tidegate")
        levels = [{"name": name, "max_queued": QUEUE_BOUNDS.get(name)} for name in NAMES]
        queue = {"max_queued_requests": MAX_QUEUED}
        fleet = servers.start_fleet(model, ENGINE, folder, args.replicas, ingress=queue, tiers={"levels": levels})
        try:
            fleet.wait_until_ready("/health/ready", START_TIMEOUT_S)
            steps.done()
            pinning.go_first()
            measured = asyncio.run(_measure(fleet, args, steps))
        finally:
            fleet.stop()
    figures = _figures(measured)
    _print(console, figures)
    conditions = {"engine_args": {**ENGINE, "model": model}, "max_queued": QUEUE_BOUNDS, "ttft_slo_s": SLO_S}
    return stamp.write({**conditions, **figures}, args.out)


async def _measure(fleet: servers.Server, args: argparse.Namespace, steps: Steps) -> dict[str, Any]:
    rng = np.random.default_rng(args.seeds[0])
    full = args.replicas * int(ENGINE["max_num_seqs"])
    async with StreamingClient(fleet.url, servers.MODEL_NAME) as client:
        steps.begin("unloaded: critical requests one by one")
        _good(await closed_loop(client, prompts([STANDARD] * full, rng), full), fleet)  # warms everything up
        alone = [replace(p, output_len=ALONE_TOKENS) for p in prompts([0] * args.unloaded, rng)]
        unloaded = _good(await closed_loop(client, alone, 1), fleet)
        steps.done()
        steps.begin("capacity: as many streams as keep every replica full")
        calibration = _good(await closed_loop(client, prompts([STANDARD] * 4 * full, rng), 2 * full), fleet)
        capacity = steady_rate(calibration)
        steps.done()
        runs: list[dict[str, Any]] = []
        for i, seed in enumerate(args.seeds):
            for kind in ("tiers", "one tier") if i % 2 == 0 else ("one tier", "tiers"):
                steps.begin(f"seed {seed}, {kind}: {args.overload:g} times capacity ({capacity:.1f}/s)")
                rate, load = args.overload * capacity, os.getloadavg()[0]
                seeded = np.random.default_rng(seed)
                drawn = tiers.draw(round(rate * args.seconds), args.mix, seeded).tolist()
                due = arrivals.poisson(len(drawn), rate, seeded).tolist()
                asked = prompts(drawn if kind == "tiers" else [STANDARD] * len(drawn), seeded)
                records = await open_loop(client, asked, due)
                runs.append({"seed": seed, "kind": kind, "load_average": load, "tiers": drawn, "records": records})
                steps.done()
    return {"unloaded": unloaded, "capacity": capacity, "rate": args.overload * capacity, "runs": runs}


def _good(records: list[RequestRecord], fleet: servers.Server) -> list[RequestRecord]:
    errors = [r.error for r in records if r.error]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(records)} requests failed, first: {errors[0]}\n{fleet.log_end()}")
    return records


def steady_rate(records: Sequence[RequestRecord]) -> float:
    """Requests finished per second between the first and the last quarter of the finishing order: no ramps."""
    ends = sorted(r.due + r.latency for r in records)
    first, last = len(ends) // 4, 3 * len(ends) // 4
    return (last - first) / (ends[last] - ends[first])


def _figures(measured: dict[str, Any]) -> dict[str, Any]:
    by_kind = {}
    for kind in ("tiers", "one tier"):
        runs = [r for r in measured["runs"] if r["kind"] == kind]
        each = [(tier, record) for r in runs for tier, record in zip(r["tiers"], r["records"], strict=True)]
        seconds = sum(max(r.due + r.latency for r in entry["records"]) for entry in runs)
        by_kind[kind] = [
            {"tier": name, **of_tier([r for t, r in each if t == tier], SLO_S[tier], seconds)}
            for tier, name in enumerate(NAMES)
        ]
    unloaded = summarise(measured["unloaded"])
    records = [record for r in measured["runs"] for record in r["records"]]
    empty = {key: unloaded[key] for key in ("completed", "p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms")}
    return {
        "capacity_rps": measured["capacity"],
        "rate_rps": measured["rate"],
        "unloaded": empty,
        "load_averages": [r["load_average"] for r in measured["runs"]],
        "with_tiers": by_kind["tiers"],
        "one_tier": by_kind["one tier"],
        "checks": checks(by_kind["tiers"], empty["p99_ttft_ms"], records),
    }


def of_tier(records: Sequence[RequestRecord], slo_s: float, seconds: float) -> dict[str, Any]:
    """Figures of one tier's requests; `goodput_rps`: first tokens within `slo_s`, per second of the runs.

    `admitted` were answered 200, `refused` count 429s by reason, `broken` are admitted ones that did not end well.
    """
    summary = summarise(records)
    admitted = [r for r in records if r.status == 200]
    keys = ("completed", "p50_ttft_ms", "p95_ttft_ms", "p99_ttft_ms", "p50_e2el_ms", "p95_tpot_ms")
    good = sum(not r.error and r.ttft <= slo_s for r in records)
    return {
        "asked": len(records),
        "admitted": len(admitted),
        "broken": sum(bool(r.error) for r in admitted),
        "refused": dict(Counter(r.reason or "no reason" for r in records if r.status == 429)),
        "other_failures": sum(r.status not in (200, 429) for r in records),
        "goodput_rps": good / seconds,
        "within_slo": good / len(records) if records else float("nan"),
        **{key: summary[key] for key in keys},
    }


def checks(
    by_tier: Sequence[dict[str, Any]], unloaded_p99_ms: float, records: Sequence[RequestRecord]
) -> list[dict[str, Any]]:
    """What the tiers promise, what was found, and whether that is met.

    One engine step is taken as the top tier's 95th percentile of time per output token: it is never preempted.
    """
    p99 = [tier["p99_ttft_ms"] for tier in by_tier]
    top, lowest = by_tier[0], by_tier[-1]
    allowed = SLACK * unloaded_p99_ms + top["p95_tpot_ms"]
    late = percentile([r.sent - r.due for r in records], 99)
    refused = [r for r in records if r.status == 429]
    mute = sum(r.retry_after is None or not r.reason for r in refused)
    found = (
        ("TTFT p99 grows from tier to tier", " <= ".join(f"{v:.0f} ms" for v in p99), p99 == sorted(p99)),
        (
            f"{NAMES[0]} TTFT p99 <= {SLACK:g} of unloaded + one step",
            f"{p99[0]:.0f} ms, allowed {allowed:.0f} ms ({SLACK:g} * {unloaded_p99_ms:.0f} + {top['p95_tpot_ms']:.0f})",
            p99[0] <= allowed,
        ),
        (
            f"every admitted {NAMES[-1]} request ends",
            f"{lowest['admitted'] - lowest['broken']} of {lowest['admitted']}",
            lowest["admitted"] > 0 and lowest["broken"] == 0,
        ),
        (
            "each 429 has Retry-After and a reason",
            f"{len(refused) - mute} of {len(refused)}",
            bool(refused) and mute == 0,
        ),
        ("the load client kept its times: p99 late <= 0.1 s", f"{late:.3f} s", late <= PUNCTUAL_S),
    )
    return [{"check": check, "found": text, "met": bool(met)} for check, text, met in found]


def _print(console: Console, figures: dict[str, Any]) -> None:
    kinds = {"": figures["with_tiers"], " as standard": figures["one_tier"]}
    rows = [
        (
            f"{tier['tier']}{kind}",
            tier["asked"],
            tier["completed"],
            tier["p50_ttft_ms"] / 1e3,
            tier["p99_ttft_ms"] / 1e3,
            tier["goodput_rps"],
            f"{tier['within_slo']:.0%}",
            ", ".join(f"{n} {reason}" for reason, n in sorted(tier["refused"].items())) or "-",
        )
        for row in zip(*kinds.values(), strict=True)
        for kind, tier in zip(kinds, row, strict=True)
    ]
    title = (
        f"{figures['rate_rps']:.1f} requests/s at a capacity of {figures['capacity_rps']:.1f}; "
        f"unloaded {NAMES[0]} TTFT p50 {figures['unloaded']['p50_ttft_ms'] / 1e3:.2f} s, "
        f"p99 {figures['unloaded']['p99_ttft_ms'] / 1e3:.2f} s"
    )
    heads = ("", "asked", "ended", "TTFT p50, s", "p99, s", "goodput/s", "in time", "refused")
    show(console, title, heads, rows)
    show(
        console,
        "what the tiers promise",
        ("", "found", "met"),
        [(c["check"], c["found"], "yes" if c["met"] else "NO") for c in figures["checks"]],
    )
