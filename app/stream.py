"""One sequence of a client's request, and the guard that gives it each token once, whichever replicas it runs on.

A token's place is its index; who made it is told by the epoch, which the ingress raises with each submission, and the
hop, which a replica raises with each move. Each replica has a socket of its own: tokens of one hop come in order, those
of two hops in any. Why two replicas may both run a sequence, for a while, and why this guard makes that harmless:
policies/migration/handshake.py.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.incoming import Incoming
from app.vllm_compat import SamplingParams
from deployments.wire import Delta

if TYPE_CHECKING:
    from opentelemetry.trace import Span

#: Deltas of a hop that may wait for those before it, which are on their way already: a minute of decoding.
MAX_HELD = 1000


@dataclass(slots=True, eq=False)
class Stream:
    """The single truth about one sequence: what was asked, what the client has, which run of it counts.

    `delivered` are the output token ids handed to the detokenizer, from `first_at` to `last_at` (monotonic seconds);
    with `prompt` they are what a later submission goes on from. `epoch` grows by one per submission, its first token
    came at `epoch_at` or is `awaited` still; tokens of it come from `hop` now, which runs on `sender` (None for hop 0).
    `request` is what the client asked, of which this is one sequence; `news` is set when there is something for
    `run_stream` to look at. `trace` are the headers that the spans of a submission hang under, `resume` is the span of
    its being sent again.
    """

    rid: str
    prompt: list[int]
    params: SamplingParams
    arrival: float
    request: Incoming
    cache_salt: str | None = None
    trace: dict[str, str] | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    epoch: int = 0
    hop: int = 0
    sender: str | None = None
    delivered: list[int] = field(default_factory=list)
    first_at: float = 0.0
    last_at: float = 0.0
    epoch_at: float = 0.0
    awaited: bool = True
    finished: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    resume: Span | None = None
    _held: dict[int, list[Delta]] = field(default_factory=dict)  # by hop, each in order, its first delta included
    _barred: set[int] = field(default_factory=set)

    def submit(self) -> None:
        """Begin a new epoch: what is under way from the ones before counts no more."""
        self.epoch += 1
        self.hop, self.sender, self.awaited = 0, None, True
        self._held.clear()
        self._barred.clear()

    def finish(self) -> None:
        """The client has every token, or wants no more."""
        self.finished = True
        self.news.set()

    def is_barred(self, hop: int) -> bool:
        """Whether no token of this hop will ever be taken."""
        return hop in self._barred or hop < self.hop

    def take(self, delta: Delta, now: float) -> list[Delta]:
        """Deltas that are the client's now: this one and those that waited for it, or none.

        Only the next index is taken, and only from one hop. A newer hop takes over where its first token is the next
        and goes on from the client's last one; while tokens before it are under way it waits. A hop that starts behind,
        since the one that it should replace went on, or that goes on from a run that the client has left, is barred.
        """
        if self.finished or delta.epoch != self.epoch or delta.finish_reason == "abort":
            return []  # engines abort what has moved or what nobody wants: that is no end of the sequence
        if delta.hop == self.hop:
            if delta.start != len(self.delivered):
                return []
            taken = [delta]
            self._deliver(delta, now)
        else:
            taken = []
            self._hold(delta)
        while self._held and not self.finished and (hop := self._successor()) is not None:
            held = self._held.pop(hop)
            self.hop, self.sender = hop, held[0].sender
            self.news.set()
            for delta in held:
                self._deliver(delta, now)
            taken += held
        return taken

    def _deliver(self, delta: Delta, now: float) -> None:
        if self.awaited:
            self.awaited = not delta.token_ids
            self.epoch_at = now
            if not self.delivered:
                self.first_at = now
        self.delivered.extend(delta.token_ids)
        self.last_at = now
        if delta.finish_reason is not None:
            self.finish()

    def _hold(self, delta: Delta) -> None:
        if self.is_barred(delta.hop):
            return
        held = self._held.get(delta.hop)
        if held is None:
            if delta.sender is not None:  # else it is not the hop's first
                self._held[delta.hop] = [delta]
        elif delta.start == held[-1].start + len(held[-1].token_ids) and held[-1].finish_reason is None:
            held.append(delta)
            if len(held) > MAX_HELD:
                self._bar(delta.hop)

    def _successor(self) -> int | None:
        """The hop that goes on from the client's last token; those that no longer can are barred on the way."""
        for hop in sorted(self._held):
            first = self._held[hop][0]
            if first.start < len(self.delivered) or self.is_barred(first.parent):
                self._bar(hop)
            elif first.start == len(self.delivered) and first.parent == self.hop:
                return hop
        return None

    def _bar(self, hop: int) -> None:
        del self._held[hop]
        self._barred.add(hop)
        self.news.set()
