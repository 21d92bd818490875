"""What the two machines of a move take (events) and give (actions), and the seconds and sizes they keep to.

Blocks are KV blocks, counted from the request's first; times are seconds. What the source asks of the destination
(`Reserve`, `Write`, `Commit`, `Query`, `ReleaseOnDestination`) is an action of one machine and an event of the other;
so are the answers (`Reserved`, `Refused`, `StageWritten`, `Committed`, `CommitRefused`).
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.registry import number, whole


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in KV blocks, times in seconds.

    stage_blocks: full blocks per stage, small enough that gathering them stays below a tenth of a step (16 blocks of a
    135M model: +3.5 % on the others' inter-token time). last_stage_blocks: full blocks that may be left for the pause.
    extra_stages: stages beyond those that the request's first size needs. growth_blocks: reserved beyond what it holds.
    reserve_s, stage_s, park_s: patience for one answer before the pause. commit_s: for B's first token, in the pause; a
    step of a busy CPU engine takes 0.3 s and B may be in one that has just begun. query_s, queries: then B is asked so
    often, so long each. lease_s: a reservation on B without a word from A.
    keep_s: how long B remembers a move that ended; longer than any message can be under way.
    """

    stage_blocks: int = 16
    last_stage_blocks: int = 2
    extra_stages: int = 3
    growth_blocks: int = 4
    reserve_s: float = 1.0
    stage_s: float = 5.0
    park_s: float = 1.0
    commit_s: float = 2.0
    query_s: float = 0.25
    queries: int = 3
    lease_s: float = 10.0
    keep_s: float = 60.0

    def __post_init__(self) -> None:
        whole("stage_blocks", self.stage_blocks, "16 is the default.", low=1)
        for field in ("last_stage_blocks", "extra_stages"):
            whole(field, getattr(self, field), "Leave it out for the default.", low=0)
        whole("growth_blocks", self.growth_blocks, "The step under way may fill one; 4 is the default.", low=1)
        whole("queries", self.queries, "Without asking B nobody knows; 3 is the default.", low=1)
        for field in ("reserve_s", "stage_s", "park_s", "commit_s", "query_s"):
            number(field, getattr(self, field), "It is the patience for one answer.", above=0)
        longest = max(self.reserve_s, self.stage_s, self.park_s) + self.commit_s
        number("lease_s", self.lease_s, "It must outlast the longest silence of a move that goes well.", above=longest)
        number("keep_s", self.keep_s, "It must outlast the lease and all queries.", above=self.lease_s + self.pause_s)

    @property
    def pause_s(self) -> float:
        """Longest time from Park to Done, to Unpark or to handing the request back to the ingress."""
        return self.park_s + self.commit_s + self.queries * self.query_s

    @property
    def park_lease_s(self) -> float:
        """After so long the engine of A unparks by itself: the executor is gone, as it decides earlier if it lives."""
        return 2 * self.pause_s


# --- what A's machine hears from its own engine and from the fleet


@dataclass(frozen=True, slots=True)
class Parked:
    """A schedules the request no more, no step is in flight, it holds `held` blocks, the last one partly filled."""

    held: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The request came to its end on A."""


@dataclass(frozen=True, slots=True)
class AbortedByClient:
    """The request was aborted on A because its client left."""


@dataclass(frozen=True, slots=True)
class Preempted:
    """A's engine went its own way: it took the request's blocks, or unparked it because the park lease ran out."""


@dataclass(frozen=True, slots=True)
class DestinationLost:
    """B is dead: it will send nothing any more, to nobody."""


@dataclass(frozen=True, slots=True)
class SourceLost:
    """A's engine is dead (to A's machine), or all of A (to B's machine)."""


@dataclass(frozen=True, slots=True)
class Timeout:
    """The machine's `deadline()` may have passed; too early it means nothing."""


# --- what B answers


@dataclass(frozen=True, slots=True)
class Reserved:
    """B holds `blocks` blocks for the request in all."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Refused:
    """B does not reserve or write, or A's engine does not export or park; `reason` is counted."""

    reason: str


@dataclass(frozen=True, slots=True)
class StageWritten:
    """Stage `stage` lies in B's blocks: so many were copied, A has `left` more full ones and `held` in all."""

    stage: int
    copied: int
    left: int
    held: int


@dataclass(frozen=True, slots=True)
class Committed:
    """B has the request: its first token has left B, or, moved without KV, it stands in B's queue."""


@dataclass(frozen=True, slots=True)
class CommitRefused:
    """B does not have the request and will not take it any more, whatever arrives there later."""

    reason: str


# --- what A's machine wants done


@dataclass(frozen=True, slots=True)
class Reserve:
    """B: hold so many blocks in all, and a sequence slot, for `lease_s` from now; none: a slot in the queue."""

    blocks: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class ExportStage:
    """A's engine: copy out up to `blocks` full blocks from `first` on, while the request decodes."""

    stage: int
    first: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Write:
    """B: put the exported blocks where they belong; renews the lease."""

    stage: int
    first: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class Park:
    """A's engine: stop scheduling the request (or take it out of the queue), keep its blocks, for `lease_s` at most."""

    lease_s: float


@dataclass(frozen=True, slots=True)
class ExportLast:
    """A's engine: copy out all blocks from `first` on with token ids and sampler state. May ride on the Park call."""

    first: int


@dataclass(frozen=True, slots=True)
class Commit:
    """B: write what ExportLast gave, adopt the request and run it. `with_kv` False: queue it like a new one."""

    with_kv: bool


@dataclass(frozen=True, slots=True)
class Query:
    """B: do you have it? If its first token has not left you, drop it and never take it."""


@dataclass(frozen=True, slots=True)
class Unpark:
    """A's engine: schedule the request again; nothing happens if it is not parked or is gone."""


@dataclass(frozen=True, slots=True)
class ReleaseOnDestination:
    """B: free what is reserved; a request whose first token has left is B's own and stays."""


@dataclass(frozen=True, slots=True)
class AnnounceMoved:
    """Ingress: A's stream ends, the next token comes from B; not `confirmed`: it may be that none will come."""

    confirmed: bool


@dataclass(frozen=True, slots=True)
class FreeOnSource:
    """A's engine: abort the request and free its blocks, without a word to the client."""


@dataclass(frozen=True, slots=True)
class Count:
    """Metrics: how the move ended and why."""

    outcome: str
    reason: str


Answer = Reserved | Refused | StageWritten | Committed | CommitRefused
SourceEvent = Answer | Parked | Finished | AbortedByClient | Preempted | DestinationLost | SourceLost | Timeout
ToDestination = Reserve | Write | Commit | Query | ReleaseOnDestination
SourceAction = ToDestination | ExportStage | Park | ExportLast | Unpark | AnnounceMoved | FreeOnSource | Count
