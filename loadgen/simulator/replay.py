"""`python -m loadgen replay`: an engine's step log again, in the simulator: the same arrivals at the same steps.

Times are those of the log, so that no model of step times can hide a difference: whatever differs is a decision.
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from deployments.step_log import COLUMNS

TITLE = "play an engine's step log again in the simulator, step by step; status 1 at the first difference"
#: What the first row's setting says of the engine, by the names of loadgen.simulator.engine.Shape.
LIMITS = ("kv_blocks", "max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens", "asynchronous")


class Difference(Exception):
    """The first step, counted from 1, at which the simulator did something else than the engine."""

    def __init__(self, step: str, what: str, engine: object, simulator: object) -> None:
        super().__init__(f"step {step}: {what} is {engine!r} in the engine, {simulator!r} in the simulator")
        self.step, self.what = step, what


@dataclass(frozen=True, slots=True)
class Replayed:
    """What was the same: steps, requests, preemptions, requests that left; the policies; seconds of the engine."""

    steps: int
    requests: int
    preemptions: int
    left: int
    policies: tuple[str, ...]
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.steps} steps of {self.requests} requests under {', '.join(self.policies)}: identical schedules, "
            f"{self.preemptions} preemptions"
        )


def read(path: Path) -> list[dict[str, str]]:
    """Rows of a step log as text; ValueError names what is missing."""
    with path.open(newline="", errors="replace") as file:
        reader = csv.DictReader(file)
        if missing := set(COLUMNS) - set(reader.fieldnames or ()):
            raise ValueError(f"{path}: is no step log, there is no column {', '.join(sorted(missing))}")
        rows = list(reader)
    for number, row in enumerate(rows, 2):
        if None in row.values() or None in row:
            raise ValueError(f"{path}, line {number}: the row is not complete")
    if not rows:
        raise ValueError(f"{path}: there are no steps")
    return rows


def replay(rows: Sequence[dict[str, str]]) -> Replayed:
    """Play the rows of `read` again; Difference at the first one that does not come out the same.

    ValueError for a log that does not say how its engine was set up, or of an engine with prefix caching.
    """
    from loadgen.simulator.follower import Follower  # imports vLLM

    setting = json.loads(rows[0]["setting"] or "{}")
    if not {*LIMITS, "policy", "tiers", "prefix_caching"} <= set(setting):
        raise ValueError("setting: the first row does not have the engine's limits; replay the whole log")
    if setting["prefix_caching"]:
        raise ValueError("setting: the engine had prefix caching, which depends on tokens that the log does not have")
    follower, policies, before = Follower(setting), [setting["policy"]["name"]], None
    for row in rows:
        follower.take_in(int(row["in_flight"]))
        if before is not None:
            follower.leave(before)
        follower.arrive(json.loads(row["arrivals"] or "[]"))
        if before is not None and row["setting"]:
            spec = json.loads(row["setting"])["policy"]
            follower.use_policy(spec)
            policies.append(spec["name"])
        follower.step(row)
        before = row
    follower.take_in(0)
    follower.leave(rows[-1])
    return Replayed(
        steps=len(rows),
        requests=len(follower.names),
        preemptions=sum(len(row["preempted"].split()) for row in rows),
        left=sum(len(row["left"].split()) for row in rows),
        policies=tuple(dict.fromkeys(policies)),
        seconds=float(rows[-1]["now"]) + float(rows[-1]["seconds"]) - float(rows[0]["now"]),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `replay`."""
    parser.add_argument(
        "log", type=Path, nargs="+", metavar="LOG", help="step logs, `validate --logs FOLDER` keeps some"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """Replay each log and say how it went; status 1 if one differs or cannot be used."""
    status = 0
    for path in args.log:
        began = time.perf_counter()
        try:
            same = replay(read(path))
        except (OSError, ValueError, Difference) as problem:
            console.print(f"[red]{escape(f'{path}: {problem}')}[/red]")
            status = 1
        else:
            took = time.perf_counter() - began
            console.print(f"{path}: {escape(str(same))} ({same.seconds:.0f} s of the engine in {took:.1f} s)")
    return status
