"""Start vLLM's AsyncLLM under our scheduler and run one submission on it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from vllm import AsyncEngineArgs, RequestOutput
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

from deployments.migration.sequence import request_id
from deployments.run_spans import Run
from deployments.scheduler import SchedulerSettings, use_policy_scheduler
from deployments.token_codec import decode_params, to_delta
from deployments.wire import Delta, Outcome, Submit

logger = logging.getLogger(f"ray.serve.{__name__}")


def start_engine(
    engine_args: dict[str, Any], policy: dict[str, Any], page: str, tiers: dict[str, Any] | None = None
) -> AsyncLLM:
    """Start an engine whose scheduler runs `policy` over `tiers` and writes its load figures to the page `page`."""
    arguments = AsyncEngineArgs(**engine_args, worker_extension_cls="deployments.worker.WorkerExtension")
    config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    use_policy_scheduler(config, SchedulerSettings(policy=policy, page=page, tiers=tiers))
    return AsyncLLM.from_vllm_config(
        config,
        usage_context=UsageContext.ENGINE_CONTEXT,
        stat_loggers=[RayPrometheusStatLogger],
    )


async def generate(
    engine: AsyncLLM,
    submit: Submit,
    entries: dict[str, Any],
    emit: Callable[[Delta], None],
    run: Run | None = None,
) -> Outcome:
    """Run one submission, emitting its deltas; cancellation aborts it in the engine before this returns.

    `entries` go into `extra_args["tidegate"]`: what a sequence brings from the replica that it ran on before. `run`
    gets the engine's times, for its spans.
    """
    prompt = tokens_input(submit.prompt, cache_salt=submit.cache_salt)
    prompt["arrival_time"] = submit.arrival
    params = decode_params(submit.params)
    ours = params.extra_args["tidegate"]
    ours |= entries
    if submit.output:
        ours["output"] = submit.output
        params.prompt_logprobs = None  # delivered where it began
    start, finish_reason = len(submit.output), None
    received, first = time.monotonic(), True
    try:
        async for output in engine.generate(
            prompt,
            params,
            request_id(submit),
            priority=submit.priority,
            trace_headers=submit.trace if engine.observability_config.otlp_traces_endpoint else None,
            reasoning_ended=submit.reasoning_ended,
            reasoning_parser_kwargs=submit.reasoning_parser_kwargs,
        ):
            times = None
            if first:
                first, times = False, _times(output, received)
                if run is not None:  # vLLM goes on writing into the same object
                    run.stats, run.cached_tokens = output.metrics, output.num_cached_tokens
            delta = to_delta(submit.rid, submit.epoch, start, output, hop=submit.hop, times=times)
            if delta.finish_reason == "abort":  # nobody here asked for it: the engine is being shut down
                return Outcome(start, fault="engine", message="aborted by the engine")
            start += len(delta.token_ids)
            finish_reason = delta.finish_reason
            emit(delta)
    except asyncio.CancelledError:
        raise
    except EngineDeadError as error:
        return Outcome(start, fault="engine", message=f"engine_dead: {error}")
    except (VLLMClientError, ValueError, TypeError) as error:
        return Outcome(start, fault="request", message=str(error), parameter=getattr(error, "parameter", None))
    except Exception as error:
        logger.exception("request %s failed in the engine", submit.rid)
        return Outcome(start, fault="engine", message=f"{type(error).__name__}: {error}")
    return Outcome(start, finish_reason)


def _times(output: RequestOutput, received: float) -> tuple[float, float]:
    """Seconds in the engine's queue and in the engine until this output; vLLM's times are those of one monotonic clock.

    A sequence that did not queue here (it was adopted, with its KV) has no such times.
    """
    stats = output.metrics
    queued = stats.scheduled_ts - stats.queued_ts if stats is not None and stats.queued_ts > 0 else 0.0
    return max(0.0, queued), time.monotonic() - received
