"""The advice as one HTML page: the answer, what each pair needs, attainment against replicas."""

from __future__ import annotations

import math
import string
from collections.abc import Iterable, Sequence
from html import escape

from loadgen.advisor.advise import Advice
from loadgen.advisor.trial import Pair, Trial
from loadgen.run.html import STYLE
from loadgen.svg import Plot, Scale, colour, scale_for

NOT_DRAWN = "Not drawn: runs that were given up when a tier could no longer reach its target."


def letters(pairs: Sequence[Pair]) -> dict[str, str]:
    """A short name for each pair: A, B, ... and AA, AB, ... after Z."""
    names = [*string.ascii_uppercase, *(a + b for a in string.ascii_uppercase for b in string.ascii_uppercase)]
    return {str(pair): name for pair, name in zip(pairs, names, strict=False)}


def need(advice: Advice, name: str) -> str:
    """What is known of the replicas that a pair needs."""
    if name in advice.dropped:
        found = advice.dropped[name]
        return f"{found if found else f'over {advice.most}'} for the busiest stretch"
    if name not in advice.needs:
        return "not tried"
    found = advice.needs[name]
    return str(found) if found is not None else "more than the best, or than allowed"


def plots(advice: Advice, pairs: Sequence[Pair]) -> list[Plot]:
    """Attainment of the worst tier against replicas by policies, and of each tier under the best (or nearest) pair.

    Of trials that were played to their ends: of the others nobody knows it.
    """
    fine, coarse = ([t for t in trials if math.isfinite(t.worst)] for trials in (advice.fine, advice.coarse))
    drawn = []
    if fine:
        drawn.append(_by_pair("worst tier within bounds, whole workload", fine, advice, pairs))
    if coarse:
        drawn.append(_by_pair("worst tier within bounds, busiest stretch only", coarse, advice, pairs))
    chosen = advice.best or advice.nearest
    if chosen is not None:
        of_pair = [trial for trial in fine if trial.pair == chosen.pair]
        plot = _empty(f"each tier under {chosen.pair}", of_pair)
        for i, tier in enumerate(sorted({tier for trial in of_pair for tier in trial.runs[0].tiers})):
            _draw(plot, [(t.replicas, 100 * t.within(tier)) for t in of_pair], f"tier {tier}", colour(i))
        drawn.append(_target(plot, advice.target))
    return drawn


def page(advice: Advice, pairs: Sequence[Pair], sentences: Sequence[str], trust: Sequence[str]) -> str:
    """The page; nothing is loaded from elsewhere."""
    names = letters(pairs)
    rows = "".join(
        f"<tr><td>{names[str(pair)]}</td><td>{escape(str(pair))}</td><td>{escape(need(advice, str(pair)))}</td></tr>"
        for pair in pairs
    )
    drawn = "".join(f"<div>{plot.svg()}</div>" for plot in plots(advice, pairs))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Advice</title><style>{STYLE}</style><body>'
        f"<h1>Advice</h1>{_paragraphs(sentences)}<h2>How sure this is</h2>{_paragraphs(trust)}"
        f"<h2>Policies</h2><table><tr><th></th><th>scheduling + balancing</th><th>replicas needed</th></tr>{rows}"
        f"</table><h2>Plots</h2><p>{NOT_DRAWN}</p>"
        f'<div class="plots">{drawn}</div></body></html>\n'
    )


def _paragraphs(lines: Iterable[str]) -> str:
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


def _by_pair(title: str, trials: Sequence[Trial], advice: Advice, pairs: Sequence[Pair]) -> Plot:
    plot = _empty(title, trials)
    for i, (name, letter) in enumerate(letters(pairs).items()):
        if points := [(t.replicas, 100 * t.worst) for t in trials if str(t.pair) == name]:
            _draw(plot, points, letter, colour(i))
    return _target(plot, advice.target)


def _empty(title: str, trials: Sequence[Trial]) -> Plot:
    counts = sorted({float(trial.replicas) for trial in trials})
    x = scale_for(counts)
    plot = Plot(title, "replicas", "% of requests", Scale(x.low - 0.2, x.high + 0.2), Scale(0, 100))
    plot.x_ticks = [(count, f"{count:g}") for count in counts[:: max(1, len(counts) // 12)]]
    return plot


def _draw(plot: Plot, points: Iterable[tuple[float, float]], name: str, paint: str) -> None:
    ordered = sorted(points)
    plot.line(ordered, name, paint)
    plot.dots(ordered, name, paint)


def _target(plot: Plot, target: float) -> Plot:
    plot.line([(plot.x.low, 100 * target), (plot.x.high, 100 * target)], "", "#999999")
    return plot
