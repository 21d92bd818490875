"""A skewed load on two replicas, everything sent to one of them: live migration on against off."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from loadgen import arguments, arrivals, lengths
from loadgen.bench import pinning, servers
from loadgen.bench.fleet_control import BY_SESSION, SESSION_HEADER, FleetControl, sessions, settle
from loadgen.bench.tiers import ENGINE, PUNCTUAL_S, START_TIMEOUT_S, TEMPLATE_TOKENS, steady_rate
from loadgen.client import Prompt, StreamingClient, closed_loop, open_loop
from loadgen.metrics import RequestRecord, paired_ratio, percentile, summarise
from loadgen.report import Stamp, Steps, show

TITLE = "everything is sent to one of two replicas: TTFT and TGT with live migration on and off (about 9 minutes)"
SEEDS = (0, 1, 2)

REPLICAS = 2
KEYS = ("p50_ttft_ms", "p95_ttft_ms", "p50_tgt_s", "p95_tgt_s", "p50_e2el_ms", "p95_e2el_ms")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `bench rebalance`."""
    parser.add_argument("--model", default=None, help="local model folder (default: the default model)")
    parser.add_argument(
        "--load",
        type=arguments.positive,
        default=1.4,
        help="arrivals over the capacity of one replica (default: %(default)s)",
    )
    parser.add_argument(
        "--capacity", type=arguments.positive, default=None, help="of one replica, requests/s (default: measured first)"
    )
    parser.add_argument(
        "--seconds", type=arguments.positive, default=40.0, help="arrivals of each run, s (default: %(default)s)"
    )


def prompts(count: int, session: str, rng: np.random.Generator) -> list[Prompt]:
    """So many requests of one session, SW-Chat lengths for the engine's window."""
    inputs, outputs = lengths.table("chat").scaled(count, int(ENGINE["max_model_len"]), rng)
    return [
        Prompt(lengths.words(max(1, int(n) - TEMPLATE_TOKENS), rng), int(m), {SESSION_HEADER: session})
        for n, m in zip(inputs, outputs, strict=True)
    ]


def order(turn: int) -> tuple[str, str]:
    """Off and on, each first in every other seed."""
    return ("off", "on") if turn % 2 == 0 else ("on", "off")


def run(args: argparse.Namespace, console: Console) -> Path:
    """Measure what one replica can do, then send it more, with the coordinator's own moves off and on in turn."""
    stamp = Stamp("rebalance", vars(args), args.seeds)
    model = args.model or servers.default_model()
    with servers.session_folder(console) as folder, Steps(console, 2 + 2 * len(args.seeds)) as steps:
        steps.begin("starting tidegate")
        fleet = servers.start_fleet(model, ENGINE, folder, REPLICAS, balancing=BY_SESSION)
        try:
            fleet.wait_until_ready("/health/ready", START_TIMEOUT_S)
            pinning.go_first()
            measured = asyncio.run(_measure(fleet, args, steps))
        finally:
            fleet.stop()
    result = figures(**measured)
    _print(console, result)
    return stamp.write({"engine_args": {**ENGINE, "model": model}, "balancing": BY_SESSION, **result}, args.out)


async def _measure(fleet: servers.Server, args: argparse.Namespace, steps: Steps) -> dict[str, Any]:
    rng = np.random.default_rng(args.seeds[0])
    full = int(ENGINE["max_num_seqs"])
    async with StreamingClient(fleet.url, servers.MODEL_NAME) as client, FleetControl(fleet) as control:
        replicas = await settle(control, REPLICAS, START_TIMEOUT_S)
        at = sessions(replicas)
        steps.done()
        steps.begin("warm-up, capacity of one replica")
        await control.coordinator("pause", on=True)
        for session in at.values():
            _good(await closed_loop(client, prompts(full, session, rng), full), fleet)
        capacity = args.capacity
        if capacity is None:
            calibration = prompts(4 * full, at[replicas[0]], rng)
            capacity = steady_rate(_good(await closed_loop(client, calibration, 2 * full), fleet))
        steps.done()
        runs: list[dict[str, Any]] = []
        for i, seed in enumerate(args.seeds):
            skewed = replicas[i % len(replicas)]
            for kind in order(i):
                steps.begin(f"seed {seed}, migration {kind}: {args.load:g} times one replica ({capacity:.1f}/s)")
                await control.coordinator("pause", on=kind == "off")
                before, load = await control.coordinator("state"), os.getloadavg()[0]
                seeded, rate = np.random.default_rng(seed), args.load * capacity
                due = arrivals.poisson(round(rate * args.seconds), rate, seeded).tolist()
                records = await open_loop(client, prompts(len(due), at[skewed], seeded), due)
                after = await control.coordinator("state")
                moves = difference(after["moves"], before["moves"])
                runs.append({"seed": seed, "kind": kind, "load_average": load, "moves": moves, "records": records})
                steps.done()
    return {"capacity": capacity, "rate": args.load * capacity, "runs": runs}


def _good(records: list[RequestRecord], fleet: servers.Server) -> list[RequestRecord]:
    errors = [r.error for r in records if r.error]
    if errors:
        raise RuntimeError(f"{len(errors)} of {len(records)} requests failed, first: {errors[0]}\n{fleet.log_end()}")
    return records


def difference(after: dict[str, dict[str, int]], before: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """Moves by reason and outcome since `before`, without those that there were none of."""
    found = {
        reason: {outcome: n for outcome, count in by.items() if (n := count - before.get(reason, {}).get(outcome, 0))}
        for reason, by in after.items()
    }
    return {reason: by for reason, by in found.items() if by}


def figures(capacity: float, rate: float, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Percentiles of each kind over all seeds, ratios on/off by seed with their interval, moves, checks."""
    summaries = {
        kind: {r["seed"]: summarise(r["records"]) for r in runs if r["kind"] == kind} for kind in ("off", "on")
    }
    pooled = {kind: summarise([x for r in runs if r["kind"] == kind for x in r["records"]]) for kind in summaries}
    ratios = {}
    for key in KEYS:
        seeds = [seed for seed in summaries["on"] if seed in summaries["off"]]
        on, off = ([summaries[kind][seed][key] for seed in seeds] for kind in ("on", "off"))
        ratio = paired_ratio(on, off)
        ratios[key] = {"mean": ratio.mean, "low": ratio.low, "high": ratio.high, "kind": ratio.kind, "text": str(ratio)}
    late = percentile([x.sent - x.due for r in runs for x in r["records"]], 99)
    result: dict[str, Any] = {
        "capacity_rps": capacity,
        "rate_rps": rate,
        "requests": {kind: [len(r["records"]) for r in runs if r["kind"] == kind] for kind in summaries},
        "failed": {kind: figure["failed"] for kind, figure in pooled.items()},
        **{kind: {key: figure[key] for key in KEYS} for kind, figure in pooled.items()},
        "on_over_off": ratios,
        "moves": {kind: total([r["moves"] for r in runs if r["kind"] == kind]) for kind in summaries},
        "runs": [
            {
                **{key: r[key] for key in ("seed", "kind", "load_average", "moves")},
                **{key: summaries[r["kind"]][r["seed"]][key] for key in KEYS},
            }
            for r in runs
        ],
        "late_p99_s": late,
    }
    return {**result, "checks": checks(result)}


def total(moves: Sequence[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """Moves by reason and outcome, added up."""
    found: dict[str, dict[str, int]] = {}
    for run in moves:
        for reason, by in run.items():
            mine = found.setdefault(reason, {})
            for outcome, count in by.items():
                mine[outcome] = mine.get(outcome, 0) + count
    return found


def checks(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What is expected of moving requests away from a full replica, what was found, and whether that is met."""
    done = {kind: sum(by.get("done", 0) for by in result["moves"][kind].values()) for kind in ("off", "on")}
    failed = sum(result["failed"].values())
    found = [
        ("requests move with migration on, none with it off", f"{done['on']} and {done['off']}",
         done["on"] > 0 == done["off"]),
        ("no request fails", f"{failed}", failed == 0),
    ]  # fmt: skip
    for key, name in (("p95_ttft_ms", "TTFT p95"), ("p95_tgt_s", "TGT p95")):
        ratio = result["on_over_off"][key]
        found.append((f"{name} is lower with migration", f"{ratio['text']} of it without", ratio["mean"] < 1))
    late = result["late_p99_s"]
    found.append(("the load client kept its times: p99 late <= 0.1 s", f"{late:.3f} s", late <= PUNCTUAL_S))
    return [{"check": check, "found": text, "met": bool(met)} for check, text, met in found]


def _print(console: Console, result: dict[str, Any]) -> None:
    names = ("TTFT p50, ms", "TTFT p95, ms", "TGT p50, s", "TGT p95, s", "whole answer p50, ms", "whole answer p95, ms")
    rows = [
        (name, result["off"][key], result["on"][key], result["on_over_off"][key]["text"])
        for name, key in zip(names, KEYS, strict=True)
    ]
    title = f"{result['rate_rps']:.1f} requests/s to one replica with a capacity of {result['capacity_rps']:.1f}"
    kind = result["on_over_off"][KEYS[0]]["kind"]
    show(console, title, ("", "migration off", "on", f"on over off, by seed [{kind}]"), rows)
    show(console, "moves with migration on", ("reason", "by outcome"), list(result["moves"]["on"].items()))
    show(
        console,
        "what is expected",
        ("", "found", "met"),
        [(c["check"], c["found"], "yes" if c["met"] else "NO") for c in result["checks"]],
    )
