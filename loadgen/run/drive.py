"""Send the requests of a workload at their times, whatever becomes of earlier ones, and record how each ended."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from loadgen.client import Client, Prompt
from loadgen.metrics import RequestRecord
from loadgen.workloads.workload import Request

CANCELLED, UNFINISHED = "cancelled", "unfinished"


@dataclass(slots=True)
class Watch:
    """Where a run stands, for a progress bar: requests planned, sent, answered with a first token, ended by outcome.

    `stop()` ends it early: nothing more is sent, and what is open is left.
    """

    planned: int
    sent: int = 0
    started: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    lag: float = 0.0
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def open(self) -> int:
        """Requests sent and not ended."""
        return self.sent - self.ended.total()

    def stop(self) -> None:
        """End the run as soon as possible."""
        self.stopped.set()

    def first_token(self) -> None:
        """One more answer has begun."""
        self.started += 1


async def drive(
    client: Client,
    requests: Sequence[Request],
    prompts: Sequence[Prompt],
    *,
    drain: float,
    watch: Watch,
    t0: float | None = None,
) -> list[RequestRecord]:
    """A record for each request that was sent, in their order; times since `t0` (`perf_counter` s, default now).

    A request is left when its `cancel_after` or deadline comes, and all are left `drain` seconds after the last was
    due. Those that were never sent because the run was stopped have no record.
    """
    t0 = time.perf_counter() if t0 is None else t0
    last = requests[-1].due + drain if requests else 0.0
    tasks: list[asyncio.Task[RequestRecord]] = []

    async def one(request: Request, prompt: Prompt) -> RequestRecord:
        now = time.perf_counter() - t0
        watch.lag = max(watch.lag, now - request.due)
        watch.sent += 1
        leave_at, why = _leaves(request, now, last)
        record = await client.ask(prompt, t0, request.due, leave_at, why, watch.first_token)
        if record.left and watch.stopped.is_set() and time.perf_counter() - t0 < leave_at:
            record = replace(record, left=UNFINISHED, error=UNFINISHED)
        watch.ended[record.outcome] += 1
        return record

    for request, prompt in zip(requests, prompts, strict=True):
        await _pause(max(0.0, t0 + request.due - time.perf_counter()), watch.stopped)
        if watch.stopped.is_set():
            break
        tasks.append(asyncio.get_running_loop().create_task(one(request, prompt)))
    stopping = asyncio.get_running_loop().create_task(watch.stopped.wait())
    ending = asyncio.get_running_loop().create_task(_all(tasks))
    waiting: set[asyncio.Task[Any]] = {ending, stopping}
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if watch.stopped.is_set():
        client.leave_all()
    return await ending


async def _all(tasks: list[asyncio.Task[RequestRecord]]) -> list[RequestRecord]:
    return list(await asyncio.gather(*tasks))


async def _pause(seconds: float, stopped: asyncio.Event) -> None:
    if seconds <= 0.5:
        await asyncio.sleep(seconds)
        return
    try:
        await asyncio.wait_for(stopped.wait(), seconds)
    except TimeoutError:
        return


def _leaves(request: Request, sent: float, last: float) -> tuple[float, str]:
    """When the client leaves a request sent at `sent`, and why; `last`: when the run ends."""
    gives_up = last if request.deadline is None else min(last, request.due + request.deadline)
    if request.cancel_after is not None and sent + request.cancel_after < gives_up:
        return sent + request.cancel_after, CANCELLED
    return gives_up, UNFINISHED
