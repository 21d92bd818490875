"""The destination's side of one live migration: a reservation with a lease, staged writes, adoption or release.

Source: Llumnix (Sun et al., OSDI 2024), section 4; lease, tombstone and first-token rule are ours.
Why they make a move safe is in policies/migration/handshake.py.

B answers for good. The request becomes B's own when its first token leaves (moved without KV: when it stands in B's
queue); until then `Query` and `ReleaseOnDestination` drop it, and once dropped it is never taken, though the commit
arrives later. So B remembers a move that ended for `keep_s`, longer than any message can be under way. A lease ends by
itself and each word from A renews it; adopting has none: the engine runs the request or says that it cannot.

`ADOPTING` means that the engine has been asked to run it: tokens are held back until the machine says `PassTokens`.
B's engine does what it is asked in order, so that `FreeBlocks` after `TakeBlocks` frees what was taken.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

from policies.migration import events as e


class State(enum.Enum):
    """Where a move stands, seen from B."""

    NEW = "new"
    RESERVED = "reserved"
    ADOPTING = "adopting"
    ADOPTED = "adopted"
    RELEASED = "released"


NEW, RESERVED, ADOPTING, ADOPTED, RELEASED = State


@dataclass(frozen=True, slots=True)
class Taken:
    """Engine: so many blocks in all are held."""

    blocks: int


@dataclass(frozen=True, slots=True)
class NotTaken:
    """Engine: no room (`reason` says of what), or the request cannot live here; nothing more is held than before."""

    reason: str


@dataclass(frozen=True, slots=True)
class Written:
    """Engine: the stage lies in the reserved blocks."""

    stage: int


@dataclass(frozen=True, slots=True)
class Begun:
    """Engine: the first token of the adopted request is there, or, moved without KV, the request is queued."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Engine: it could not adopt the request; all blocks are free again."""

    reason: str


@dataclass(frozen=True, slots=True)
class TakeBlocks:
    """Engine: hold so many blocks in all, and a slot."""

    blocks: int


@dataclass(frozen=True, slots=True)
class WriteStage:
    """Engine: copy what came with the message into the reserved blocks, from block `first` on."""

    stage: int
    first: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """Engine: write what came with the commit, run the request on the reserved blocks, hold its tokens back."""

    with_kv: bool


@dataclass(frozen=True, slots=True)
class PassTokens:
    """Tokens of the request go to the ingress from now on, those held back first."""


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """Engine: give the reservation back."""


@dataclass(frozen=True, slots=True)
class DropRequest:
    """Engine: abort the adopted request, free its blocks, and throw its tokens away."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Answer to `Write`: A adds the figures of its export and has a `StageWritten`."""

    stage: int


@dataclass(frozen=True, slots=True)
class Tell:
    """A: this answer."""

    answer: e.Reserved | e.Refused | Stored | e.Committed | e.CommitRefused


Event = e.ToDestination | Taken | NotTaken | Written | Begun | Failed | e.AbortedByClient | e.SourceLost | e.Timeout
Action = TakeBlocks | WriteStage | Adopt | PassTokens | FreeBlocks | DropRequest | Tell | e.Count

#: Which events lead elsewhere, and where. Not listed: the state stays, but A may be told (again) how things stand.
TRANSITIONS: Mapping[State, Mapping[type[Event], tuple[State, ...]]] = {
    NEW: {
        e.Reserve: (RESERVED,),
        **dict.fromkeys((e.Write, e.Commit, e.Query, e.ReleaseOnDestination), (RELEASED,)),  # they overtook Reserve
    },
    RESERVED: {
        e.Commit: (ADOPTING,),
        NotTaken: (RESERVED, RELEASED),  # RESERVED: it has a smaller reservation
        **dict.fromkeys((e.Query, e.ReleaseOnDestination, e.SourceLost, e.Timeout), (RELEASED,)),
    },
    ADOPTING: {
        Begun: (ADOPTED,),
        **dict.fromkeys((Failed, e.Query, e.ReleaseOnDestination, e.AbortedByClient), (RELEASED,)),
    },
    ADOPTED: {},
    RELEASED: {},
}


class DestinationSide:
    """One move on B; made at the first message that names it. `now` is monotonic seconds of B."""

    def __init__(self, limits: e.Limits) -> None:
        self.limits = limits
        self.state = NEW
        self._asked = self._taken = -1  # blocks asked of the engine, blocks held; -1: none yet
        self._deadline = math.inf

    def deadline(self) -> float:
        """When `Timeout` is due: the lease's end; while adopting inf; after that, when the move may be forgotten."""
        return self._deadline

    def forgettable(self, now: float) -> bool:
        """Whether the move ended so long ago that no message can name it any more."""
        return self.state in (ADOPTED, RELEASED) and now >= self._deadline

    def handle(self, event: Event, now: float) -> tuple[Action, ...]:
        """Take note of one event; returns what is to be done, in order."""
        if isinstance(event, e.Timeout) and now < self._deadline:
            return ()
        before = self.state
        match before:
            case State.NEW | State.RESERVED:
                actions = self._before_commit(event, now)
            case State.ADOPTING:
                actions = self._adopting(event)
            case _:
                actions = ()
        if self.state is not before:
            if self.state not in TRANSITIONS[before].get(type(event), ()):
                raise AssertionError(f"{before} {event} led to {self.state}")
            if self.state in (ADOPTED, RELEASED):
                self._deadline = now + self.limits.keep_s
        return actions or self._say_again(event)

    def _before_commit(self, event: Event, now: float) -> tuple[Action, ...]:
        match event:
            case e.Reserve(blocks, lease_s):
                self.state, self._deadline = RESERVED, now + lease_s
                if blocks > self._asked:
                    self._asked = blocks
                    return (TakeBlocks(blocks),)
                return (Tell(e.Reserved(self._taken)),) if blocks <= self._taken else ()
            case Taken(blocks):
                self._taken = blocks
                return (Tell(e.Reserved(blocks)),)
            case NotTaken(reason):
                self._asked = self._taken
                self.state = RESERVED if self._taken >= 0 else RELEASED
                return (Tell(e.Refused(reason)),)
            case e.Write(stage, first, lease_s) if self.state is RESERVED:
                self._deadline = now + lease_s
                return (WriteStage(stage, first),)
            case Written(stage):
                return (Tell(Stored(stage)),)
            case e.Commit(with_kv) if self.state is RESERVED:
                self.state, self._deadline = ADOPTING, math.inf
                return (Adopt(with_kv),)
        if type(event) not in TRANSITIONS[self.state]:
            return ()
        freed: tuple[Action, ...] = (FreeBlocks(),) if self.state is RESERVED else ()
        self.state = RELEASED
        match event:
            case e.Query():
                return (*freed, Tell(e.CommitRefused("not_committed")))
            case e.Timeout():
                return (*freed, e.Count("expired", "lease"))
        return freed

    def _adopting(self, event: Event) -> tuple[Action, ...]:
        match event:
            case Begun():
                self.state = ADOPTED
                return (PassTokens(), Tell(e.Committed()))
            case Failed(reason):
                self.state = RELEASED
                return (Tell(e.CommitRefused(reason)),)
            case e.Query():
                self.state = RELEASED
                return (DropRequest(), Tell(e.CommitRefused("too_slow")))
            case e.ReleaseOnDestination() | e.AbortedByClient():
                self.state = RELEASED
                return (DropRequest(),)
        return ()

    def _say_again(self, event: Event) -> tuple[Action, ...]:
        """What A is told when it asks for something that is settled; also when its message came too early."""
        match self.state, event:
            case State.ADOPTED, e.Commit() | e.Query():
                return (Tell(e.Committed()),)
            case State.RELEASED, e.Commit() | e.Query():
                return (Tell(e.CommitRefused("released")),)
            case State.RELEASED, e.Reserve() | e.Write():
                return (Tell(e.Refused("released")),)
        return ()
