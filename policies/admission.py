"""Admission at one ingress: a bounded queue in total and per tier; where it is full, lower tiers make room for higher.

Source: ours, after the overload rule of DAGOR (Zhou et al., "Overload Control for Scaling WeChat Microservices",
SoCC 2018): the least important work is shed first, and as early as possible, here before its first token.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

R = TypeVar("R", bound=Hashable)
Reason = Literal["queue_full", "tier_queue_full"]


@dataclass(frozen=True, slots=True)
class Verdict(Generic[R]):
    """`reason` None: the request may queue once the requests in `shed` have left; else it is refused."""

    reason: Reason | None = None
    shed: tuple[R, ...] = ()


class AdmissionQueue(Generic[R]):
    """The sequences that wait for their first token, by request and tier (0 the highest).

    `total` bounds them together, `per_tier[p]` those of tier p (None: only the total). A request may have several
    sequences; one larger than a bound is let in when it finds that bound's queue empty. `now` is monotonic seconds.
    """

    def __init__(self, total: int, per_tier: Sequence[int | None]) -> None:
        self.total = total
        self.per_tier = tuple(per_tier)
        self._tier: dict[R, int] = {}
        self._waiting: list[dict[R, int]] = [{} for _ in per_tier]  # sequences of each request, oldest request first
        self._whole: list[dict[R, None]] = [{} for _ in per_tier]  # requests without any token, oldest first
        self._counts = [0] * len(self.per_tier)
        self._drain = _DrainRate()

    def __len__(self) -> int:
        return sum(self._counts)

    def waiting(self, tier: int) -> int:
        """Sequences of one tier."""
        return self._counts[tier]

    def decide(self, tier: int, sequences: int = 1) -> Verdict[R]:
        """Whether a request of this tier with so many sequences may queue, and which requests are shed for it.

        Shed are whole requests without a token, of tiers below: the lowest tier first, its newest request first, and
        no more of them than needed. If that is not enough nobody is shed.
        """
        bound = self.per_tier[tier]
        if bound is not None and self._counts[tier] + min(sequences, bound) > bound:
            return Verdict("tier_queue_full")
        missing = len(self) + min(sequences, self.total) - self.total
        shed: list[R] = []
        for request, freed in self._lower(tier):
            if missing <= 0:
                break
            shed.append(request)
            missing -= freed
        return Verdict("queue_full") if missing > 0 else Verdict(shed=tuple(shed))

    def _lower(self, tier: int) -> Iterator[tuple[R, int]]:
        for lower in range(len(self.per_tier) - 1, tier, -1):
            for request in reversed(self._whole[lower]):
                yield request, self._waiting[lower][request]

    def enter(self, request: R, tier: int, now: float, *, whole: bool = True) -> None:
        """One more sequence of `request` waits; `whole`: the request has no token yet, it may be shed."""
        if not len(self):
            self._drain.resume(now)
        if request not in self._tier:
            self._tier[request] = tier
            if whole:
                self._whole[tier][request] = None
        waiting = self._waiting[self._tier[request]]
        waiting[request] = waiting.get(request, 0) + 1
        self._counts[tier] += 1

    def start(self, request: R, now: float) -> None:
        """One sequence has its first token: it waits no more, and its request cannot be shed any more."""
        self._drain.count(now)
        self._whole[self._tier[request]].pop(request, None)
        self.leave(request)

    def leave(self, request: R, sequences: int = 1) -> None:
        """So many sequences of the request do not wait any more, for whatever reason."""
        tier = self._tier[request]
        waiting = self._waiting[tier]
        waiting[request] -= sequences
        self._counts[tier] -= sequences
        if waiting[request] == 0:
            del waiting[request], self._tier[request]
            self._whole[tier].pop(request, None)

    def retry_after(self, tier: int) -> int:
        """Whole seconds, 1 to 60, until those ahead of a new request of this tier (its own and higher) have started."""
        return self._drain.seconds_for(sum(self._counts[: tier + 1]))


class _DrainRate:
    """How fast sequences get their first token: an exponential average of the gap between two, in seconds."""

    def __init__(self) -> None:
        self._last = 0.0
        self._gap = 1.0

    def resume(self, now: float) -> None:
        """The queue was empty until now: that time says nothing about the rate."""
        self._last = now

    def count(self, now: float) -> None:
        self._gap += 0.1 * (now - self._last - self._gap)
        self._last = now

    def seconds_for(self, sequences: int) -> int:
        return max(1, min(60, round(self._gap * sequences + 0.5)))
