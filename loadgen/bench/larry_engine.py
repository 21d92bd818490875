"""One real engine in a process of its own, driven through a pipe: the child half of `bench larry`."""

from __future__ import annotations

import asyncio
import os
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from loadgen.metrics import RequestRecord

WARM_UP_TOKENS = 300


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What to start: policy as in the replica's config, engine arguments by vLLM's names, core to run on."""

    policy: dict[str, Any]
    engine_args: dict[str, Any]
    core: int
    log: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A burst: token ids of each prompt, answer lengths (tokens), seconds after `t0` (wall clock) it is due."""

    t0: float
    due: list[float]
    prompts: list[list[int]]
    output_lens: list[int]


@dataclass(slots=True)
class Outcome:
    """What the engine did with a plan; `preemptions` counts running requests put back into the queue."""

    records: list[RequestRecord] = field(default_factory=list)
    preemptions: int = 0


def engine_process(spec: EngineSpec, pipe: Connection) -> None:
    """Entry point of the child: start the engine, say "ready", then answer each Plan with an Outcome until None.

    Anything that goes wrong is sent to the parent as text.
    """
    log = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # vLLM reads these when it is imported, so they must be set before.
    os.environ.update(VLLM_CPU_OMP_THREADS_BIND=str(spec.core), OMP_NUM_THREADS="1", VLLM_LOGGING_LEVEL="WARNING")
    try:
        asyncio.run(_serve(spec, pipe))
    except BaseException:
        pipe.send(traceback.format_exc())
        raise


async def _serve(spec: EngineSpec, pipe: Connection) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    from deployments.scheduler import SchedulerSettings, scheduler_class

    preempted = 0

    class CountPreemptions(StatLoggerBase):  # type: ignore[misc]  # vLLM is read as Any
        """Adds up the preemptions that the scheduler reports each step."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
            nonlocal preempted
            if iteration_stats is not None:
                preempted += iteration_stats.num_preempted_reqs

        def log_engine_initialized(self) -> None:
            pass

    args = AsyncEngineArgs(
        **spec.engine_args,
        async_scheduling=False,
        scheduler_cls=scheduler_class(False),
        additional_config=SchedulerSettings(policy=spec.policy, page=None),
    )
    engine = AsyncLLM.from_engine_args(args, stat_loggers=[CountPreemptions])
    try:
        warm = Plan(time.time(), [0.0], [[5] * WARM_UP_TOKENS], [8])
        await _play(engine, warm)
        pipe.send("ready")
        while (plan := await asyncio.to_thread(pipe.recv)) is not None:
            preempted = 0
            records = await _play(engine, plan)
            pipe.send(Outcome(records, preempted))
    finally:
        engine.shutdown()


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
        )
        first, count = 0.0, 0
        async for out in engine.generate({"prompt_token_ids": prompt}, params, request_id=f"{plan.t0}-{i}"):
            first = first or time.time() - plan.t0
            count += len(out.outputs[0].token_ids)
        return RequestRecord(due, sent, len(prompt), count, first - due, time.time() - plan.t0 - due)

    return list(await asyncio.gather(*(one(i) for i in range(len(plan.due)))))
