"""Worker side of sequences that go on where another replica stopped, and of seeded sampling on CPU.

vLLM loads `WorkerExtension` into every worker process; importing this module there replaces two names of its V1 model
runner, both contract-tested: `gpu_model_runner.CachedRequestState` and `GPUModelRunner._update_states`. The V2 runner
keeps prompt and output apart by itself and seeds by position: it needs none of this.

The extension's methods copy KV blocks out of the cache and into it, called by `collective_rpc` in order with the steps.
Names that they read, contract-tested: `Worker.model_runner`, `.rank`; the runner's `kv_caches` (one tensor per layer,
its first dimension the blocks, or parts of blocks of one size), `kv_cache_config.num_blocks`, `attn_groups`,
`compilation_config.static_forward_context` (its layers' `isa` on CPU decides how K and V lie in a block).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from deployments.hints import extra_argument
from deployments.migration.segments import Segment

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_update_states = gpu_model_runner.GPUModelRunner._update_states


class KVBlocks:
    """A worker's KV cache as blocks of bytes, and its two segments once they are open."""

    def __init__(self, runner: Any, rank: int) -> None:
        self.rank = rank
        self.layers = list({layer.data_ptr(): layer for layer in runner.kv_caches}.values())  # layers may share one
        first, self.blocks = self.layers[0], runner.kv_cache_config.num_blocks
        self.rows, rest = divmod(first.shape[0], self.blocks)  # of the tensor, for one block of the scheduler
        if rest or any((layer.shape, layer.dtype) != (first.shape, first.dtype) for layer in self.layers):
            raise ValueError(
                f"KV caches of {[tuple(layer.shape) for layer in self.layers]} are not {self.blocks} blocks"
            )
        self.block_bytes = len(self.layers) * self.rows * first[0].numel() * first.element_size()
        # Torch copies rows of bfloat16 element by element, half as fast.
        word = first.dtype if first.shape[-1] * first.element_size() % 8 else torch.int64
        self._words = [layer.view(word) for layer in self.layers]
        self.format = [
            *(len(self.layers), self.rows, str(first.dtype), *first.shape[1:]),
            *sorted({group.backend.get_name() for groups in runner.attn_groups for group in groups}),
            *sorted({str(getattr(layer, "isa", None)) for layer in _attention(runner)}),
        ]

    def open(self, outgoing: str, incoming: str) -> None:
        """Map the segments that the replica has made."""
        self._outgoing, self._incoming = Segment.open(outgoing), Segment.open(incoming)
        self._out = torch.frombuffer(self._outgoing.memory, dtype=torch.uint8)
        self._in = torch.frombuffer(self._incoming.memory, dtype=torch.uint8)

    def copy_out(self, blocks: list[int], first: int) -> None:
        """Put these blocks into the outgoing segment, whose region begins at its block `first`."""
        self._outgoing.claim(first * self.block_bytes, (first + len(blocks)) * self.block_bytes)
        index = self._index(blocks)
        for layer, place in zip(self._words, self._view(self._out, first, len(blocks)), strict=True):
            if layer.device.type == "cpu":
                torch.index_select(layer, 0, index, out=place)
            else:
                place.copy_(layer.index_select(0, index))

    def copy_in(self, blocks: list[int], first: int) -> None:
        """Fill these blocks from the incoming segment, whose region begins at its block `first`."""
        index = self._index(blocks)
        for layer, place in zip(self._words, self._view(self._in, first, len(blocks)), strict=True):
            layer.index_copy_(0, index, place.to(layer.device))

    def _index(self, blocks: list[int]) -> torch.Tensor:
        rows = [block * self.rows + row for block in blocks for row in range(self.rows)]
        return torch.tensor(rows, device=self.layers[0].device)

    def _view(self, memory: torch.Tensor, first: int, blocks: int) -> torch.Tensor:
        """So many blocks of a segment as [layer, row, ...], in the words that are copied."""
        layer = self._words[0]
        region = memory[first * self.block_bytes : (first + blocks) * self.block_bytes].view(layer.dtype)
        return region.view(len(self._words), blocks * self.rows, *layer.shape[1:])


def _attention(runner: Any) -> list[Any]:
    return list(runner.compilation_config.static_forward_context.values())


def reported(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Answers {"err": ...} instead of raising: an error of one rank would leave the others' answers in their queues."""

    @wraps(method)
    def answer(*args: Any) -> dict[str, Any]:
        try:
            with torch.inference_mode():
                return method(*args)
        except Exception as error:
            return {"err": f"{type(error).__name__}: {error}"}

    return answer


class WorkerExtension:
    """Mixed into vLLM's worker class; every method answers with a dict, {"err": ...} if it could not do its work."""

    model_runner: Any
    rank: int

    @reported
    def migration_info(self) -> dict[str, Any]:
        """Rank, bytes of a block over all layers of this rank, blocks, and what the bytes of a block depend on."""
        self._migration = blocks = KVBlocks(self.model_runner, self.rank)
        return {"rank": self.rank, "block_bytes": blocks.block_bytes, "blocks": blocks.blocks, "format": blocks.format}

    @reported
    def migration_open(self, outgoing: list[str], incoming: list[str]) -> dict[str, Any]:
        """Map the segments; the names are those of all ranks."""
        self._migration.open(outgoing[self.rank], incoming[self.rank])
        return {}

    @reported
    def migration_export(self, blocks: list[int], first: int) -> dict[str, Any]:
        """Copy these blocks to the outgoing segment, from its block `first` on."""
        self._migration.copy_out(blocks, first)
        return {}

    @reported
    def migration_import(self, blocks: list[int], first: int) -> dict[str, Any]:
        """Fill these blocks with what lies in the incoming segment from its block `first` on."""
        self._migration.copy_in(blocks, first)
        return {}


class RewindableGenerator(torch.Generator):
    """A CPU generator that can take back its last draw.

    vLLM samples after each chunk of a prompt and takes the draw back by CUDA's offset. A CPU generator has none: a
    seeded request with a prompt of two chunks would end the engine.
    """

    def mark(self) -> None:
        """Remember the state before the step's draw."""
        self._before = self.get_state()

    def get_offset(self) -> int:
        """Any number: only the way back counts."""
        return 0

    def set_offset(self, offset: int) -> None:
        """Back to the state of the last `mark`."""
        self.set_state(self._before)


def request_state(**fields: Any) -> CachedRequestState:
    """The worker's state of a new request: with the tokens that it generated elsewhere, if it did."""
    state = CachedRequestState(**fields)
    state.output_token_ids.extend(extra_argument(state, "output") or ())
    if state.generator is not None and state.generator.device.type == "cpu":
        generator = RewindableGenerator(device="cpu")
        generator.set_state(state.generator.get_state())
        state.generator = generator
    return state


def skip_draws(generator: torch.Generator, count: int, vocabulary: int) -> None:
    """Advance a seeded request's generator by so many sampled tokens, as vLLM's sampler on that device draws them."""
    if generator.device.type == "cpu":
        torch.randint(0, 2**31, (count,), generator=generator)
        return
    noise = torch.empty(vocabulary, device=generator.device)
    for _ in range(count):
        noise.exponential_(generator=generator)


@wraps(_update_states)
def update_states(runner: Any, scheduler_output: SchedulerOutput) -> Any:
    """Before the step's draws: skip those that a continued request has made elsewhere, mark the others."""
    result = _update_states(runner, scheduler_output)
    for new in scheduler_output.scheduled_new_reqs:
        state = runner.requests[new.req_id]
        if state.generator is not None and (drawn := len(extra_argument(state, "output") or ())):
            skip_draws(state.generator, drawn, runner.input_batch.vocab_size)
    for generator in runner.input_batch.generators.values():
        if isinstance(generator, RewindableGenerator):
            generator.mark()
    return result


gpu_model_runner.CachedRequestState = request_state
gpu_model_runner.GPUModelRunner._update_states = update_states
