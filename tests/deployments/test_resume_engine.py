"""A sequence that goes on in another submission, on a real engine: the answer equals the undisturbed one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from vllm import AsyncEngineArgs, SamplingParams
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

from app.model import default_model_path
from deployments.cpu_binding import bind_cpu
from deployments.scheduler import SchedulerSettings, use_policy_scheduler

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
LONG = [(13 * i) % 40_000 + 100 for i in range(1200)]  # more than one chunk of 512
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 7},
    "seeded-long": {"temperature": 0.9, "seed": 8, "prompt": LONG},
    "penalties": {"temperature": 0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "seeded-penalties": {"temperature": 1.0, "seed": 9, "presence_penalty": 1.5},
    "top-p": {"temperature": 1.0, "seed": 10, "top_p": 0.8, "top_k": 40},
    "logprobs": {"temperature": 0, "logprobs": 3},
    "min-tokens": {"temperature": 0, "ignore_eos": False, "min_tokens": 20},
    "json": {"temperature": 0, "ignore_eos": False, "max_tokens": 60, "schema": True},
}
PROMPT = [(7 * i) % 30_000 + 200 for i in range(45)]


def start() -> AsyncLLM:
    """An engine as a replica starts it, in float32."""
    arguments = {
        "model": str(default_model_path()),
        "dtype": "float32",
        "max_model_len": 2048,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 16,
        "block_size": 32,
        "kv_cache_memory_bytes": 512 << 20,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "worker_extension_cls": "deployments.worker.WorkerExtension",
    }
    config = AsyncEngineArgs(**bind_cpu(arguments, "0"), disable_log_stats=True).create_engine_config()
    use_policy_scheduler(config, SchedulerSettings({"name": "larry"}))
    return AsyncLLM.from_vllm_config(config, disable_log_stats=True)


async def generate(engine: AsyncLLM, name: str, begun: list[int] | None = None) -> CompletionOutput:
    """The case's answer, or what follows the tokens `begun`."""
    case = {"max_tokens": 40, "ignore_eos": True, **CASES[name]}
    prompt = case.pop("prompt", PROMPT)
    if case.pop("schema", False):
        case["structured_outputs"] = StructuredOutputsParams(json=SCHEMA)
    extra = {"tidegate": {"output": begun}} if begun else None
    params = SamplingParams(**case, output_kind=RequestOutputKind.FINAL_ONLY, extra_args=extra)
    number = f"{name}-{len(begun or ())}"
    outputs = [output async for output in engine.generate({"prompt_token_ids": prompt}, params, number)]
    return outputs[-1].outputs[0]


async def play() -> None:
    engine = start()
    try:
        whole = dict(zip(CASES, await asyncio.gather(*(generate(engine, name) for name in CASES)), strict=True))
        cuts = [(name, cut) for name, answer in whole.items() for cut in (1, 7, len(answer.token_ids) - 1)]
        rests = await asyncio.gather(*(generate(engine, n, list(whole[n].token_ids[:cut])) for n, cut in cuts))
        for (name, cut), rest in zip(cuts, rests, strict=True):
            answer = whole[name]
            assert list(rest.token_ids) == list(answer.token_ids[cut:]), (name, cut)
            assert rest.finish_reason == answer.finish_reason, (name, cut)
            if answer.logprobs is not None and rest.logprobs is not None:
                for mine, theirs in zip(rest.logprobs, answer.logprobs[cut:], strict=True):
                    assert {t: round(p.logprob, 3) for t, p in mine.items()} == {
                        t: round(p.logprob, 3) for t, p in theirs.items()
                    }
    finally:
        engine.shutdown()


def test_continued_answers_equal_undisturbed_ones() -> None:
    """Greedy, seeded, with penalties, minimum length, log-probabilities or a grammar, cut early, later and at the end.

    The long seeded prompt takes three chunks: vLLM's CPU engine dies of that without RewindableGenerator.
    """
    asyncio.run(play())
