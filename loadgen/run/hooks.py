"""Shell commands at given times of a run: `20s:kill -9 $(cat replica.pid)` to see what a failure costs."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SPEC = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m)?:(.+)", re.DOTALL)
SCALE = {"ms": 1e-3, "s": 1.0, "m": 60.0, None: 1.0}
OUTPUT = 2000  # characters kept of what a command prints


@dataclass(frozen=True, slots=True)
class Hook:
    """A shell command and when it is started, seconds since the start of the run."""

    at: float
    command: str


def hook(text: str) -> Hook:
    """`20s:command`, `500ms:command`, `1m:command`; ValueError if it is nothing of the kind."""
    found = SPEC.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no hook; write TIME:COMMAND, 20s:'kill -9 1234' say")
    return Hook(float(found[1]) * SCALE[found[2]], found[3].strip())


async def run_hooks(hooks: Sequence[Hook], t0: float, done: list[dict[str, Any]]) -> None:
    """Start each at its time (`t0`: `perf_counter` seconds) and append what became of it to `done`.

    A command that still runs when this is cancelled is ended, with all that it started.
    """
    async with asyncio.TaskGroup() as group:
        for each in hooks:
            group.create_task(_run(each, t0, done))


async def _run(each: Hook, t0: float, done: list[dict[str, Any]]) -> None:
    found: dict[str, Any] = {"command": each.command, "at": each.at, "began": None, "status": "the run ended before"}
    done.append(found)
    await asyncio.sleep(max(0.0, t0 + each.at - time.perf_counter()))
    found["began"] = time.perf_counter() - t0
    try:
        process = await asyncio.create_subprocess_shell(
            each.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            preexec_fn=os.setpgrp,  # not a session: the kernel shares the CPU by session, and a new one starves
        )
    except OSError as error:
        found["status"] = f"could not be started: {error}"
        return
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        found["status"] = "ended with the run"
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        await process.wait()
        raise
    found |= {
        "ended": time.perf_counter() - t0,
        "status": process.returncode,
        "output": output.decode(errors="replace")[-OUTPUT:],
    }
