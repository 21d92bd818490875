"""A real vLLM scheduler and KV cache manager for a model and a device that are not there.

Neither weights nor a tokenizer are read. Private names of vLLM 0.32 beyond those of deployments/scheduler.py, held by
tests/loadgen/test_simulator_engine.py: the constructor of `Scheduler`, `KVCacheConfig`, `KVCacheGroupSpec`,
`FullAttentionSpec`, `StructuredOutputManager`, `Request`.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from deployments.scheduler import AsyncPolicyScheduler, PolicyScheduler, SchedulerSettings
from loadgen.simulator.hardware import MODELS, Model
from loadgen.simulator.lean import TOKEN, lean
from loadgen.simulator.prefixes import Content, count_hits


@dataclass(frozen=True, slots=True)
class Shape:
    """An engine's limits: KV blocks of `block_size` tokens, requests and tokens of a step, tokens of a request.

    `asynchronous`: the next step is scheduled while one runs, vLLM's default on GPU (and never on CPU).
    `prefix_caching`: blocks stay known by their content when their request has ended, until they are needed.
    """

    kv_blocks: int
    max_model_len: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    asynchronous: bool = True
    prefix_caching: bool = False

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} are too few for a token of each of "
                f"{self.max_num_seqs} sequences; give more, or a lower max_num_seqs"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest request (prompt and answer) that this engine can finish."""
        return min(self.max_model_len, self.kv_blocks * self.block_size)


@contextmanager
def _quiet() -> Iterator[None]:
    """vLLM says much about each configuration; here only errors count."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _config(model: Model, shape: Shape, settings: SchedulerSettings) -> VllmConfig:
    with tempfile.TemporaryDirectory(prefix="tidegate-simulator-") as folder:
        Path(folder, "config.json").write_text(json.dumps(model.config()))
        described = ModelConfig(
            model=folder,
            tokenizer=folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=shape.max_model_len,
            seed=0,
        )
        config = VllmConfig(
            model_config=described,
            cache_config=CacheConfig(block_size=32, enable_prefix_caching=shape.prefix_caching),
            scheduler_config=SchedulerConfig(
                max_model_len=shape.max_model_len,
                is_encoder_decoder=False,
                max_num_seqs=shape.max_num_seqs,
                max_num_batched_tokens=shape.max_num_batched_tokens,
                enable_chunked_prefill=True,
            ),
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig("cpu"),
            additional_config=settings,
        )
    # The CPU platform resolves these otherwise than a GPU would.
    config.scheduler_config.async_scheduling = shape.asynchronous
    config.cache_config.block_size = shape.block_size
    config.cache_config.num_gpu_blocks = shape.kv_blocks + 1  # one null block
    return config


@cache
def _grammars() -> Any:
    """One for all schedulers: it takes 0.7 s to make, and no simulated request has a grammar."""
    return StructuredOutputManager(_config(MODELS["smollm2-135m"], Shape(8, 128), SchedulerSettings()))


def schedulers(model: Model, shape: Shape, settings: SchedulerSettings, count: int, *, fast: bool = True) -> list[Any]:
    """So many schedulers with a KV cache each; `fast`: with the short cuts of loadgen/simulator/lean.py.

    Raises PolicyError for a policy that cannot be made.
    """
    with _quiet():
        config = _config(model, shape, settings)
        attention = FullAttentionSpec(
            block_size=shape.block_size, num_kv_heads=model.kv_heads, head_size=model.head_dim, dtype=torch.bfloat16
        )
        blocks = config.cache_config.num_gpu_blocks
        product = AsyncPolicyScheduler if shape.asynchronous else PolicyScheduler
        cls = lean(product) if fast else product
        made = [
            cls(
                vllm_config=config,
                kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layers"], attention)]),
                structured_output_manager=_grammars(),
                block_size=shape.block_size,
                log_stats=False,
            )
            for _ in range(count)
        ]
    if shape.prefix_caching:
        for scheduler in made:
            count_hits(scheduler)
    return made


def request(
    name: str,
    prompt_tokens: int,
    output_tokens: int,
    arrival: float = 0.0,
    *,
    tier: int = 0,
    ticket: int | None = None,
    oracle: bool = False,
    told: int | None = None,
    generated: int = 0,
    content: Content | None = None,
    adopt: dict[str, Any] | None = None,
) -> Any:
    """A vLLM request that generates exactly `output_tokens`; `arrival` is in seconds of the scheduler's clock.

    `oracle`: policies that ask for the length of the answer are told, `told` if that is not the true one. So many
    tokens were `generated` elsewhere.
    `content`: what the prompt consists of, for prefix caching. `adopt`: it takes over a reservation
    (deployments/migration/kv_scheduler.py).
    """
    ours: dict[str, Any] = {}
    if generated:
        ours["output"] = [content.answer if content else TOKEN] * generated
    if ticket is not None:
        ours["ticket"] = ticket
    if adopt is not None:
        ours["adopt"] = adopt
    if oracle:
        ours["output_tokens"] = output_tokens if told is None else told
    limits = SamplingParams(max_tokens=output_tokens, ignore_eos=True, extra_args={"tidegate": ours} if ours else None)
    prompt, answer, hasher = content or ([TOKEN] * prompt_tokens, TOKEN, None)
    made = Request(name, prompt, limits, None, arrival_time=arrival, priority=tier, block_hasher=hasher)
    made.answer = answer
    return made
