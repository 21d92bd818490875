"""The source's side of one live migration, as a machine from events to actions: no I/O, no clock.

Source: the multi-stage copy of Llumnix (Sun et al., OSDI 2024), section 4, with its open code's defects left out: B
reserves before the first copy and never inside the pause, every answer has a deadline, every lease ends by itself. The
form is that of h11: the table first. A is the replica that gives the request away and drives, B the one that takes it
(policies/migration/destination.py). The executor carries out the actions of one call in order, A's engine does what it
is asked in order, and messages to and from B may be lost, doubled, late or out of order.

**How many stages.** Full blocks are copied while the request decodes until `last_stage_blocks` are left. Decoding adds
about 1 % of what a 1 GB/s link carries, so the stages that the first size needs, plus `extra_stages`, leave next to
nothing. If more is left, the link is slower than the request grows: parking would make its client wait for the
backlog, which is the pause that stages exist to avoid, so the move is aborted (`no_convergence`) and the request
decodes on, unhurt. Only a replica that is going away (`must`) parks all the same: one long pause costs less than
computing everything anew elsewhere, a hundred times less at 4,096 tokens.

**Who owns the request while the commit is under way.** It changes hands at B's first token, inside B: before it B can
still drop the request, after it only client and ingress can end it. So A may not unpark just because B is silent:

* An answer settles it. `Committed`: A frees. `CommitRefused`: B never takes it, whatever comes later; A unparks.
* No answer in time: A asks (`Query`), again if need be, and stays parked. B answers that its first token has left, or
  drops the request for good and says so: a lost commit, a lost answer and a slow B all end in one of the two.
* B is dead: it sends nothing more and A unparks. What it sent before is for the ingress's guard, below.
* Silence to the end (A and B do not reach each other, both live): unparking might run the request twice, waiting for
  ever might lose it. A hands it back to the ingress, which hears both: `AnnounceMoved(confirmed=False)`. The ingress
  goes on with B's token if one comes and else re-sends prompt and delivered ids, as for any replica that fell silent.

**The guard that makes tokens exactly-once.** Each token names its index and its submission: the epoch, which the
ingress raises when it re-sends, then the hop, a new number for each commit that A sends. The ingress takes the next
index only, and only from one submission: it goes over to a newer one if that one's first token is the next and goes
on from the submission that the client's last token is from, which it names (it waits for A's last ones if they are
still under way), or bars it for good. The sender of what is never taken is aborted. So if two replicas do run one
request (a death reported in error; an executor that died or stood still while its engine lives and whose park lease
ran out), the first to deliver goes on and the other is ended. If A has announced the move and B is dead, barred or
silent, the ingress re-sends.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

from policies.migration import events as e


class State(enum.Enum):
    """Where a move stands, seen from A. Nothing leaves the last four."""

    PROPOSED = "proposed"
    COPYING = "copying"
    PARKING = "parking"
    COMMITTING = "committing"
    DONE = "done"
    CANCELLED = "cancelled"
    ABORTED = "aborted"
    ROLLED_BACK = "rolled_back"


PROPOSED, COPYING, PARKING, COMMITTING = State.PROPOSED, State.COPYING, State.PARKING, State.COMMITTING
DONE, CANCELLED, ABORTED, ROLLED_BACK = State.DONE, State.CANCELLED, State.ABORTED, State.ROLLED_BACK

Leads = Mapping[type[e.SourceEvent], tuple[State, ...]]
_ENDED_ON_A: Leads = dict.fromkeys((e.Finished, e.AbortedByClient, e.Preempted), (CANCELLED,))
_GIVEN_UP: Leads = dict.fromkeys((e.Refused, e.DestinationLost, e.SourceLost, e.Timeout), (ABORTED,))
#: Where an event leads. Several states: figures decide. Not listed: the event is late or doubled and means nothing.
TRANSITIONS: Mapping[State, Leads] = {
    PROPOSED: {e.Reserved: (COPYING, PARKING), **_ENDED_ON_A, **_GIVEN_UP},
    COPYING: {
        e.StageWritten: (COPYING, PARKING, ABORTED),
        e.Reserved: (COPYING, PARKING, ABORTED),  # more than at first: it outgrew its reservation
        **_ENDED_ON_A,
        **_GIVEN_UP,
    },
    PARKING: {
        e.Parked: (COMMITTING, ROLLED_BACK),
        e.Refused: (ROLLED_BACK,),
        **_ENDED_ON_A,
        e.DestinationLost: (ROLLED_BACK,),
        e.SourceLost: (ABORTED,),
        e.Timeout: (ROLLED_BACK,),
    },
    COMMITTING: {
        e.Committed: (DONE,),
        e.CommitRefused: (ROLLED_BACK,),
        **_ENDED_ON_A,
        e.Preempted: (COMMITTING,),  # B may have it: ask
        e.DestinationLost: (ROLLED_BACK,),
        e.SourceLost: (ABORTED,),
        e.Timeout: (COMMITTING, ABORTED),
    },
    **{ended: {} for ended in (DONE, CANCELLED, ABORTED, ROLLED_BACK)},
}

#: What is done when a move ends, by the state that it leaves and the one that it enters.
ENDINGS: Mapping[tuple[State, State], tuple[e.SourceAction, ...]] = {
    **{(before, end): (e.ReleaseOnDestination(),) for before in (PROPOSED, COPYING) for end in (CANCELLED, ABORTED)},
    (PARKING, CANCELLED): (e.Unpark(), e.ReleaseOnDestination()),
    (PARKING, ABORTED): (e.ReleaseOnDestination(),),
    (PARKING, ROLLED_BACK): (e.Unpark(), e.ReleaseOnDestination()),
    (COMMITTING, DONE): (e.AnnounceMoved(confirmed=True), e.FreeOnSource()),
    (COMMITTING, CANCELLED): (e.ReleaseOnDestination(),),
    (COMMITTING, ROLLED_BACK): (e.Unpark(), e.ReleaseOnDestination()),
    (COMMITTING, ABORTED): (e.AnnounceMoved(confirmed=False), e.FreeOnSource()),  # B may have it: no release
}

_REASONS: Mapping[type[e.SourceEvent], str] = {
    e.Finished: "finished",
    e.AbortedByClient: "aborted_by_client",
    e.Preempted: "preempted",
    e.DestinationLost: "destination_lost",
    e.SourceLost: "source_lost",
    e.Committed: "moved",
    e.Parked: "outgrown",
    e.StageWritten: "no_convergence",
    e.Reserved: "no_convergence",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be moved: a request that holds `held` KV blocks on A, 0 if it waits there without any.

    `must`: A is going away, so that even a long pause is better than staying. `refused`: why it cannot be carried
    (policies/migration/refusals.py), None if it can.
    """

    held: int
    must: bool = False
    refused: str | None = None


class SourceSide:
    """One move, from `start` to one of the last four states; `now` is monotonic seconds of A, never going back."""

    def __init__(self, plan: Plan, limits: e.Limits) -> None:
        self.plan = plan
        self.limits = limits
        self.state = PROPOSED
        self.stages = 0  # written on B
        self.copied = 0  # blocks written on B
        self._left, self._held = max(0, plan.held - 1), plan.held  # full blocks not copied, blocks of the request
        self._reserved = self._asked = 0  # blocks: held by B, asked for
        self._exporting = False
        self._queries = 0
        self._max_stages = -(-plan.held // limits.stage_blocks) + limits.extra_stages
        self._deadline = math.inf

    @property
    def over(self) -> bool:
        """Whether the move has ended: no event changes anything any more."""
        return not TRANSITIONS[self.state]

    def deadline(self) -> float:
        """When `Timeout` is due, in the seconds of `now`; inf once the move has ended."""
        return math.inf if self.over else self._deadline

    def start(self, now: float) -> tuple[e.SourceAction, ...]:
        """Ask B for room; a request that cannot be carried is counted and stays, nobody is asked."""
        if self.plan.refused is not None:
            self.state = ABORTED
            return (e.Count(ABORTED.value, self.plan.refused),)
        return self._reserve(now)

    def handle(self, event: e.SourceEvent, now: float) -> tuple[e.SourceAction, ...]:
        """Take note of one event; returns what is to be done, in order."""
        if type(event) not in TRANSITIONS[self.state] or self._means_nothing(event, now):
            return ()
        before, actions = self.state, self._follow(event, now)
        if self.state not in TRANSITIONS[before][type(event)]:
            raise AssertionError(f"{before} {event} led to {self.state}")
        if self.over:
            return (*ENDINGS[before, self.state], e.Count(self.state.value, self._reason(before, event)))
        return actions

    def _means_nothing(self, event: e.SourceEvent, now: float) -> bool:
        match event:
            case e.Timeout():
                return now < self._deadline
            case e.Reserved(blocks):
                return blocks < self._asked or self._exporting
            case e.StageWritten(stage):
                return not self._exporting or stage != self.stages
            case e.Preempted():
                return self._queries > 0  # asked already
        return False

    def _follow(self, event: e.SourceEvent, now: float) -> tuple[e.SourceAction, ...]:
        """Enter the next state; returns the actions unless the move ends."""
        match event:
            case e.Reserved(blocks):
                self._reserved = blocks
                return self._advance(now)
            case e.StageWritten(_, copied, left, held):
                self._exporting = False
                self.stages += 1
                self.copied += copied
                self._left, self._held = left, held
                return self._advance(now)
            case e.Parked(held) if held <= self._reserved:
                self.state, self._deadline = COMMITTING, now + self.limits.commit_s
                return (e.ExportLast(self.copied), e.Commit(with_kv=self.plan.held > 0))
            case e.Parked():
                self.state = ROLLED_BACK
            case e.Timeout() | e.Preempted() if self.state is COMMITTING:
                return self._ask(now)
            case _:
                (self.state,) = TRANSITIONS[self.state][type(event)]
        return ()

    def _advance(self, now: float) -> tuple[e.SourceAction, ...]:
        """The next step while the request still runs on A: more room, one more stage, or the pause."""
        limits = self.limits
        if self._held >= self._reserved > 0:  # the step under way may open one more block
            self.state = COPYING
            return self._reserve(now)
        if self._left > limits.last_stage_blocks:
            if self.stages < self._max_stages:
                self.state, self._deadline, self._exporting = COPYING, now + limits.stage_s, True
                return (
                    e.ExportStage(self.stages, self.copied, min(limits.stage_blocks, self._left)),
                    e.Write(self.stages, self.copied, limits.lease_s),
                )
            if not self.plan.must:
                self.state = ABORTED
                return ()
        self.state, self._deadline = PARKING, now + limits.park_s
        return (e.Park(limits.park_lease_s),)

    def _reserve(self, now: float) -> tuple[e.SourceAction, ...]:
        self._asked = self._held + self.limits.growth_blocks if self.plan.held else 0
        self._deadline = now + self.limits.reserve_s
        return (e.Reserve(self._asked, self.limits.lease_s),)

    def _ask(self, now: float) -> tuple[e.SourceAction, ...]:
        if self._queries == self.limits.queries:
            self.state = ABORTED
            return ()
        self._queries += 1
        self._deadline = now + self.limits.query_s
        return (e.Query(),)

    def _reason(self, before: State, event: e.SourceEvent) -> str:
        match event:
            case e.Refused(reason) | e.CommitRefused(reason):
                return reason
            case e.Timeout():
                return "unresolved" if before is COMMITTING else f"{before.value}_timeout"
        return _REASONS[type(event)]
