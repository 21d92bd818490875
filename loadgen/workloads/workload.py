"""A workload: requests in the order in which they are due, and how they were made; one JSON line each in a file."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from loadgen import lengths
from loadgen.arrivals import Times
from loadgen.workloads.burstiness import measure

FORMAT = 1
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Tokens = Annotated[int, msgspec.Meta(ge=0)]


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One request. Times in seconds, lengths in tokens.

    `due`: since the start of the run. `output_tokens` is the length that the answer is made to have (0: the server
    decides). `deadline`, since it was due: the client gives up then. `cancel_after`, since it was sent: the client
    leaves on purpose. `key` names an API key, it is none. `blocks` stand for the prompt's content, `block_tokens` of
    the workload each: requests with equal leading numbers have equal leading text. `text` is the prompt itself; without
    it one of `prompt_tokens` words is made up. `headers` and `body` are added to those of the HTTP request.
    """

    due: Seconds
    prompt_tokens: Tokens
    output_tokens: Tokens = 0
    tier: Annotated[int, msgspec.Meta(ge=0)] | None = None
    session: str | None = None
    key: str | None = None
    deadline: Seconds | None = None
    cancel_after: Seconds | None = None
    blocks: tuple[int, ...] = ()
    text: str | None = None
    headers: dict[str, str] = {}
    body: dict[str, Any] = {}


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First line of a workload file."""

    workload: int
    requests: int
    block_tokens: int = 0
    context: int = 0
    about: dict[str, Any] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """Requests sorted by `due`; `about` says how they were made (model, seed, source, credit, bad rows).

    `block_tokens`: prompt tokens that one of a request's `blocks` stands for, 0 without any. `context`: window that the
    lengths are meant for, tokens, 0 if unknown.
    """

    requests: tuple[Request, ...]
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    block_tokens: int = 0
    context: int = 0

    def __post_init__(self) -> None:
        dues = [request.due for request in self.requests]
        if any(a > b for a, b in itertools.pairwise(dues)):
            raise ValueError("requests: not in the order in which they are due; sort them by `due`")

    def save(self, path: Path) -> None:
        """Write the file: a header, then a line for each request. Written beside and moved in place."""
        encode = msgspec.json.Encoder().encode
        header = Header(FORMAT, len(self.requests), self.block_tokens, self.context, self.about)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".part")
        with partial.open("wb") as file:
            file.writelines(encode(line) + b"\n" for line in (header, *self.requests))
        partial.replace(path)

    @property
    def digest(self) -> str:
        """Short hash of the requests: equal for equal workloads."""
        encode = msgspec.json.Encoder(order="deterministic").encode
        found = hashlib.sha256()
        for request in self.requests:
            found.update(encode(request))
        return found.hexdigest()[:16]

    def scaled(self, context: int) -> Workload:
        """The same workload for a smaller window: prompts and answers times context/`self.context`, blocks too.

        ValueError if a request has a text of its own, or the workload does not know its window.
        """
        if not self.context:
            raise ValueError("context: the workload does not say which window its lengths are for")
        if any(r.text is not None or "messages" in r.body or "prompt" in r.body for r in self.requests):
            raise ValueError("context: requests with a text of their own cannot be scaled; only lengths can")
        factor = min(1.0, context / self.context)
        asked = [np.asarray([getattr(r, name) for r in self.requests], np.int64) for name in LENGTHS]
        prompts, answers = lengths.fit(asked[0], asked[1], context, self.context)
        answers = np.where(asked[1] == 0, 0, answers)
        tokens = max(1, round(self.block_tokens * factor)) if self.block_tokens else 0
        changed = tuple(
            msgspec.structs.replace(
                r, prompt_tokens=int(p), output_tokens=int(a), blocks=r.blocks[: -(-int(p) // tokens)] if tokens else ()
            )
            for r, p, a in zip(self.requests, prompts, answers, strict=True)
        )
        about = {**self.about, "scaled": {"from": self.context, "to": context, "factor": factor}}
        return Workload(changed, about, tokens, min(context, self.context))

    def retimed(self, times: Times, how: dict[str, Any]) -> Workload:
        """The same requests in the same order at other times; `how` is added to `about`."""
        changed = tuple(msgspec.structs.replace(r, due=float(t)) for r, t in zip(self.requests, times, strict=True))
        return dataclasses.replace(self, requests=changed, about={**self.about, **how})

    def first(self, count: int) -> Workload:
        """The first requests, at most `count`."""
        return dataclasses.replace(self, requests=self.requests[:count])


LENGTHS = ("prompt_tokens", "output_tokens")


def by_due(requests: Iterable[Request]) -> tuple[Request, ...]:
    """The requests in the order in which they are due; those due at one time keep their order."""
    return tuple(sorted(requests, key=lambda r: r.due))


def describe(workload: Workload) -> dict[str, Any]:
    """What is in a workload: burstiness, lengths, ratio of prefill to decode, tiers, sessions, shared prefixes."""
    requests = workload.requests
    found: dict[str, Any] = {"requests": len(requests), "digest": workload.digest}
    if not requests:
        return found
    found["arrivals"] = msgspec.structs.asdict(measure(np.asarray([r.due for r in requests])))
    for name in LENGTHS:
        values = np.asarray([getattr(r, name) for r in requests], float)
        p50, p90, p99 = np.percentile(values, (50, 90, 99))
        found[name] = {"mean": values.mean(), "p50": p50, "p90": p90, "p99": p99, "max": values.max()}
    decode = sum(r.output_tokens for r in requests)
    found["prefill_decode_ratio"] = sum(r.prompt_tokens for r in requests) / decode if decode else None
    found["tiers"] = dict(sorted(Counter(r.tier for r in requests if r.tier is not None).items()))
    found["sessions"] = len({r.session for r in requests if r.session is not None})
    found["cancelled"] = sum(r.cancel_after is not None for r in requests)
    found["block_hit_share"] = _block_hits(requests)
    return found


def _block_hits(requests: Sequence[Request]) -> float | None:
    """Share of blocks that a cache without end would have by the time they are asked for; None without blocks."""
    seen: set[int] = set()
    hits = total = 0
    for request in requests:
        total += len(request.blocks)
        for i, block in enumerate(request.blocks):
            if block not in seen:
                seen.update(request.blocks[i:])
                break
            hits += 1
    return hits / total if total else None
