"""Two real engines in one process, sequences on them, and a plain driver of moves between the two."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

from app.model import default_model_path
from deployments.cpu_binding import bind_cpu
from deployments.migration.engine_kv import EngineKV
from deployments.scheduler import SchedulerSettings, use_policy_scheduler

BLOCK = 32
LEASE_S = 20.0
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("name", "surname", "address", "telephone", "occupation")},
    "required": ["name", "surname", "address", "telephone", "occupation"],
}


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Token ids that share no block with those of another seed."""
    return [(13 * i + 977 * seed) % 40_000 + 100 for i in range(tokens)]


@dataclass
class Side:
    """One engine with its KV half."""

    engine: AsyncLLM
    kv: EngineKV

    @classmethod
    async def start(cls, core: str, blocks: int = 400, **arguments: Any) -> Side:
        """An engine as a replica starts it, in float32, under the watched scheduler, with prefix caching."""
        common = {
            "model": str(default_model_path()),
            "dtype": "float32",
            "max_model_len": 4096,
            "max_num_batched_tokens": 1024,
            "max_num_seqs": 16,
            "block_size": BLOCK,
            "num_gpu_blocks_override": blocks + 1,
            "kv_cache_memory_bytes": 1 << 30,
            "enforce_eager": True,
            "worker_extension_cls": "deployments.worker.WorkerExtension",
        }
        bound = bind_cpu({**common, **arguments}, core)
        config = AsyncEngineArgs(**bound, disable_log_stats=True).create_engine_config()
        use_policy_scheduler(config, SchedulerSettings({"name": "larry"}))
        config.scheduler_config.scheduler_cls = "tests.deployments.watched_scheduler.WatchedScheduler"
        engine = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        side = cls(engine, EngineKV(engine))
        await side.kv.start()
        return side

    async def look(self) -> dict[str, Any]:
        """Free blocks, unfinished requests, tokens of each request's first step, preemptions."""
        return await self.kv._call("look")

    async def first_step(self, request_id: str) -> int:
        """Tokens that the request's first step here computed."""
        steps = (await self.look())["first_steps"]
        return next(tokens for name, tokens in steps.items() if name.startswith(f"{request_id}-"))


class Sequence:
    """One sequence, wherever it runs: its tokens and log-probabilities so far, each counted once."""

    number = 0

    def __init__(self, tokens: list[int], **params: Any) -> None:
        Sequence.number += 1
        if schema := params.pop("schema", None):
            params["structured_outputs"] = StructuredOutputsParams(json=schema)
        self.name, self.hop, self.prompt = f"s{Sequence.number}", 0, tokens
        self.params = {"max_tokens": 100, "ignore_eos": True, "temperature": 0.0, **params}
        self.tokens: list[int] = []
        self.logprobs: list[dict[int, float]] = []
        self.finish_reason: str | None = None
        self._grown = asyncio.Event()

    @property
    def request_id(self) -> str:
        return f"{self.name}#0.{self.hop}"

    def begin(self, side: Side, entries: dict[str, Any] | None = None) -> None:
        """Run it here, from the beginning or from where `entries` say."""
        extra = {"tidegate": entries} if entries else None
        params = SamplingParams(**self.params, output_kind=RequestOutputKind.DELTA, extra_args=extra)
        self.run = asyncio.create_task(self._run(side, self.request_id, params))

    async def _run(self, side: Side, request_id: str, params: SamplingParams) -> None:
        async for output in side.engine.generate({"prompt_token_ids": self.prompt}, params, request_id):
            (delta,) = output.outputs
            if delta.finish_reason == "abort":
                return
            self.tokens += delta.token_ids
            for position in delta.logprobs or ():
                self.logprobs.append({token: round(entry.logprob, 3) for token, entry in position.items()})
            self.finish_reason = delta.finish_reason
            self._grown.set()

    async def grow_to(self, tokens: int) -> None:
        """Wait for so many tokens, or the end."""
        while len(self.tokens) < tokens and self.finish_reason is None:
            assert not self.run.done(), self.run.exception()
            await asyncio.wait_for(self._grown.wait(), 60)
            self._grown.clear()

    async def end(self) -> list[int]:
        """All its tokens."""
        await self.run
        return self.tokens


async def whole(side: Side, tokens: list[int], **params: Any) -> Sequence:
    """A sequence that stayed where it was; its KV is out of the prefix cache afterwards."""
    sequence = Sequence(tokens, **params)
    sequence.begin(side)
    await sequence.end()
    assert await side.engine.reset_prefix_cache()
    return sequence


async def move(sequence: Sequence, source: Side, destination: Side, stage: int = 16, lost: bool = False) -> int:
    """Move a running sequence; `stage` 0: all KV within the pause; `lost`: B forgets the reservation; blocks moved."""
    name, old = f"{sequence.request_id}-move", sequence.request_id
    held = -(-(len(sequence.prompt) + len(sequence.tokens)) // BLOCK)
    await destination.kv.reserve(name, held + 4, LEASE_S)
    first = 0
    while stage:
        stored = await source.kv.export(old, first, stage)
        if not stored.copied:
            break
        await destination.kv.write(name, first, stored.copied, stored.parts, LEASE_S)
        first += stored.copied
    parked = await source.kv.park(old, first, LEASE_S)
    assert parked.held <= held + 4
    await sequence.grow_to(len(parked.output))  # the last ones may still be on their way
    assert parked.output == sequence.tokens
    assert parked.computed == len(sequence.prompt) + len(parked.output) - 1
    if lost:
        await destination.kv.release(name)
    sequence.hop += 1
    entries = destination.kv.adoption(name, parked.computed, parked.first, parked.copied, parked.parts)
    sequence.begin(destination, {"output": parked.output, **entries})
    await sequence.grow_to(len(parked.output) + 1)
    await source.engine.abort(old)
    return first + parked.copied


async def all_free(*sides: Side) -> None:
    """No request, no block in use, no reference left in the prefix cache."""
    for side in sides:
        seen = await side.look()
        assert (seen["requests"], seen["free"]) == (0, side.engine.vllm_config.cache_config.num_gpu_blocks - 1)
        assert await side.engine.reset_prefix_cache()
