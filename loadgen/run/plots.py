"""Which plots a report has: distributions and violins of the waits, timelines of a run, capacity curves of several."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from loadgen.metrics import RequestRecord
from loadgen.run import results
from loadgen.svg import Plot, Scale, cdf, colour, scale_for

NO_TIER = "all"
BINS = (20, 120)  # of a timeline, fewest and most; between them one for every PER_BIN requests
PER_BIN = 4

Groups = Mapping[str, list[RequestRecord]]


@dataclass(frozen=True, slots=True)
class RunFiles:
    """A run as it was written: its folder's name, run.json, and its answers."""

    name: str
    found: dict[str, Any]
    lines: list[results.Line]

    def by_tier(self) -> dict[str, list[RequestRecord]]:
        """Records of each tier, those without a tier as one."""
        groups: dict[str, list[RequestRecord]] = {}
        for line in self.lines:
            name = NO_TIER if line.tier is None else f"tier {line.tier}"
            groups.setdefault(name, []).append(line.record())
        return dict(sorted(groups.items()))


def waits(groups: Groups) -> list[Plot]:
    """Distribution functions of the waits of each group."""
    wanted: list[tuple[str, Callable[[RequestRecord], Iterable[float]]]] = [
        ("TTFT, ms", lambda r: [r.ttft * 1e3]),
        ("TTFT per prompt token, ms", lambda r: [r.ttft * 1e3 / r.prompt_len] if r.prompt_len else []),
        ("inter-token latency, ms", lambda r: [itl * 1e3 for itl in r.itls]),
        ("end to end, ms", lambda r: [r.latency * 1e3]),
    ]
    drawn = []
    for title, of in wanted:
        values = {name: [v for r in _ended(records) for v in of(r)] for name, records in groups.items()}
        every = [v for each in values.values() for v in each]
        plot = Plot(f"{title}: distribution", title, "% of all", scale_for(every, log=True), Scale(0, 100))
        for i, (name, each) in enumerate(values.items()):
            plot.line(cdf(each), name, colour(i))
        drawn.append(plot)
    return drawn


def violins(groups: Groups) -> list[Plot]:
    """Violins of the waits of each group, with their medians."""
    wanted: list[tuple[str, Callable[[RequestRecord], float]]] = [
        ("TTFT, ms", lambda r: r.ttft * 1e3),
        ("token generation time, ms", lambda r: r.tgt * 1e3),
    ]
    drawn = []
    for title, of in wanted:
        values = [[of(r) for r in _ended(records)] for records in groups.values()]
        every = [v for each in values for v in each]
        plot = Plot(title, "", title, Scale(-0.6, len(values) - 0.4), scale_for(every, log=True))
        plot.x_ticks = [(float(i), name) for i, name in enumerate(groups)]
        for i, each in enumerate(values):
            plot.violin(each, float(i), 0.4, colour(i))
        drawn.append(plot)
    return drawn


def timelines(run: RunFiles) -> list[Plot]:
    """What went on over the time of a run, with what its hooks did."""
    records = [line.record() for line in run.lines]
    end = max((max(r.sent, *r.times) if r.times else r.sent for r in records), default=1.0) or 1.0
    bins = min(max(BINS[0], len(records) // PER_BIN), BINS[1])
    width = end / bins
    seconds = Scale(0, end)

    def rate(times: Iterable[float]) -> list[tuple[float, float]]:
        counts, _ = np.histogram(list(times), bins, (0, end))
        return [((i + 0.5) * width, float(c) / width) for i, c in enumerate(counts)]

    sent, ended = rate(r.sent for r in records), rate(r.due + r.latency for r in _ended(records))
    flows = Plot("requests", "s", "per second", seconds, scale_for([y for _, y in (*sent, *ended)], zero=True))
    flows.line(sent, "sent", colour(0))
    flows.line(ended, "ended well", colour(2))
    tokens = rate(t for r in records for t in r.times)
    output = Plot("answer tokens", "s", "per second", seconds, scale_for([y for _, y in tokens], zero=True))
    output.line(tokens, "tokens", colour(1))
    steps = sorted([(r.sent, 1) for r in records] + [(_left(r), -1) for r in records])
    level = np.cumsum([step for _, step in steps]) if steps else np.zeros(0)
    open_ = [(t, float(n)) for (t, _), n in zip(steps, level, strict=True)]
    opened = Plot("requests open", "s", "requests", seconds, scale_for([y for _, y in open_], zero=True))
    opened.line(open_, "open", colour(3))
    good = _ended(records)
    first = Plot("TTFT of each request", "due, s", "ms", seconds, scale_for([r.ttft * 1e3 for r in good], log=True))
    for i, (name, group) in enumerate(run.by_tier().items()):
        first.dots([(r.due, r.ttft * 1e3) for r in _ended(group)], name, colour(i))
    bad = [(r.due, first.y.low) for r in records if r.outcome in ("shed", "error", "cut")]
    first.dots(bad, "shed, error, cut", "#d00000")
    longest = _longest_gaps(run, end, bins)
    every = [y for points in longest.values() for _, y in points]
    gaps = Plot("longest gap between tokens", "s", "ms", seconds, scale_for(every, log=True))
    for i, (name, points) in enumerate(longest.items()):
        gaps.line(points, name, colour(i))
    drawn = [flows, output, opened, gaps, first]
    for plot in drawn:
        for hook in run.found["hooks"]:
            if hook["began"] is not None:
                plot.upright(hook["began"], hook["command"])
    return drawn


def _longest_gaps(run: RunFiles, end: float, bins: int) -> dict[str, list[tuple[float, float]]]:
    """Of each tier, at the middle of each bin, the longest gap in ms that a token ended."""
    found = {}
    for name, records in run.by_tier().items():
        longest = np.zeros(bins)
        for r in records:
            places = (np.asarray(r.times[1:]) / end * bins).astype(int)
            np.maximum.at(longest, np.minimum(places, bins - 1), np.diff(r.times))
        found[name] = [((i + 0.5) * end / bins, float(gap) * 1e3) for i, gap in enumerate(longest) if gap]
    return found


def capacity(runs: Sequence[RunFiles]) -> list[Plot]:
    """Waits and goodput over the rate at which each run's requests were sent; a run of one request has none."""
    ordered = sorted(
        (run for run in runs if run.found["arrivals"]["rate"]), key=lambda run: run.found["arrivals"]["rate"]
    )
    rates = [run.found["arrivals"]["rate"] for run in ordered]
    drawn = []
    for name, title in (("ttft_ms", "TTFT"), ("normalized_ttft_ms", "TTFT per prompt token"), ("tpot_ms", "TPOT")):
        values = {p: [run.found[f"{p}_{name}"] or math.nan for run in ordered] for p in ("p50", "p99")}
        every = [v for each in values.values() for v in each]
        plot = Plot(f"{title} by rate", "requests/s", "ms", scale_for(rates, zero=True), scale_for(every, log=True))
        for i, (p, each) in enumerate(values.items()):
            plot.line(list(zip(rates, each, strict=True)), p, colour(i))
            plot.dots(list(zip(rates, each, strict=True)), p, colour(i))
        drawn.append(plot)
    served = [run.found["request_throughput"] for run in ordered]
    good = [run.found["request_goodput"] for run in ordered]
    known = [g for g in good if g is not None]
    plot = Plot(
        "served by rate",
        "requests/s",
        "per second",
        scale_for(rates, zero=True),
        scale_for([*served, *known], zero=True),
    )
    plot.line(list(zip(rates, served, strict=True)), "ended well", colour(2))
    plot.line([(r, g) for r, g in zip(rates, good, strict=True) if g is not None], "within SLO", colour(0))
    drawn.append(plot)
    if known:
        drawn.append(_attainment(ordered, rates))
    return drawn


def _attainment(runs: Sequence[RunFiles], rates: Sequence[float]) -> Plot:
    plot = Plot("within SLO by rate", "requests/s", "% of all", scale_for(rates, zero=True), Scale(0, 100))
    tiers = sorted({tier for run in runs for tier in run.found["tiers"]})
    for i, tier in enumerate([*tiers, NO_TIER]):
        groups = [run.found if tier == NO_TIER else run.found["tiers"].get(tier, {}) for run in runs]
        shares = [group.get("within_slo") for group in groups]
        points = [(rate, 100 * share) for rate, share in zip(rates, shares, strict=True) if share is not None]
        name = tier if tier == NO_TIER else f"tier {tier}"
        plot.line(points, name, colour(i))
        plot.dots(points, name, colour(i))
    return plot


def _ended(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    return [r for r in records if r.outcome == "ok"]


def _left(record: RequestRecord) -> float:
    return record.times[-1] if record.times else record.sent
