"""One run from the first question to the last answer: server, prompts, hooks, progress, what the server counted."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
from rich.console import Console

from loadgen.client import CHAT, COMPLETIONS, Client, StreamingClient
from loadgen.run import counters, handle
from loadgen.run.drive import Watch, drive
from loadgen.run.figures import Sent, known_lengths
from loadgen.run.hooks import run_hooks
from loadgen.run.progress import Progress
from loadgen.run.prompts import ProbeFailed, probe, prompts
from loadgen.workloads.workload import Workload

APIS = {"chat": CHAT, "completions": COMPLETIONS}
LEAD = 0.2  # s between the last preparation and the start of the run
SLACK = 60.0  # s that a request may take beyond the end of the run before aiohttp gives it up


@dataclass(slots=True)
class Measured:
    """What came of a run."""

    sent: list[Sent]
    hooks: list[dict[str, Any]]
    counted: dict[str, float] | None
    template_tokens: int
    model: str
    interrupted: bool


async def measure(args: argparse.Namespace, workload: Workload, keys: Mapping[str, str], console: Console) -> Measured:
    """Make the run that the options of `run` ask for; ProbeFailed if the server does not answer a first question."""
    secret = os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {secret}"} if secret else {}
    by_handle = args.url.startswith(handle.PREFIX)
    base = args.url.rstrip("/").removesuffix("/v1")
    pages, late = counters.pages(args.metrics_url or ([] if by_handle else [f"{base}/metrics"]))
    timeout = args.drain + workload.requests[-1].due + SLACK
    async with aiohttp.ClientSession(headers=headers) as session, _client(args, session, headers, timeout) as found:
        client, model = found
        extra = args.template_tokens
        if extra is None:
            # With a key where the workload's requests have one: without, the server might refuse the question.
            known = {"Authorization": f"Bearer {next(iter(keys.values()))}"} if keys else {}
            extra = await probe(client, APIS[args.api], known, args.body)
        asked = prompts(
            workload,
            path=APIS[args.api],
            template_tokens=extra,
            tier_place="body" if by_handle else args.tier_in,
            keys=keys,
            body={**({"return_token_ids": True} if args.token_ids else {}), **args.body},
            seed=args.seed,
            run_id=f"run{os.getpid()}",
        )
        await asyncio.sleep(late)  # what was counted before the run is not the run's
        before = await counters.scrape(session, pages)
        watch = Watch(len(asked))
        hooks_done: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, watch.stop)
        gc.collect()
        gc.freeze()  # the prompts stay: collections during the run need not look at them
        t0 = time.perf_counter() + LEAD
        hooks = loop.create_task(run_hooks(args.at, t0, hooks_done))
        try:
            async with Progress(console, watch):
                records = await drive(client, workload.requests, asked, drain=args.drain, watch=watch, t0=t0)
        finally:
            gc.unfreeze()
            loop.remove_signal_handler(signal.SIGINT)
            hooks.cancel()
            with suppress(asyncio.CancelledError):
                await hooks
        await asyncio.sleep(late)
        after = await counters.scrape(session, pages)
    sent = [(i, workload.requests[i], record) for i, record in enumerate(records)]
    counted = counters.difference(before, after)
    return Measured(known_lengths(sent), hooks_done, counted, extra, model, watch.stopped.is_set())


@asynccontextmanager
async def _client(
    args: argparse.Namespace, session: aiohttp.ClientSession, headers: Mapping[str, str], timeout: float
) -> AsyncIterator[tuple[Client, str]]:
    if args.url.startswith(handle.PREFIX):
        if args.model is None:
            raise ProbeFailed("a Python handle lists no models: name it (--model)")
        yield handle.connect(args.url.removeprefix(handle.PREFIX), args.model), args.model
        return
    base = args.url.rstrip("/").removesuffix("/v1")
    model = args.model or await _first_model(session, base)
    async with StreamingClient(base, model, timeout, headers) as client:
        yield client, model


async def _first_model(session: aiohttp.ClientSession, base: str) -> str:
    async with session.get(f"{base}/v1/models", timeout=aiohttp.ClientTimeout(total=30)) as response:
        if response.status != 200:
            raise ProbeFailed(f"{base}/v1/models answers {response.status}: name the model (--model)")
        listed = await response.json()
    try:
        return str(listed["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise ProbeFailed(f"{base}/v1/models lists no model: name it (--model)") from None
