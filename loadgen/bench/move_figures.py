"""Figures of moves: gaps in a stream around a move, the others' pace beside it, and what both are checked against."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from loadgen.metrics import paired_ratio, percentile

MOVED = ("done", "recompute")  # outcomes of a move that the request has left its replica by
STEPS = 2.0  # decode steps that a pause may take
FLAT_STEPS = 0.5  # by which the longest sequence's pause may exceed the shortest's, in decode steps
AGAINST_RECOMPUTE = 100.0
SLOWDOWN = 1.02
PUNCTUAL_S = 0.005


def pause(times: Sequence[float], began: float, answered: float) -> dict[str, float]:
    """One stream's figures around a move commanded at `began` and over at `answered`, s.

    `pause`: the longest gap between tokens that overlaps that time; `itl`: the median gap before; `ordinary`: the
    longest of as many gaps before; `pause / itl` is the pause in decode steps.
    """
    every = list(pairwise(times))
    before = [b - a for a, b in every if b <= began]
    around = [b - a for a, b in every if b > began and a <= answered]
    if not before or not around:
        raise ValueError("the move did not lie between two tokens of the stream")
    itl = percentile(before, 50)
    return {
        "itl": itl,
        "pause": max(around),
        "steps": max(around) / itl,
        "ordinary": max(before[-len(around) :]),
        "seconds": answered - began,
    }


def slowdown(streams: Sequence[Sequence[float]], began: float, answered: float) -> dict[str, float]:
    """Mean seconds between tokens of streams beside a move: during it, as long before it, and before that."""
    width = answered - began
    return {
        "during": mean_gap(streams, began, answered),
        "before": mean_gap(streams, began - width, began),
        "earlier": mean_gap(streams, began - 2 * width, began - width),
    }


def mean_gap(streams: Sequence[Sequence[float]], start: float, end: float) -> float:
    """Mean of the gaps that end in (start, end], over all streams; nan without any."""
    found = [b - a for times in streams for a, b in pairwise(times) if start < b <= end]
    return float(np.mean(found)) if found else float("nan")


def figures(moves: Sequence[dict[str, Any]], copies: Sequence[dict[str, Any]], late: Sequence[float]) -> dict[str, Any]:
    """All figures of a run: `pauses` by length and kind, `slowdown` by side, `checks`, and each move and copy."""
    kinds = list(dict.fromkeys((m["length"], m["how"]) for m in moves))
    pauses = [_of_kind(length, how, [m for m in moves if (m["length"], m["how"]) == (length, how)])
              for length, how in sorted(kinds, key=lambda kind: kind[0])]  # fmt: skip
    slowed = {
        side: _slowdown([c["others"][side] for c in copies if c["outcome"] in MOVED])
        for side in ("source", "destination")
    }
    client_late = {"p99_ms": percentile(late, 99) * 1e3, "max_ms": max(late, default=0.0) * 1e3}
    return {
        "pauses": pauses,
        "slowdown": slowed,
        "client_late": client_late,
        "checks": checks(pauses, slowed, [*moves, *copies], percentile(late, 99)),
        "moves": list(moves),
        "copies": list(copies),
    }


def _of_kind(length: int, how: str, every: Sequence[dict[str, Any]]) -> dict[str, Any]:
    done = [m for m in every if m["outcome"] in MOVED]

    def p50(key: str) -> float:
        return percentile([m[key] for m in done], 50)

    def most(key: str) -> float:
        return max((m[key] for m in done), default=float("nan"))

    return {
        "length": length,
        "how": how,
        "asked": len(every),
        "moved": len(done),
        "itl_ms": p50("itl") * 1e3,
        "p50_pause_ms": p50("pause") * 1e3,
        "max_pause_ms": most("pause") * 1e3,
        "p50_steps": p50("steps"),
        "max_steps": most("steps"),
        "p50_ordinary_ms": p50("ordinary") * 1e3,
        "max_ordinary_ms": most("ordinary") * 1e3,
        "p50_move_ms": p50("seconds") * 1e3,
    }


def _slowdown(sides: Sequence[dict[str, float]]) -> dict[str, dict[str, Any]]:
    found = {}
    for key, over, under in (("during", "during", "before"), ("undisturbed", "before", "earlier")):
        pairs = [(s[over], s[under]) for s in sides if np.isfinite(s[over]) and np.isfinite(s[under])]
        if not pairs:
            found[key] = {"mean": float("nan"), "pairs": 0, "text": "-"}
            continue
        ratio = paired_ratio([a for a, _ in pairs], [b for _, b in pairs])
        text = f"{ratio.mean:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
        found[key] = {"mean": ratio.mean, "low": ratio.low, "high": ratio.high, "kind": ratio.kind,
                      "pairs": ratio.pairs, "text": text}  # fmt: skip
    return found


def checks(
    pauses: Sequence[dict[str, Any]],
    slowed: dict[str, dict[str, dict[str, Any]]],
    every: Sequence[dict[str, Any]],
    late_s: float,
) -> list[dict[str, Any]]:
    """What live migration promises, what was found, and whether that is met. `late_s`: p99 of the client's own delay.

    A figure that is missing (nan) meets nothing.
    """
    live = [row for row in pauses if row["how"] == "live"]
    longest = max(row["length"] for row in pauses)
    p50, most = [row["p50_steps"] for row in live], [row["max_steps"] for row in live]
    rise = p50[-1] - p50[0] if live else float("nan")
    at_longest = {row["how"]: row["p50_pause_ms"] for row in pauses if row["length"] == longest}
    gain = at_longest.get("recompute", float("nan")) / at_longest.get("live", float("nan"))
    moved = sum(m["outcome"] in MOVED for m in every)
    found = [
        ("every move was made", f"{moved} of {len(every)}", bool(every) and moved == len(every)),
        (f"live pause p50 < {STEPS:g} decode steps", _range(p50), bool(p50) and all(s < STEPS for s in p50)),
        (f"the longest live pause < {STEPS:g} decode steps", _range(most), bool(most) and all(s < STEPS for s in most)),
        (f"flat: at most {FLAT_STEPS:g} steps more for the longest", f"{rise:+.2f}", rise <= FLAT_STEPS),
        (
            f"recomputing {longest} tokens pauses >= {AGAINST_RECOMPUTE:g} times as long",
            f"{gain:.0f} times",
            gain >= AGAINST_RECOMPUTE,
        ),
    ]
    for side, ratios in slowed.items():
        ratio = ratios["during"]
        found.append((f"others on the {side} at most 2 % slower", ratio["text"], ratio["mean"] <= SLOWDOWN))
    late = f"{late_s * 1e3:.1f} ms"
    found.append(("the client kept its times: p99 late <= 5 ms", late, late_s <= PUNCTUAL_S))
    return [{"check": check, "found": text, "met": bool(met)} for check, text, met in found]


def _range(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values) or "-"
