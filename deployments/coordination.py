"""What the coordinator knows between two looks at the fleet: moves under way, cool-downs, back-offs, the cap on bytes.

No Ray, no clock: `now` is monotonic seconds. Nothing here must survive: a coordinator that starts anew knows no move
under way and no cool-down, so that it may for once do more than its bounds say; each move is safe by its hand-shake.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from deployments.migration.messages import Given
from deployments.routing import Heard
from deployments.settings import MigrationSettings
from deployments.wire import ReplicaReport
from policies.freeness import present
from policies.migration.pairing import Move, Reason
from policies.migration.standing import Standing, standing
from policies.tiers import Tiers

FORGET_S = 60.0  # a source that has not answered for so long is no longer waited for
BACK_OFF_S, LONGEST_BACK_OFF_S = 0.5, 8.0  # after a move that came to nothing; doubled each time
TELL_S, HELP_S = 1.0, 2.5  # how often a replica is told of help, and for how long that holds
BURST_S = 1.0  # of the cap on bytes/s may be used at once

SHOWN = (  # of a report
    *("running", "waiting", "running_by_tier", "waiting_by_tier", "blocks_by_tier", "free_blocks", "total_blocks"),
    *("block_size", "head_blocks", "queued_tokens", "max_num_seqs", "preemptions", "moving"),
)

Pair = tuple[Reason, str, str]


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A move that its source was asked to make; the last times of both before it, in case nothing comes of it."""

    move: Move
    began: float
    gave_before: float
    took_before: float


class Coordination:
    """The moves of one coordinator, numbered as they begin."""

    def __init__(self, settings: MigrationSettings, tiers: Tiers) -> None:
        self.settings = settings
        self.tiers = tiers
        self.under_way: dict[int, UnderWay] = {}
        self.totals: defaultdict[str, Counter[str]] = defaultdict(Counter)  # reason -> outcome -> moves
        self._incoming: Counter[str] = Counter()  # replica -> moves under way
        self._outgoing: Counter[str] = Counter()
        self._begun = 0
        self._gave: dict[str, float] = {}  # replica -> when its last move out, or in, began
        self._took: dict[str, float] = {}
        self._changed: dict[str, float] = {}  # replica -> when its last move ended
        self._helped: dict[str, float] = {}  # replica -> when it was told that there is room elsewhere
        self._back_off: dict[Pair, tuple[float, float]] = {}  # until when, seconds
        self._block_bytes = 0.0  # as moves have shown
        self._level, self._filled_at = 0.0, -math.inf  # of the cap's token bucket, bytes

    def next_moves(self, fleet: Iterable[Heard], now: float) -> list[tuple[int, Move]]:
        """The moves to begin now, with their numbers.

        Left out are replicas that do not serve (one that drains sees to itself) and reports that are older than the
        end of the replica's last move.
        """
        self._forget(now)
        standings = [
            self.standing(heard.report, now)
            for heard in fleet
            if heard.report.state == "serving" and heard.at > self._changed.get(heard.report.replica, -math.inf)
        ]
        barred = {pair for pair, (until, _) in self._back_off.items() if now < until}
        moves = self.settings.pairing.moves(standings, self._allowance(now), barred)
        return [(self.begin(move, now), move) for move in moves]

    def helped(self, fleet: Iterable[Heard], now: float) -> list[str]:
        """The replicas that are to be told, again, that there is room elsewhere for their runners of lower tiers."""
        if not self.settings.tier_grace_s:
            return []
        standings = [self.standing(heard.report, now) for heard in fleet]
        names = [n for n in self.settings.pairing.relieved(standings) if now - self._helped.get(n, -math.inf) >= TELL_S]
        self._helped.update(dict.fromkeys(names, now))
        return names

    def standing(self, report: ReplicaReport, now: float) -> Standing:
        """A replica as the pairing sees it, with the moves of this coordinator."""
        name = report.replica
        return replace(
            standing(name, report, self.tiers),
            incoming=self._incoming[name],
            outgoing=self._outgoing[name],
            in_s=now - self._took.get(name, -math.inf),
            out_s=now - self._gave.get(name, -math.inf),
        )

    def begin(self, move: Move, now: float) -> int:
        """Count a move that its source is asked for; returns its number."""
        self._begun += 1
        before = (self._gave.get(move.source, -math.inf), self._took.get(move.destination, -math.inf))
        self.under_way[self._begun] = UnderWay(move, now, *before)
        self._gave[move.source] = self._took[move.destination] = now
        self._outgoing[move.source] += 1
        self._incoming[move.destination] += 1
        return self._begun

    def ended(self, number: int, move: Move, given: Given, now: float) -> None:
        """The source has answered. A move that came to nothing keeps the pair apart for a while."""
        totals = self.totals[move.reason]
        totals.update(moved.outcome for moved in given.outcomes)
        if not given.outcomes:
            totals["no_victim"] += 1
        copied, sent = (sum(getattr(moved, unit) for moved in given.outcomes) for unit in ("blocks", "bytes"))
        if copied:
            self._block_bytes = sent / copied
        self._level -= sent
        self._over(number, move, given.moved > 0, now)

    def failed(self, number: int, move: Move, now: float) -> None:
        """The source could not be asked, or died."""
        self.totals[move.reason]["failed"] += 1
        self._over(number, move, False, now)

    def state(self, fleet: Iterable[Heard], now: float) -> dict[str, Any]:
        """For people: the freeness table, the moves under way, and how many ended how since this coordinator began."""
        return {
            "replicas": {heard.report.replica: self._row(heard, now) for heard in fleet},
            "moving": [
                {
                    "source": under_way.move.source,
                    "destination": under_way.move.destination,
                    "reason": under_way.move.reason,
                    "seconds": round(now - under_way.began, 3),
                }
                for under_way in self.under_way.values()
            ],
            "moves": {reason: dict(outcomes) for reason, outcomes in self.totals.items()},
        }

    def _row(self, heard: Heard, now: float) -> dict[str, Any]:
        report, stands = heard.report, self.standing(heard.report, now)
        return {
            "state": report.state,
            **{name: getattr(report, name) for name in SHOWN},
            "headroom_blocks": sum(stands.kept(tier) for tier in sorted(present(report))),
            "phi": stands.phi if math.isfinite(stands.phi) else None,
            "blocked": stands.blocked,
            "incoming": stands.incoming,
            "outgoing": stands.outgoing,
            "report_age_s": round(now - heard.at, 3),
        }

    def _over(self, number: int, move: Move, moved: bool, now: float) -> None:
        pair = (move.reason, move.source, move.destination)
        if moved:
            self._back_off.pop(pair, None)
        else:
            _, seconds = self._back_off.get(pair, (0.0, BACK_OFF_S / 2))
            seconds = min(2 * seconds, LONGEST_BACK_OFF_S)
            self._back_off[pair] = (now + seconds, seconds)
        for name in (move.source, move.destination):
            self._changed[name] = now
        under_way = self.under_way.pop(number, None)
        if under_way is None:
            return  # it was no longer waited for
        self._outgoing -= Counter([move.source])
        self._incoming -= Counter([move.destination])
        if not moved:
            _undo(self._gave, move.source, under_way.began, under_way.gave_before)
            _undo(self._took, move.destination, under_way.began, under_way.took_before)

    def _forget(self, now: float) -> None:
        """No longer wait for sources that are silent, and let go of what is long past."""
        for number, under_way in list(self.under_way.items()):
            if now - under_way.began > FORGET_S:
                self.totals[under_way.move.reason]["unknown"] += 1
                self._over(number, under_way.move, False, now)
        past = now - FORGET_S - self.settings.pairing.cooldown_s
        for times in (self._gave, self._took, self._changed, self._helped):
            for name in [name for name, at in times.items() if at < past]:
                del times[name]
        self._back_off = {pair: (until, s) for pair, (until, s) in self._back_off.items() if until > past}

    def _allowance(self, now: float) -> float:
        """KV blocks that the cap on bytes/s permits now; until a move has shown the size of a block, one move."""
        rate = self.settings.max_bytes_per_s
        if rate is None:
            return math.inf
        self._level = min(rate * BURST_S, self._level + rate * min(now - self._filled_at, BURST_S))
        self._filled_at = now
        if not self._block_bytes:
            return 0 if self.under_way else 1
        return self._level / self._block_bytes - sum(under_way.move.budget for under_way in self.under_way.values())


def inverted(report: ReplicaReport) -> bool:
    """Whether a request waits there for what runners of lower tiers hold."""
    if not report.waiting or report.state != "serving":
        return False
    stands = standing(report.replica, report)
    return stands.blocked and any(stands.running_by_tier[(stands.waiting_tier or 0) + 1 :])


def freest(fleet: Mapping[str, Standing], without: str | None) -> str | None:
    """The serving replica with the greatest freeness but for one, None if there is no other; ties by id."""
    others = [s for s in fleet.values() if s.state == "serving" and s.replica != without]
    return min(others, key=lambda s: (-s.phi, s.replica)).replica if others else None


def _undo(times: dict[str, float], name: str, began: float, before: float) -> None:
    if times.get(name) == began:
        times[name] = before
