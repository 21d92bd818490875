"""How old a load report is when it arrives and when a routing decision uses it: real pages, ZMQ and fleet table.

Publishers run in a few processes, as replicas do; in each a task plays the EngineCore and writes figures to its page
after every "step". The router half runs here and makes decisions at random times.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import uvloop

from deployments.load_page import Figures, LoadPage
from deployments.reports import ReportPublisher, ReportSubscriber
from deployments.wire import ReplicaReport, ticket
from loadgen.metrics import percentile
from policies.balancing import BALANCING
from policies.fleet import FleetTable
from policies.types import Call

PROCESSES = 4
DECISIONS_PER_S = 200.0
EVENTS_PER_STEP = 0.1  # share of the steps in which a request comes or goes
SETTLE_S = 1.0
DRAIN_S = 0.3


@dataclass(slots=True)
class Written:
    """What one engine wrote: `t` of every step, and of those steps alone that changed the number of requests."""

    steps: list[float] = field(default_factory=list)
    events: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Observed:
    """The router's side: per replica (t of the figures, now) of its reports; (replica, now, t used) per decision."""

    arrivals: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    uses: list[tuple[str, float, float]] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0


def ages(publishers: int, step_s: float, seconds: float, seed: int) -> dict[str, Any]:
    """Run `publishers` replicas whose steps take `step_s` on average for `seconds`; percentiles in milliseconds.

    delivery_count  from a request's coming or going being written to the page until the router's table shows it
    delivery_step   the same for the figures of any step (free blocks and queued tokens alone are sent less often)
    age_at_use      from writing to a decision that uses the figures; even an instant transport leaves half a step
    behind          at a decision: for how long newer figures have existed that the table does not have yet (0: none)
    """
    context = multiprocessing.get_context("spawn")
    pipes, children = [], []
    processes = min(PROCESSES, publishers)
    for i in range(processes):
        here, there = context.Pipe()
        names = [f"replica-{k}" for k in range(i, publishers, processes)]
        child = context.Process(target=_publishers, args=(there, names, step_s, seed + i), daemon=True)
        child.start()
        there.close()
        pipes.append(here)
        children.append(child)
    try:
        endpoints = {name: endpoint for pipe in pipes for name, endpoint in pipe.recv().items()}
        observed = uvloop.run(_route(endpoints, seconds, seed))
        for pipe in pipes:
            pipe.send("stop")
        written = {name: log for pipe in pipes for name, log in pipe.recv().items()}
    finally:
        for child in children:
            child.join(10)
            child.kill()
    return _summary(observed, written)


async def _route(endpoints: dict[str, str], seconds: float, seed: int) -> _Observed:
    rng = np.random.default_rng(seed)
    table, policy = FleetTable(), BALANCING.make("sal")
    for name in endpoints:
        table.join(name)
    observed, newest = _Observed(), dict[str, float]()

    def on_report(report: ReplicaReport) -> None:
        now = time.time()
        table.apply(report, now)
        newest[report.replica] = report.t
        observed.arrivals.setdefault(report.replica, []).append((report.t, time.time()))

    subscriber = ReportSubscriber(on_report, asyncio.get_running_loop())
    subscriber.set_endpoints(endpoints.values())
    await asyncio.sleep(SETTLE_S)
    if missing := endpoints.keys() - newest.keys():
        raise RuntimeError(f"no report from {len(missing)} of {len(endpoints)} publishers after {SETTLE_S} s")
    observed.began = time.time()
    deadline = observed.began + seconds
    while time.time() < deadline:
        await asyncio.sleep(rng.exponential(1 / DECISIONS_PER_S))
        chosen = table.ids[policy.choose(table, Call(500), rng)]
        now = time.time()
        # SAL prefers some replicas; ages are taken over all of them alike.
        for name in (chosen, table.ids[int(rng.random() * len(table.ids))]):
            observed.uses.append((name, now, newest[name]))
    observed.ended = time.time()
    await asyncio.sleep(DRAIN_S)  # figures written until then may still arrive
    subscriber.close()
    return observed


def _summary(observed: _Observed, written: dict[str, Written]) -> dict[str, Any]:
    span = observed.began, observed.ended
    series = {
        "delivery_count": [d for n, log in written.items() for d in delivery(log.events, observed.arrivals[n], *span)],
        "delivery_step": [d for n, log in written.items() for d in delivery(log.steps, observed.arrivals[n], *span)],
        "age_at_use": [now - t for _, now, t in observed.uses],
        "behind": [behind(written[name].steps, t, now) for name, now, t in observed.uses],
    }
    figures: dict[str, Any] = {
        name: {f"p{p}_ms": percentile(values, p) * 1e3 for p in (50, 90, 99)} for name, values in series.items()
    }
    reports = sum(span[0] <= now < span[1] for arrivals in observed.arrivals.values() for _, now in arrivals)
    figures["reports_per_s"] = reports / (span[1] - span[0])
    figures["decisions"] = len(observed.uses)
    return figures


def delivery(
    written: list[float], arrivals: list[tuple[float, float]], began: float, ended: float
) -> npt.NDArray[np.float64]:
    """For each time of `written` in the span: seconds until figures at least that new arrived.

    `arrivals` are (time of the figures, time of arrival) in order; what never arrived counts as arriving at infinity.
    """
    times = np.asarray([t for t in written if began <= t < ended])
    figures, arrived = np.asarray([*arrivals, (np.inf, np.inf)]).T
    waited: npt.NDArray[np.float64] = arrived[np.searchsorted(figures, times, side="left")] - times
    return waited


def behind(written: list[float], used: float, now: float) -> float:
    """Seconds that figures newer than those of time `used` had existed at `now`; 0 if there were none."""
    first_newer = int(np.searchsorted(written, used, side="right"))
    return max(now - written[first_newer], 0.0) if first_newer < len(written) else 0.0


def _publishers(pipe: Connection, names: list[str], step_s: float, seed: int) -> None:
    uvloop.run(_publish(pipe, names, step_s, seed))


async def _publish(pipe: Connection, names: list[str], step_s: float, seed: int) -> None:
    pages = {name: LoadPage.create(f"tidegate-bench-{os.getpid()}-{name}") for name in names}
    publishers = {name: ReportPublisher(page, name, "127.0.0.1") for name, page in pages.items()}
    logs = {name: Written() for name in names}
    engines = [
        asyncio.create_task(_engine(name, pages[name], logs[name], step_s, np.random.default_rng([seed, i])))
        for i, name in enumerate(names)
    ]
    try:
        pipe.send({name: publisher.endpoint for name, publisher in publishers.items()})
        await asyncio.to_thread(pipe.recv)
        pipe.send(logs)
    finally:
        for engine in engines:
            engine.cancel()
        for publisher in publishers.values():
            publisher.close()
        for page in pages.values():
            page.close()


async def _engine(name: str, page: LoadPage, log: Written, step_s: float, rng: np.random.Generator) -> None:
    running, admitted = 8, 0
    while True:
        await asyncio.sleep(step_s * rng.uniform(0.5, 1.5))
        tickets = []
        event = rng.random() < EVENTS_PER_STEP
        if event:
            running += 1 if running < 4 or (running < 16 and rng.random() < 0.5) else -1
            admitted += 1
            tickets = [ticket(f"{name}-{admitted}", 0)]
        now = time.time()
        page.write(
            Figures(
                t=now,
                free_blocks=int(rng.integers(500)),
                total_blocks=512,
                block_size=32,
                running=running,
                waiting=0,
                queued_tokens=int(rng.integers(2000)),
                head_blocks=0,
                batch_tokens=512,
                max_num_seqs=32,
                preemptions=0,
                steps=len(log.steps),
            ),
            tickets,
        )
        log.steps.append(now)
        if event:
            log.events.append(now)
