"""Figures of a fleet whose size follows the load: steps back, time to the minimum, what it cost and who waited."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadgen.metrics import RequestRecord, paired_ratio, percentile, summarise

KEYS = ("p50_ttft_ms", "p95_ttft_ms", "p99_ttft_ms", "p95_tpot_ms", "p95_e2el_ms")
COMPARED = ("p95_ttft_ms", "replica_s")
OURS = "freeness"

Sizes = Sequence[tuple[float, int]]  # from that second on, so many replicas; the first entry is the beginning


@dataclass(frozen=True, slots=True)
class Rules:
    """Bounds and windows of an autoscaler: replicas, seconds. `slack_s`: it may be as much later, by how often it looks
    at the load and for how long it remembers it."""

    least: int
    up_s: float
    down_s: float
    slack_s: float

    def allowed_s(self, before: int) -> float:
        """Until a fleet of `before` replicas has the fewest, from when all is done.

        A window that began before ends with what was wanted then, and the last replica of all goes by itself.
        """
        windows = min(2, before - max(self.least, 1)) + (self.least == 0) if before > self.least else 0
        return windows * (self.down_s + self.slack_s)


def steps(sizes: Sizes) -> list[tuple[float, int]]:
    """When the size changed, and by how many replicas."""
    return [(at, n - before) for (_, before), (at, n) in itertools.pairwise(sizes) if n != before]


def turns(sizes: Sizes) -> list[tuple[float, float, int]]:
    """Steps that go back: when, seconds since the step before, +1 upwards or -1 downwards."""
    return [(at, at - then, 1 if by > 0 else -1) for (then, last), (at, by) in itertools.pairwise(steps(sizes))
            if last * by < 0]  # fmt: skip


def most_within(times: Sequence[float], seconds: float) -> int:
    """The most of these (sorted) times that lie within so many seconds."""
    most, first = 0, 0
    for i, at in enumerate(times):
        while at - times[first] > seconds:
            first += 1
        most = max(most, i - first + 1)
    return most


def replica_seconds(sizes: Sizes, end: float) -> float:
    """Replicas times seconds from the first entry until `end`."""
    ends = [*(at for at, _ in sizes[1:]), end]
    return sum(n * (max(0.0, min(until, end) - at)) for (at, n), until in zip(sizes, ends, strict=True))


def time_to(least: int, sizes: Sizes, gone: float) -> float:
    """Seconds from `gone` until the fleet has `least` replicas for good; inf if it has not."""
    if sizes[-1][1] != least:
        return math.inf
    first = len(sizes) - 1
    while first and sizes[first - 1][1] == least:
        first -= 1
    return max(0.0, sizes[first][0] - gone)


def of_run(records: Sequence[RequestRecord], sizes: Sizes, rules: Rules, replica_s: float) -> dict[str, Any]:
    """Figures of one run. `records` are all requests, `sizes` what the autoscaler wanted, to long after the last.

    `early`: steps back that came before their window was over. `reversals_in_window`: the most steps back in any
    `down_s` seconds. `cut`: answers that broke off; `not_ok`: these and all others that had no end.
    """
    summary = summarise(records)
    outcomes = Counter(record.outcome for record in records)
    gone = max(record.due + record.latency for record in records)
    back = turns(sizes)
    at_end = next(n for at, n in reversed(sizes) if at <= max(gone, sizes[0][0]))
    to_min = time_to(rules.least, sizes, gone)
    return {
        "requests": len(records),
        **{key: summary[key] for key in KEYS},
        "replica_s": replica_s,
        "least": rules.least,
        "most": max(n for _, n in sizes),
        "steps": len(steps(sizes)),
        "reversals": len(back),
        "early": sum(gap < (rules.up_s if way > 0 else rules.down_s) - 1e-3 for _, gap, way in back),
        "reversals_in_window": most_within([at for at, _, _ in back], rules.down_s),
        "to_min_s": to_min if math.isfinite(to_min) else None,
        "allowed_to_min_s": rules.allowed_s(at_end),
        "cut": outcomes["cut"],
        "not_ok": len(records) - outcomes["ok"],
        "outcomes": dict(outcomes),
    }


def later(records: Sequence[RequestRecord], since: float) -> float | None:
    """TTFT p95, ms, of the requests that were due after `since` seconds; None if there were none."""
    waited = [record.ttft * 1e3 for record in records if record.due >= since and not record.error]
    return percentile(waited, 95) if waited else None


def compared(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """traffic -> other policy -> figure -> freeness over that policy, by seed, with interval."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for traffic in dict.fromkeys(run["traffic"] for run in runs):
        mine = _by_seed(runs, traffic, OURS)
        for policy in dict.fromkeys(run["policy"] for run in runs if run["policy"] != OURS):
            theirs = _by_seed(runs, traffic, policy)
            seeds = [seed for seed in mine if seed in theirs]
            row: dict[str, Any] = {}
            for key in COMPARED:
                ratio = paired_ratio([mine[s][key] for s in seeds], [theirs[s][key] for s in seeds])
                row[key] = {"mean": ratio.mean, "low": ratio.low, "high": ratio.high, "kind": ratio.kind,
                            "text": str(ratio)}  # fmt: skip
            found.setdefault(traffic, {})[policy] = row
    return found


def _by_seed(runs: Sequence[dict[str, Any]], traffic: str, policy: str) -> dict[int, dict[str, Any]]:
    return {run["seed"]: run for run in runs if (run["traffic"], run["policy"]) == (traffic, policy)}


def checks(
    runs: Sequence[dict[str, Any]], ratios: Mapping[str, Mapping[str, Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """What the product's policy promises, what was found, and whether that is met."""
    mine = [run for run in runs if run["policy"] == OURS]
    back, early = sum(run["reversals"] for run in mine), sum(run["early"] for run in mine)
    worst = max(mine, key=lambda run: run["reversals_in_window"])
    late = [run for run in mine if run["to_min_s"] is None or run["to_min_s"] > run["allowed_to_min_s"]]
    never = sum(run["to_min_s"] is None for run in mine)
    slowest = max((run["to_min_s"] for run in mine if run["to_min_s"] is not None), default=math.nan)
    dominated = [
        f"{traffic}: {policy}"
        for traffic, others in ratios.items()
        for policy, row in others.items()
        if all(row[key]["mean"] > 1 for key in COMPARED)
    ]
    grown = sum(run["most"] > max(run["least"], 1) for run in mine)
    asked, failed = sum(run["requests"] for run in mine), sum(run["not_ok"] for run in mine)
    found = [
        ("the fleet grows with the load", f"in {grown} of {len(mine)} runs", grown == len(mine)),
        ("a step back comes after its window", f"{early} of {back} steps back came earlier", early == 0),
        (
            "at most one reversal in any downscale window",
            f"{worst['reversals_in_window']} ({worst['traffic']}), {back} in all runs",
            worst["reversals_in_window"] <= 1,
        ),
        (
            "at the minimum two windows after the load is gone",
            f"{slowest:.0f} s at most, {never} of {len(mine)} runs never, {len(late)} late",
            not late,
        ),
        ("no stream is cut, none refused", f"{sum(r['cut'] for r in mine)} cut, {failed} of {asked} not whole",
         asked > 0 and failed == 0),
    ]  # fmt: skip
    if ratios:
        name = "no other policy has a shorter TTFT p95 and fewer replica-seconds"
        found.append((name, ", ".join(dominated) or "none has both", not dominated))
    return [{"check": check, "found": text, "met": bool(met)} for check, text, met in found]
