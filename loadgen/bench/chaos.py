"""The whole fleet under load while its processes are killed: no stream may be cut, no token may be wrong."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console

from loadgen import arguments, arrivals
from loadgen.bench import chaos_figures, pinning, servers
from loadgen.bench.chaos_figures import KINDS, Kill
from loadgen.bench.fleet_control import CallFailed, FleetControl, settle
from loadgen.bench.migration import random_prompt
from loadgen.report import Stamp, Steps, show
from loadgen.token_stream import TokenClient, TokenPrompt, TokenStream, closed_loop

TITLE = "kill -9 of replicas, engines and the coordinator under load: streams cut, tokens wrong (about 8 minutes)"
SEEDS = (0,)

REPLICAS = 2
ENGINE: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "block_size": 32,
    "kv_cache_memory_bytes": 512 << 20,
    "gpu_memory_utilization": 0.05,
    "enforce_eager": True,
    "dtype": "float32",  # in bfloat16 another batch gives other tokens
}
PROMPT_TOKENS, ANSWER_TOKENS = (20, 400), (40, 160)
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 11},
    {"temperature": 0.9, "seed": 12, "presence_penalty": 0.8, "frequency_penalty": 0.3},
    {"temperature": 0, "repetition_penalty": 1.2},
)
PAUSE_S = (1.0, 8.0)  # from a fleet that is whole again to the next kill
BUSY = 3  # streams that are under way at least when something is killed
MOVES, MOVING_S = 2, (0.0, 0.5)  # commanded from each replica to the other, and how long before the kill
START_TIMEOUT_S = 300.0
RECOVERY_TIMEOUT_S = 180.0
ALONE, BESIDE = 4, 16  # streams at a time: for the reference, and to see whether that alone changes tokens
POLL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `bench chaos`."""
    parser.add_argument("--model", default=None, help="local model folder (default: the default model)")
    parser.add_argument(
        "--seconds", type=arguments.positive, default=300.0, help="length of the load, s (default: %(default)s)"
    )
    parser.add_argument(
        "--rate", type=arguments.positive, default=1.0, help="streams that begin per second (default: %(default)s)"
    )
    parser.add_argument(
        "--prompts", type=arguments.count, default=24, help="different prompts, each with a reference answer"
    )


def run(args: argparse.Namespace, console: Console) -> Path:
    """Ask the undisturbed fleet first, then kill parts of it under load, and compare every answer."""
    stamp = Stamp("chaos", vars(args), args.seeds)
    model = args.model or servers.default_model()
    with servers.session_folder(console) as folder, Steps(console, 3 + len(args.seeds)) as steps:
        steps.begin("starting tidegate")
        fleet = servers.start_fleet(model, ENGINE, folder, REPLICAS)
        try:
            fleet.wait_until_ready("/health/ready", START_TIMEOUT_S)
            pinning.go_first()
            measured = asyncio.run(_measure(fleet, args, steps))
        finally:
            fleet.stop()
    result = chaos_figures.figures(**measured, replicas=REPLICAS)
    _print(console, result)
    return stamp.write({"engine_args": {**ENGINE, "model": model}, **result}, args.out)


def prompts(count: int, rng: np.random.Generator) -> list[TokenPrompt]:
    """So many prompts of random lengths, each kind of sampling in turn."""
    made = []
    for i in range(count):
        tokens, answer = (int(rng.integers(low, high + 1)) for low, high in (PROMPT_TOKENS, ANSWER_TOKENS))
        ids = random_prompt(tokens, answer, rng, {}).ids
        made.append(TokenPrompt(ids, answer, body=SAMPLING[i % len(SAMPLING)]))
    return made


async def _measure(fleet: servers.Server, args: argparse.Namespace, steps: Steps) -> dict[str, Any]:
    rng = np.random.default_rng(args.seeds[0])
    asked = prompts(args.prompts, rng)
    async with TokenClient(fleet.url, servers.MODEL_NAME) as client, FleetControl(fleet) as control:
        await settle(control, REPLICAS, START_TIMEOUT_S)
        steps.done()
        steps.begin(f"reference answers of {len(asked)} prompts")
        reference = {s.prompt.ids: s for s in await closed_loop(client, asked, ALONE)}
        if failed := [s.error for s in reference.values() if s.error]:
            raise RuntimeError(f"the undisturbed fleet fails: {failed[0]}\n{fleet.log_end()}")
        steps.done()
        steps.begin(f"the same, {BESIDE} streams at a time")
        again = await closed_loop(client, [asked[i] for i in rng.permutation(len(asked))], BESIDE)
        steps.done()
        streams: list[TokenStream] = []
        kills: list[Kill] = []
        moves: Counter[str] = Counter()
        for seed in args.seeds:
            steps.begin(f"seed {seed}: {args.seconds:.0f} s of load and kills")
            seeded = np.random.default_rng(seed)
            ended = asyncio.Event()
            chance = np.random.default_rng([seed, 1])
            killer = asyncio.create_task(_kill(fleet, control, streams, ended, chance, kills, moves, steps))
            await _load(client, asked, args.rate, args.seconds, seeded, streams, killer)
            ended.set()
            await asyncio.gather(*(s.ended() for s in streams))
            await killer
            steps.done()
        left = await control.serving()
    return {"reference": reference, "again": again, "streams": streams, "kills": kills, "moves": moves,
            "serving": len(left)}  # fmt: skip


async def _load(
    client: TokenClient,
    asked: Sequence[TokenPrompt],
    rate: float,
    seconds: float,
    rng: np.random.Generator,
    streams: list[TokenStream],
    killer: asyncio.Task[None],
) -> None:
    """Begin streams at their times whatever becomes of earlier ones; stop early if the killer fails."""
    t0 = time.perf_counter()
    for due in arrivals.poisson(round(rate * seconds), rate, rng):
        await asyncio.sleep(max(0.0, t0 + due - time.perf_counter()))
        if killer.done():
            await killer  # it never ends by itself before the load
        streams.append(client.start(asked[int(rng.integers(len(asked)))]))


async def _kill(
    fleet: servers.Server,
    control: FleetControl,
    streams: list[TokenStream],
    ended: asyncio.Event,
    rng: np.random.Generator,
    kills: list[Kill],
    moves: Counter[str],
    steps: Steps,
) -> None:
    """Kill one thing at a time, each kind as often, only while all replicas serve and streams run.

    Just before, each replica is told to give requests to the other, so that most kills hit moves; `moves` counts how
    they end.
    """
    kinds: list[str] = []
    while True:
        await settle(control, REPLICAS, RECOVERY_TIMEOUT_S)
        try:
            await asyncio.wait_for(ended.wait(), rng.uniform(*PAUSE_S))
            return
        except TimeoutError:
            pass
        kinds = kinds or rng.permutation(list(KINDS)).tolist()
        if sum(bool(s.ids) and not s.over for s in streams) < BUSY:
            continue
        kind = kinds.pop()
        steps.begin(f"kill {len(kills) + 1}: {kind}")
        chosen = await asyncio.to_thread(fleet.named, KINDS[kind])
        if not chosen:
            raise RuntimeError(f"no process is named {KINDS[kind]}\n{fleet.log_end()}")
        process = chosen[int(rng.integers(len(chosen)))]
        ways = [asyncio.create_task(_move(control, *way, moves)) for way in permutations(await control.serving(), 2)]
        await asyncio.sleep(rng.uniform(*MOVING_S))
        kills.append(await _one_kill(control, kind, process, await control.state()))
        await asyncio.gather(*ways)


async def _move(control: FleetControl, source: str, destination: str, moves: Counter[str]) -> None:
    """Tell a replica to give some requests to another; count how the moves end."""
    try:
        for move in await control.coordinator("move", source=source, destination=destination, count=MOVES):
            moves[f"{move['outcome']}: {move['reason']}"] += 1
    except CallFailed as error:  # coordinator or source is being killed
        moves[str(error).partition(":")[0]] += 1


async def _one_kill(
    control: FleetControl, kind: str, process: psutil.Process, before: dict[str, dict[str, Any]]
) -> Kill:
    process.kill()
    kill = Kill(kind, time.perf_counter())
    deadline = kill.at + RECOVERY_TIMEOUT_S
    if kind == "coordinator":
        while time.perf_counter() < deadline:
            try:
                await control.coordinator("state")
                kill.whole_s = time.perf_counter() - kill.at
                return kill
            except CallFailed:
                await asyncio.sleep(POLL_S)
        raise RuntimeError(f"the coordinator did not come back within {RECOVERY_TIMEOUT_S:.0f} s")
    old = {name for name, report in before.items() if report["state"] == "serving"}
    while not (gone := old - set(serving := await control.serving())):
        if time.perf_counter() > deadline:
            raise RuntimeError(f"the killed {kind} was not taken out of routing")
        await asyncio.sleep(POLL_S)
    kill.out_s = time.perf_counter() - kill.at
    kill.hit = sum(before[name]["running"] + before[name]["waiting"] for name in gone)
    while len(serving) < REPLICAS:
        if time.perf_counter() > deadline:
            raise RuntimeError(f"no new replica serves {RECOVERY_TIMEOUT_S:.0f} s after the {kind} was killed")
        await asyncio.sleep(5 * POLL_S)
        serving = await control.serving()
    kill.whole_s = time.perf_counter() - kill.at
    return kill


def _print(console: Console, result: dict[str, Any]) -> None:
    title = f"{result['streams']} streams, {result['tokens']} tokens; seconds from the kill"
    heads = ("killed", "times", "hit", "next token", "max", "others", "max", "unrouted", "whole", "max")
    rows = [
        (
            kind,
            row["kills"],
            row["hit"],
            row["p50_next_token_s"],
            row["max_next_token_s"],
            row["p50_others_next_token_s"],
            row["max_others_next_token_s"],
            row["p50_out_of_routing_s"],
            row["p50_whole_again_s"],
            row["max_whole_again_s"],
        )
        for kind, row in result["kills"].items()
    ]
    show(console, title, heads, rows)
    console.print(f"moves by hand: {result['moves']}", markup=False)
    for error, times in result["errors"].items():
        console.print(f"{times} x {error}", markup=False)
    show(
        console,
        "what the fleet promises",
        ("", "found", "met"),
        [(c["check"], c["found"], "yes" if c["met"] else "NO") for c in result["checks"]],
    )
