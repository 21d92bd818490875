"""Start vLLM's AsyncLLM under our scheduler and run one submission on it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from vllm import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

from deployments.delta_link import DeltaSender
from deployments.scheduler import SchedulerSettings, use_policy_scheduler
from deployments.token_codec import decode_params, to_delta
from deployments.wire import Outcome, Submit

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


async def generate(engine: AsyncLLM, submit: Submit, links: DeltaSender) -> Outcome:
    """Run one submission, sending its deltas; cancellation aborts it in the engine before this returns."""
    prompt = tokens_input(submit.prompt, cache_salt=submit.cache_salt)
    prompt["arrival_time"] = submit.arrival
    params = decode_params(submit.params)
    if submit.output:
        params.extra_args["tidegate"]["output"] = submit.output
    start, finish_reason = len(submit.output), None
    try:
        async for output in engine.generate(
            prompt,
            params,
            f"{submit.rid}#{submit.epoch}",
            priority=submit.priority,
            trace_headers=submit.trace,
            reasoning_ended=submit.reasoning_ended,
            reasoning_parser_kwargs=submit.reasoning_parser_kwargs,
        ):
            delta = to_delta(submit.rid, submit.epoch, start, output)
            start += len(delta.token_ids)
            finish_reason = delta.finish_reason
            links.send(submit.reply_to, delta)
    except asyncio.CancelledError:
        raise
    except EngineDeadError as error:
        return Outcome(start, fault="engine", message=str(error))
    except (VLLMClientError, ValueError, TypeError) as error:
        return Outcome(start, fault="request", message=str(error), parameter=getattr(error, "parameter", None))
    except Exception as error:
        logger.exception("request %s failed in the engine", submit.rid)
        return Outcome(start, fault="engine", message=f"{type(error).__name__}: {error}")
    return Outcome(start, finish_reason)
