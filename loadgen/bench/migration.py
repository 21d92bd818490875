"""Moving a running request: the pause that its client sees, live, by stop-and-copy and by recomputing, and what it
costs the others.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
from rich.console import Console

from loadgen import arguments
from loadgen.bench import move_figures, pinning, servers
from loadgen.bench.fleet_control import BY_SESSION, SESSION_HEADER, FleetControl, How, sessions, settle
from loadgen.report import Stamp, Steps, show
from loadgen.token_stream import TokenClient, TokenPrompt, TokenStream

TITLE = "live migration against stop-and-copy and recomputing: the pause that a client sees (about 10 minutes)"
SEEDS = (0,)

HOWS: tuple[How, ...] = get_args(How)
LENGTHS = (128, 512, 1024, 2048, 4096)  # prompt tokens
ENGINE: dict[str, Any] = {
    "max_model_len": 6144,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "block_size": 32,
    "kv_cache_memory_bytes": 640 << 20,
    "gpu_memory_utilization": 0.05,
    "enable_prefix_caching": False,  # recomputing must find nothing computed, wherever it happens
    "enforce_eager": True,
    "dtype": "bfloat16",
}
SECTIONS: dict[str, dict[str, Any]] = {"balancing": BY_SESSION, "scheduling": {"policy": "fcfs"}}
REPLICAS = 2
START_TIMEOUT_S = 300.0
BEFORE = 24  # tokens that a stream has when its move is commanded
ANSWER = 72  # tokens of an answer: a live move of the longest prompt takes about 20
FIRST_TOKEN_ID, LAST_TOKEN_ID = 1000, 40_000  # ordinary tokens of the vocabulary
BESIDE = 8  # other requests on each replica while the longest prompt moves
BESIDE_TOKENS = 64
BESIDE_ANSWER = 4000
LOWEST_TIER = {"X-Vllm-Priority": "3"}  # moves by hand take the lowest tier first
QUIET_S = 1.0  # between two moves, besides the time to compare with
TICK_S = 0.01  # how often the client looks at how late it is


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `bench migration`."""
    parser.add_argument(
        "--model", type=arguments.model_folder, default=None, help="local model folder (default: the default model)"
    )
    parser.add_argument(
        "--rounds", type=arguments.count, default=6, help="moves of each kind and length (default: %(default)s)"
    )
    parser.add_argument(
        "--lengths",
        type=arguments.count,
        nargs="+",
        default=list(LENGTHS),
        metavar="N",
        help="prompt tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--copies",
        type=arguments.count,
        default=6,
        help="moves beside other requests, of the longest prompt (default: %(default)s)",
    )


def random_prompt(tokens: int, answer: int, rng: np.random.Generator, headers: dict[str, str]) -> TokenPrompt:
    """A prompt of so many random token ids."""
    ids = tuple(int(i) for i in rng.integers(FIRST_TOKEN_ID, LAST_TOKEN_ID, tokens))
    return TokenPrompt(ids, answer, headers)


def order(round_: int) -> Sequence[How]:
    """The kinds of move in the order of this round: each is first, second and last as often."""
    turn = round_ % len(HOWS)
    return (*HOWS[turn:], *HOWS[:turn])


def run(args: argparse.Namespace, console: Console) -> Path:
    """Start two replicas, move one stream at a time by each kind in turn, then one beside others."""
    stamp = Stamp("migration", vars(args), args.seeds)
    model = args.model or servers.default_model()
    total = 1 + args.rounds * len(args.lengths) + 1
    with servers.session_folder(console) as folder, Steps(console, total) as steps:
        steps.begin("starting tidegate")
        fleet = servers.start_fleet(model, ENGINE, folder, REPLICAS, **SECTIONS)
        try:
            fleet.wait_until_ready("/health/ready", START_TIMEOUT_S)
            pinning.go_first()
            measured = asyncio.run(_measure(fleet, args, steps))
        finally:
            fleet.stop()
    figures = move_figures.figures(**measured)
    _print(console, figures)
    conditions = {"engine_args": {**ENGINE, "model": model}, "sections": SECTIONS, "beside": 2 * BESIDE}
    return stamp.write({**conditions, **figures}, args.out)


async def _measure(fleet: servers.Server, args: argparse.Namespace, steps: Steps) -> dict[str, Any]:
    rng = np.random.default_rng(args.seeds[0])
    moves: list[dict[str, Any]] = []
    late: list[float] = []
    async with TokenClient(fleet.url, servers.MODEL_NAME) as client, FleetControl(fleet) as control:
        replicas = await settle(control, REPLICAS, START_TIMEOUT_S)
        await control.coordinator("pause", on=True)  # only the bench's own moves
        at = sessions(replicas)
        for how in HOWS:  # the first of each kind opens links and compiles
            for source in replicas:
                await _one_move(client, control, at, source, how, min(args.lengths), rng)
        steps.done()
        clock = asyncio.get_running_loop().create_task(_clock(late))
        for round_ in range(args.rounds):
            for length in args.lengths:
                steps.begin(f"round {round_ + 1}: prompts of {length} tokens")
                for how in order(round_):
                    source = replicas[round_ % len(replicas)]
                    moved = await _one_move(client, control, at, source, how, length, rng)
                    moves.append({"round": round_, "length": length, "how": how, **moved})
                steps.done()
        steps.begin(f"{args.copies} moves of a {max(args.lengths)}-token prompt beside {2 * BESIDE} requests")
        copies = await _beside_others(client, control, at, args.copies, max(args.lengths), rng)
        clock.cancel()
        steps.done()
    return {"moves": moves, "copies": copies, "late": late}


async def _one_move(
    client: TokenClient,
    control: FleetControl,
    at: dict[str, str],
    source: str,
    how: How,
    length: int,
    rng: np.random.Generator,
) -> dict[str, Any]:
    """One stream alone on the fleet, moved once: its figures, and how the move ended."""
    stream = client.start(random_prompt(length, ANSWER, rng, {SESSION_HEADER: at[source]}))
    await stream.reach(BEFORE)
    began = time.perf_counter()
    ended = await control.move(source, _other(at, source), how)
    answered = time.perf_counter()
    await stream.ended()
    if not stream.whole:
        raise RuntimeError(f"{how}, {length} tokens: the stream was cut: {stream.error}")
    return {**ended, **move_figures.pause(stream.times, began, answered)}


async def _beside_others(
    client: TokenClient, control: FleetControl, at: dict[str, str], copies: int, length: int, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """Move one long request to and fro between replicas that are busy with others."""
    others: dict[str, list[TokenStream]] = {}
    for name, session in at.items():
        asked = [random_prompt(BESIDE_TOKENS, BESIDE_ANSWER, rng, {SESSION_HEADER: session}) for _ in range(BESIDE)]
        others[name] = [client.start(prompt) for prompt in asked]
    source = next(iter(at))
    headers = {SESSION_HEADER: at[source], **LOWEST_TIER}
    room = int(ENGINE["max_model_len"]) - length
    moving = client.start(random_prompt(length, room, rng, headers))
    await moving.reach(BEFORE)
    copied: list[dict[str, Any]] = []
    for _ in range(copies):
        # As long a time before as the move takes is compared with, and one before that as the comparison's own error.
        await asyncio.sleep(QUIET_S + 2 * (copied[-1]["seconds"] if copied else QUIET_S))
        if copied and moving.over:
            break  # its answer was too short for so many moves
        destination = _other(at, source)
        began = time.perf_counter()
        ended = await control.move(source, destination)
        answered = time.perf_counter()
        sides = {"source": others[source], "destination": others[destination]}
        slowed = {side: move_figures.slowdown([s.times for s in streams], began, answered)
                  for side, streams in sides.items()}  # fmt: skip
        copied.append({**ended, "seconds": answered - began, "others": slowed})
        if ended["outcome"] in move_figures.MOVED:
            source = destination
    if over := [s for streams in others.values() for s in streams if s.over]:
        why = over[0].error or "the answers were too short"
        raise RuntimeError(f"{len(over)} streams ended while they were measured: {why}")
    return copied


def _other(at: dict[str, str], replica: str) -> str:
    return next(name for name in at if name != replica)


async def _clock(late: list[float]) -> None:
    """How late the client's own event loop is, s: a client without CPU would measure itself."""
    while True:
        due = time.perf_counter() + TICK_S
        await asyncio.sleep(TICK_S)
        late.append(time.perf_counter() - due)


def _print(console: Console, figures: dict[str, Any]) -> None:
    rows = [
        (
            f"{row['length']} {row['how']}",
            f"{row['moved']}/{row['asked']}",
            row["itl_ms"],
            row["p50_pause_ms"],
            row["max_pause_ms"],
            row["p50_steps"],
            row["max_steps"],
            row["p50_ordinary_ms"],
            row["p50_move_ms"],
        )
        for row in figures["pauses"]
    ]
    heads = ("tokens", "moved", "ITL", "pause p50", "max", "steps p50", "max", "no move", "took")
    show(console, "the longest gap between tokens around a move: ms, and decode steps", heads, rows)
    rows = [
        (f"on the {side}", *(figures["slowdown"][side][key]["text"] for key in ("during", "undisturbed")))
        for side in ("source", "destination")
    ]
    show(console, "others: mean time between tokens, ratio to before", ("", "during a copy", "without"), rows)
    show(
        console,
        "what live migration promises",
        ("", "found", "met"),
        [(c["check"], c["found"], "yes" if c["met"] else "NO") for c in figures["checks"]],
    )
