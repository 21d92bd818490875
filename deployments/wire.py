"""Messages between ingress, engine replica and router (msgspec, msgpack arrays). No vLLM, no Ray.

A request travels as one `Submit` inside a Serve call (so that the router sees it); its tokens come back as
`Delta`s, batched into one ZMQ frame per engine step and ingress (`list[Delta]`). Each (re)submission of a
stream has its own `epoch`: deltas of an older epoch are dropped by the receiver. Within an epoch a sequence may move
from replica to replica; each commit of a move has its own `hop`, and the ingress takes tokens of one hop only.
"""

from __future__ import annotations

import re
import zlib
from typing import Literal

import msgspec

ReplicaState = Literal["serving", "draining", "dead"]


class Logprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of n positions, row-major: `token_ids` and `logprobs` have n*width entries, `ranks` n.

    Column 0 is the sampled (or prompt) token, then the top-k in order.
    """

    width: int
    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class Delta(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """New tokens of one stream: exactly-once by `start`, the index of `token_ids[0]` in the sequence's output.

    `hop` numbers the moves of this epoch. The first delta of one > 0 names its `sender`, the replica to attach to, and
    its `parent`, the hop that the token before it came from (0 if this epoch has none).
    `cached_tokens` and `cache_creation_tokens` (prompt tokens found in, or written to, the prefix cache) come with
    the first delta of an epoch only, as do `times`: seconds in the engine's queue, and in the engine until that delta.
    """

    rid: str
    epoch: int
    start: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    cached_tokens: int | None = None
    cache_creation_tokens: int | None = None
    hop: int = 0
    sender: str | None = None
    parent: int = 0
    times: tuple[float, float] | None = None


class Submit(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """One sequence to generate: token ids in, `Delta`s out to the ZMQ endpoint `reply_to`.

    `params` is vLLM's SamplingParams as `token_codec` encodes it; `arrival` is wall-clock seconds, kept over re-sends;
    `priority` is the tier, 0 the highest. `output`: tokens that the sequence generated in submissions before this
    one; it goes on after them, and the first `Delta` starts at their number. `hop`: moves of this epoch before.
    """

    rid: str
    epoch: int
    reply_to: str
    prompt: list[int]
    params: bytes
    arrival: float
    priority: int = 0
    cache_salt: str | None = None
    trace: dict[str, str] | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict | None = None
    output: list[int] = []
    hop: int = 0


class Outcome(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """How a submission ended, returned by the Serve call once its last `Delta` is on its way.

    `fault`: whose fault an unfinished submission is: the `request` (400), or the `engine` (send it elsewhere).
    `moved_to`: the replica that has the sequence now, as its hop `hop`; the ingress attaches to it there.
    """

    tokens: int
    finish_reason: str | None = None
    fault: Literal["request", "engine"] | None = None
    message: str = ""
    parameter: str | None = None
    moved_to: str | None = None
    hop: int = 0


class ReplicaReport(msgspec.Struct, array_like=True, frozen=True):
    """Load of one replica, published on ZMQ PUB at least 10 times a second and at once when it changes.

    `t` is the wall-clock second at which the scheduler wrote the figures, `seq` grows by one per report.
    `queued_tokens`: prompt tokens not computed yet, of waiting and of partly prefilled requests.
    `head_blocks`: KV blocks wanted by the head of the queue (0 if none waits).
    `admitted`: tickets (see `ticket`) of the submissions that these figures count for the first time, and of the
    few reports before, so that one lost report does no harm and any number of routers can read along.
    `running_by_tier`, `waiting_by_tier`: requests of tier 0, 1, ...; tiers at the end that have none may be left out,
    also of `blocks_by_tier`, the KV blocks of the running ones (for people: half a second old, shared ones repeated).
    `moving`: the destination of each move under way from here.
    `settings`/`settings_t`: balancing settings from user_config and when they were set (newest wins).
    """

    replica: str
    seq: int
    t: float
    state: ReplicaState
    free_blocks: int
    total_blocks: int
    block_size: int
    running: int
    waiting: int
    queued_tokens: int
    head_blocks: int
    batch_tokens: int  # max_num_batched_tokens
    max_num_seqs: int
    preemptions: int
    admitted: list[int]
    running_by_tier: list[int] = []
    waiting_by_tier: list[int] = []
    settings: dict | None = None
    settings_t: float = 0.0
    blocks_by_tier: list[int] = []
    moving: list[str] = []


_TRACEPARENT = re.compile(r"[0-9a-f]{2}-((?!0{32})[0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def trace_id(trace: dict[str, str] | None) -> str:
    """Trace id of a request's `traceparent` header (W3C Trace Context, section 3.2) for log lines, "-" without one."""
    given = _TRACEPARENT.fullmatch((trace or {}).get("traceparent", ""))
    return given[1] if given else "-"


def ticket(rid: str, epoch: int) -> int:
    """Stable 32-bit name of one submission, small enough for the scheduler's shared-memory log."""
    return zlib.crc32(f"{rid}#{epoch}".encode())
