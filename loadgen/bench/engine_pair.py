"""Two real engines side by side, one on each of two cores, that play the same burst at the same time.

A busy machine slows both alike, so what is compared is the pair.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from loadgen.bench import pinning
from loadgen.bench.engine_process import EngineSpec, Outcome, Plan, engine_process

START_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 300.0
LEAD_S = 2.0  # from handing out the burst to its start: by then both children have it and run its policy


@dataclass(slots=True)
class Engine:
    """One of the pair: its process, the core it is pinned to, where it logs, and where its steps."""

    name: str
    core: int
    process: SpawnProcess
    pipe: Connection
    log: str
    steps: Path | None = None

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


@contextmanager
def started(
    engine_args: dict[str, Any], cores: Sequence[int], folder: Path, *, steps: bool = False
) -> Iterator[tuple[Engine, ...]]:
    """Two engines, ready, each pinned to one of the first two `cores` (one engine for one core), until the block ends.

    `steps`: with a log of their steps each.
    """
    engines = []
    for name, core in zip(("first", "second"), cores, strict=False):
        path = str(folder / f"{name}.csv") if steps else None
        engines.append(_start(name, EngineSpec(engine_args, core, str(folder / f"{name}.log"), path)))
    try:
        for engine in engines:
            engine.receive(START_TIMEOUT_S)
        for engine in engines:
            assert engine.process.pid
            for process in pinning.family(engine.process.pid):
                pinning.pin(process, engine.core)
        yield tuple(engines)
        for engine in engines:
            engine.pipe.send(None)
            engine.process.join(20)
    finally:
        for engine in engines:
            if engine.process.pid:
                pinning.stop(engine.process.pid, grace_s=5)


def play(jobs: Sequence[tuple[Engine, dict[str, Any]]], burst: Plan, *, lead_s: float = LEAD_S) -> list[Outcome]:
    """Play the burst on every engine at the same time, each under its own policy; outcomes in the order of `jobs`."""
    t0 = time.time() + lead_s
    for engine, policy in jobs:
        engine.pipe.send(replace(burst, t0=t0, policy=policy))
    return [engine.receive(RUN_TIMEOUT_S) for engine, _ in jobs]


def _start(name: str, spec: EngineSpec) -> Engine:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=engine_process, args=(spec, there), name=f"bench-{name}")
    process.start()
    there.close()
    return Engine(name, spec.core, process, here, spec.log, Path(spec.steps) if spec.steps else None)
