"""What prompts consist of, as far as a prefix cache can tell: block hashes from a workload's numbers of equal content.

A workload says `blocks`: numbers of so many prompt tokens each, equal where the text up to there is equal
(loadgen/workloads/workload.py). What they do not cover is the request's own, and so is its answer, which no later
prompt has in it.

Two ways that find the same blocks equal. vLLM's own: tokens that differ where the content does, SHA-256 over each block
and the one before. The fast one needs no tokens: all that precedes a position is known by a number, which with the
position is the block's key. `tests/loadgen/test_simulator_prefix.py` holds them against each other.

Private names of vLLM 0.32, held by that test: `Request(block_hasher=)`, `.block_hashes`;
`kv_cache_utils.get_request_block_hasher`, `.init_none_hash`; `KVCacheManager.log_stats`, `.prefix_cache_stats`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.metrics.stats import PrefixCacheStats

from loadgen.simulator.lean import TOKEN

EMPTY = 0  # the number of what precedes the first token
OWN = -1  # and, with a request's number, of what has tokens of that request in it


class Content(NamedTuple):
    """A prompt's token ids, the one that its answer consists of, and what gives vLLM's Request its blocks' hashes."""

    prompt: list[int]
    answer: int
    hasher: Callable[[Any], list[bytes]]


class Contents:
    """Contents of a run's prompts. `block_size`: tokens of a KV block; `unit`: prompt tokens of a number in `blocks`.

    `plain`: with token ids and hashes as vLLM makes them.
    """

    def __init__(self, block_size: int, unit: int, *, plain: bool = False) -> None:
        self._size, self._unit = block_size, unit
        self._known: dict[tuple[int, int], int] = {}  # (what precedes, what follows) -> what precedes then
        self._vllm: Callable[[Any], list[Any]] | None = None
        if plain:
            init_none_hash(sha256)
            self._vllm = get_request_block_hasher(block_size, sha256)

    def of(self, number: int, prompt_tokens: int, blocks: Sequence[int]) -> Content:
        """The content of request `number`, which always has the same; ValueError for blocks without a size."""
        if blocks and self._unit < 1:
            raise ValueError("block_tokens: the requests have blocks; say how many prompt tokens each stands for")
        covered = min(len(blocks) * self._unit, prompt_tokens)
        if self._vllm is None:
            hasher = self._hasher(number, blocks, covered)
            return Content([TOKEN] * prompt_tokens, TOKEN, hasher)
        # Even numbers above TOKEN's stand for blocks, odd ones for what is a request's own.
        shared = [TOKEN + 1 + 2 * block for block in blocks for _ in range(self._unit)][:covered]
        own = TOKEN + 2 + 2 * number
        return Content(shared + [own] * (prompt_tokens - covered), own, self._vllm)

    def _hasher(self, number: int, blocks: Sequence[int], covered: int) -> Callable[[Any], list[bytes]]:
        size, unit, known = self._size, self._unit, self._known
        before = EMPTY
        chain = []
        for block in blocks[: -(-covered // unit) if covered else 0]:
            before = known.setdefault((before, block), len(known) + 1)
            chain.append(before)
        own = known.setdefault((OWN, number), len(known) + 1)

        def hashes(request: Any) -> list[bytes]:
            """Keys of the blocks that are full by now and were not before."""
            ends = range((len(request.block_hashes) + 1) * size, request.num_tokens + 1, size)
            return [(chain[(e - 1) // unit] if e <= covered else own).to_bytes(8) + e.to_bytes(4) for e in ends]

        return hashes


def count_hits(scheduler: Any) -> None:
    """Make the scheduler's cache count looked-up and found tokens, as vLLM's metrics do."""
    manager = scheduler.kv_cache_manager
    manager.log_stats, manager.prefix_cache_stats = True, PrefixCacheStats()


def hits_of(scheduler: Any) -> tuple[int, int]:
    """Prompt tokens looked up, and those of them that were cached; (0, 0) without prefix caching.

    Both when a request is admitted for the first time: what a preempted one finds of its own does not count.
    """
    stats = scheduler.kv_cache_manager.prefix_cache_stats
    return (stats.queries, stats.hits) if stats is not None else (0, 0)
