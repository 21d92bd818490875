"""One real engine in a process of its own, driven through a pipe: the child half of engine_pair.py."""

from __future__ import annotations

import asyncio
import os
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from deployments.cpu_binding import bind_cpu
from loadgen.metrics import RequestRecord

if TYPE_CHECKING:
    from deployments.load_page import Figures, LoadPage

WARM_UP_TOKENS = 300
IDLE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What to start: engine arguments by vLLM's names, the core to run on, the file to log to.

    `steps`: the file for a row about each step of the engine (deployments/step_log.py), if any.
    """

    engine_args: dict[str, Any]
    core: int
    log: str
    steps: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A burst: token ids of each prompt, answer lengths (tokens), seconds after `t0` (wall clock) it is due.

    `policy` is the spec `{"name": ..., **parameters}` of the scheduling policy to play it under; policies may know the
    answer lengths (an oracle).
    """

    t0: float
    policy: dict[str, Any]
    due: list[float]
    prompts: list[list[int]]
    output_lens: list[int]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the engine did with a plan; `preemptions` counts running requests put back into the queue."""

    records: list[RequestRecord]
    preemptions: int


def engine_process(spec: EngineSpec, pipe: Connection) -> None:
    """Entry point of the child: start the engine, say "ready", then answer each Plan with an Outcome until None.

    Anything that goes wrong is sent to the parent as text.
    """
    log = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"  # vLLM reads it when it is imported
    try:
        asyncio.run(_serve(bind_cpu(spec.engine_args, str(spec.core)), spec.steps, pipe))
    except BaseException:
        pipe.send(traceback.format_exc())
        raise


async def _serve(engine_args: dict[str, Any], steps: str | None, pipe: Connection) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from deployments.load_page import LoadPage
    from deployments.scheduler import SchedulerSettings, use_policy_scheduler

    page = LoadPage.create(f"tidegate-bench-{os.getpid()}")
    config = AsyncEngineArgs(**engine_args, async_scheduling=False).create_engine_config()
    use_policy_scheduler(config, SchedulerSettings(page=page.name, step_log=steps))
    engine = AsyncLLM.from_vllm_config(config)
    try:
        await _ask(engine, WARM_UP_TOKENS, 8)
        pipe.send("ready")
        while (plan := await asyncio.to_thread(pipe.recv)) is not None:
            await _use_policy(engine, page, plan.policy)
            before = _figures(page).preemptions
            records = await _play(engine, plan)
            pipe.send(Outcome(records, (await _idle(page)).preemptions - before))
    finally:
        engine.shutdown()
        page.close()


async def _use_policy(engine: Any, page: LoadPage, policy: dict[str, Any]) -> None:
    """Change the policy of the idle engine, by the same way as a running replica's."""
    from deployments.scheduler import make_policy

    make_policy(policy)  # the engine would log a refusal and go on under the policy before
    version = page.set_policy(policy)
    await _ask(engine, 1, 1)
    if (found := _figures(page).policy_version) != version:
        raise RuntimeError(f"the engine runs policy setting {found}, not {version}: {policy}")


async def _ask(engine: Any, prompt_tokens: int, answer_tokens: int) -> None:
    """One request: the engine takes at least one scheduler step, in which it sees a new policy."""
    await _play(engine, Plan(time.time(), {}, [0.0], [[5] * prompt_tokens], [answer_tokens]))


def _figures(page: LoadPage) -> Figures:
    figures = page.read()
    if figures is None:
        raise RuntimeError("the engine has written no load figures")
    return figures


async def _idle(page: LoadPage) -> Figures:
    """Figures of the engine once all it had is gone; RuntimeError if a request or a KV block stays behind."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while True:
        figures = _figures(page)
        if figures.running == figures.waiting == 0 and figures.free_blocks == figures.total_blocks:
            return figures
        if time.monotonic() > deadline:
            raise RuntimeError(f"all requests have ended, but the engine is not empty: {figures}")
        await asyncio.sleep(0.05)


async def _play(engine: Any, plan: Plan) -> list[RequestRecord]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    async def one(i: int) -> RequestRecord:
        due, prompt, length = plan.due[i], plan.prompts[i], plan.output_lens[i]
        await asyncio.sleep(max(0.0, plan.t0 + due - time.time()))
        sent = time.time() - plan.t0
        params = SamplingParams(
            max_tokens=length,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"tidegate": {"ticket": i, "output_tokens": length}},
        )
        first, count = 0.0, 0
        async for out in engine.generate({"prompt_token_ids": prompt}, params, request_id=f"{plan.t0}-{i}"):
            first = first or time.time() - plan.t0
            count += len(out.outputs[0].token_ids)
        return RequestRecord(due, sent, len(prompt), count, first - due, time.time() - plan.t0 - due)

    return list(await asyncio.gather(*(one(i) for i in range(len(plan.due)))))
