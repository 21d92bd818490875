"""A real vLLM Scheduler and KVCacheManager without weights, tokenizer or device, and a driver for its steps."""

from __future__ import annotations

import json
import random
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from deployments.scheduler import AsyncPolicyScheduler, PolicyScheduler, SchedulerSettings

BLOCK = 16
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}


@cache
def _model() -> ModelConfig:
    folder = tempfile.mkdtemp(prefix="tidegate-test-")
    Path(folder, "config.json").write_text(json.dumps(MODEL))
    return ModelConfig(
        model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2048, seed=0
    )


@cache
def _grammars() -> StructuredOutputManager:
    return StructuredOutputManager(vllm_config(False, SchedulerSettings()))


def vllm_config(
    async_scheduling: bool,
    settings: Any,
    *,
    blocks: int = 128,
    seqs: int = 16,
    budget: int = 256,
    **scheduler: Any,
) -> VllmConfig:
    """A resolved engine config; `blocks` usable KV blocks of 16 tokens."""
    config = VllmConfig(
        model_config=_model(),
        cache_config=CacheConfig(block_size=32, enable_prefix_caching=False),
        scheduler_config=SchedulerConfig(
            max_model_len=2048,
            is_encoder_decoder=False,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            enable_chunked_prefill=True,
            **scheduler,
        ),
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig("cpu"),
        additional_config=settings,
    )
    # The CPU platform resolves both otherwise than a GPU would.
    config.scheduler_config.async_scheduling = async_scheduling
    config.cache_config.block_size = BLOCK
    config.cache_config.num_gpu_blocks = blocks + 1  # one null block
    return config


def scheduler(
    spec: dict[str, Any],
    async_scheduling: bool = False,
    page: str | None = None,
    cls: type | None = None,
    tiers: dict[str, Any] | None = None,
    **config: Any,
) -> Any:
    """Our scheduler (or the vLLM class `cls`) over a real KV cache manager."""
    resolved = vllm_config(async_scheduling, SchedulerSettings(spec, page, tiers), **config)
    attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    kv = KVCacheConfig(resolved.cache_config.num_gpu_blocks, [], [KVCacheGroupSpec(["layer"], attention)])
    return (cls or (AsyncPolicyScheduler if async_scheduling else PolicyScheduler))(
        vllm_config=resolved,
        kv_cache_config=kv,
        structured_output_manager=_grammars(),
        block_size=BLOCK,
        log_stats=False,
    )


def tier_spec(*aging_s: float | None) -> dict[str, Any]:
    """Tiers as replicas are told of them, one for each aging time (None: never ages)."""
    return {"headroom": [0.0] * len(aging_s), "aging_s": list(aging_s)}


def request(
    name: str, prompt: int, output: int = 8, arrival: float = 0.0, ticket: int | None = None, tier: int = 0
) -> Request:
    """A request of `prompt` tokens that generates exactly `output`."""
    extra = None if ticket is None else {"tidegate": {"ticket": ticket}}
    params = SamplingParams(max_tokens=output, ignore_eos=True, extra_args=extra)
    return Request(name, [7] * prompt, params, None, arrival_time=arrival, priority=tier)


def trace(seed: int, count: int = 60, span: int = 60, tiers: int = 1) -> list[tuple[int, Request]]:
    """(step, request) of a random burst: three short prompts to one long, enough to run out of 128 KV blocks."""
    rng = random.Random(seed)
    steps = sorted(rng.randrange(span) for _ in range(count))
    return [
        (
            step,
            request(
                f"r{i}",
                rng.randint(1, 60) if rng.random() < 0.75 else rng.randint(200, 700),
                rng.randint(1, 90),
                arrival=step + i / 1000,
                ticket=i,
                tier=(7 * i) % tiers,
            ),
        )
        for i, step in enumerate(steps)
    ]


class Driver:
    """Plays the EngineCore: schedules, pretends to run the model, and keeps `depth` steps in flight.

    With `step_s`, the scheduler's clock shows the number of the step times `step_s` seconds.
    """

    def __init__(self, scheduler: Any, async_scheduling: bool = False, step_s: float | None = None) -> None:
        self.scheduler = scheduler
        self.number = 0
        if step_s is not None:
            scheduler.clock = lambda: self.number * step_s
        self.depth = 2 if async_scheduling else 1
        self.in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.admitted: list[str] = []  # request ids in the order of (re)admission
        self.finished: list[str] = []
        self.plan: list[dict[str, int]] = []  # tokens scheduled for each request, step by step

    def step(self, look: Callable[[], None] = lambda: None) -> None:
        """Schedule one step and take in the output of the oldest one in flight; `look` is called after each."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            look()
            self.admitted += [new.req_id for new in output.scheduled_new_reqs]
            self.admitted += output.scheduled_cached_reqs.resumed_req_ids
            self.plan.append(output.num_scheduled_tokens)
            names = list(output.num_scheduled_tokens)
            tokens = [[] if self.scheduler.requests[name].is_prefill_chunk else [7] for name in names]
            index = {name: i for i, name in enumerate(names)}
            self.in_flight.append((output, ModelRunnerOutput(names, index, sampled_token_ids=tokens)))
            if len(self.in_flight) < self.depth:
                return
        if not self.in_flight:
            return
        for batch in self.scheduler.update_from_output(*self.in_flight.popleft()).values():
            self.finished += [done.request_id for done in batch.outputs if done.finish_reason is not None]
        look()

    def steps(self, arrivals: Iterable[tuple[int, Request]]) -> Iterator[int]:
        """Add each arrival at its step and yield the step's number, until all is done; the caller calls `step`."""
        todo = deque(arrivals)
        for number in range(20_000):
            self.number = number
            while todo and todo[0][0] <= number:
                self.scheduler.add_request(todo.popleft()[1])
            if not (todo or self.scheduler.has_requests() or self.in_flight):
                return
            yield number
        raise AssertionError("the scheduler makes no progress")

    def run(self, arrivals: Iterable[tuple[int, Request]]) -> None:
        """Play all arrivals to the end."""
        for _ in self.steps(arrivals):
            self.step()


def walked(scheduler: Any, requests: Iterable[Request]) -> dict[str, Any]:
    """The load figures by walking every request that ever was: what the running sums must equal."""
    waiting = [r for r in scheduler.requests.values() if r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)]
    partly = [r for r in scheduler.running if r.is_prefill_chunk]
    held = sum(
        len(manager.req_to_blocks.get(name, ()))
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers
        for name in scheduler.requests
    )
    total = scheduler.cache_config.num_gpu_blocks - 1
    queue, policy = scheduler.waiting, scheduler.queue_policy
    head = queue.head
    if waiting and policy.reorders and not queue._unsorted:
        head = min(waiting, key=lambda r: policy.waiting_key(r, queue._context))
    tiers = range(len(scheduler.tiers))
    return {
        "free_blocks": total - held,
        "total_blocks": total,
        "running": len(scheduler.running),
        "waiting": len(waiting),
        "queued_tokens": sum(r.num_tokens - r.num_computed_tokens for r in waiting + partly),
        "head_blocks": -(-head.num_tokens // BLOCK) if head else 0,
        "preemptions": sum(r.num_preemptions for r in requests),
        "running_by_tier": tuple(sum(r.priority == tier for r in scheduler.running) for tier in tiers),
        "waiting_by_tier": tuple(sum(r.priority == tier for r in waiting) for tier in tiers),
    }
