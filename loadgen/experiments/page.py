"""docs/experiments.md, made from the result files alone: our figures beside the papers'."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from loadgen import report
from loadgen.experiments import plots
from loadgen.experiments.estimate import METHOD, Estimate, number
from loadgen.experiments.experiment import Claim, Condition
from loadgen.experiments.results import FOLDER, Results
from loadgen.svg import Plot

PAGE = report.ROOT / "docs" / "experiments.md"
NOT_KNOWN = "not in our notes"
REPRODUCES, UNDECIDED = "reproduces", "undecided"
_INTRODUCTION = """# Experiments

Made by `python -m loadgen experiment --page` from `results/experiments/`; do not edit.

```bash
python -m loadgen experiment                     # which there are, and what they cost
python -m loadgen experiment larry-engine        # simulate what is missing of it, then write this page
python -m loadgen experiment all --quick         # a tenth of the requests, two seeds; nothing of it comes here
```

All runs are simulated ([simulator.md](simulator.md)): vLLM's own scheduler and the product's own policies, in made-up
time. Two papers are repeated: the survey, Kossmann et al., *Is the GPU half-empty or half-full? Practical scheduling
techniques for LLMs* (LARRY and SAL), and the multi-tier paper, *Beyond Binary Priorities* (arXiv 2608.16336).
The papers' figures are those that our notes of them give; where the notes lack one it says so. Neither paper's
hardware was at hand.
"""


def render(every: Sequence[Results]) -> str:
    """The page's text."""
    return "\n".join([_INTRODUCTION, *_overview(every), *(line for one in every for line in _section(one))])


def write(every: Sequence[Results], page: Path = PAGE, folder: Path = FOLDER) -> Path:
    """Write the page and the plots of all that has cells."""
    for results in every:
        for name, plot in pictures(results).items():
            plots.write(plot, folder / name)
    page.write_text(render(every))
    return page


def pictures(results: Results) -> dict[str, Plot]:
    """Plots of an experiment by file name; none without cells."""
    if not results.cells:
        return {}
    drawn = results.experiment.plots(results)
    return {f"{results.experiment.name}-{name}.svg": plot for name, plot in drawn.items()}


def verdict(claim: Claim, ours: Estimate) -> str:
    """What our figure says of the paper's: it reproduces if the mean is in the paper's range and the gain is sure."""
    if claim.paper is None:
        return NOT_KNOWN
    if not ours.count or math.isnan(ours.mean):
        return "not run yet"
    low, high = claim.paper
    if math.isnan(ours.low):
        return f"{UNDECIDED}: one seed"
    below, above = ours.low, ours.high
    inside = low <= ours.mean <= high
    if claim.over is not None and below <= 1 <= above and not (inside and low <= 1 and above <= high):
        return f"{UNDECIDED}: the interval has 1 in it" if above >= low else "does not reproduce: no difference"
    if inside:
        return REPRODUCES
    if below <= high and above >= low:
        return f"{UNDECIDED}: the paper's is within the interval"
    if claim.over is None:
        return "does not reproduce: " + ("more" if below > high else "less")
    if below > high:
        return f"{REPRODUCES}, and more"
    return "same direction, less" if below > 1 else "does not reproduce: the other way round"


def ours_of(results: Results, claim: Claim) -> Estimate:
    """Our figure for a claim."""
    if claim.over is None:
        return results.mean(claim.figure, claim.of)
    return results.ratio(claim.figure, claim.over, claim.of)


def _overview(every: Sequence[Results]) -> Iterator[str]:
    yield f"Intervals in brackets: {METHOD}.\n"
    yield "| experiment | cells | seeds | CPU of all, s | the paper's figures: reproduced | undecided | not |"
    yield "|---|---|---|---|---|---|---|"
    for results in every:
        found = [verdict(claim, ours_of(results, claim)) for claim in results.experiment.claims]
        counts = [
            sum(said.startswith(words) for said in found)
            for words in ((REPRODUCES,), (UNDECIDED,), ("same direction", "does not"))
        ]
        cells = f"{len(results.cells)} of {len(results.experiment.conditions) * len(results.experiment.seeds)}"
        name, cpu = results.experiment.name, sum(cell.cpu_s for cell in results.cells)
        yield (
            f"| [{name}](#{name}) | {cells} | {len(results.seeds)} | {cpu:.0f} | " + " | ".join(map(str, counts)) + " |"
        )
    yield ""


def _section(results: Results) -> Iterator[str]:
    experiment = results.experiment
    yield f"## {experiment.name}\n"
    yield f"{experiment.title}.\n"
    yield f"Of the paper: {experiment.source}.\n"
    if experiment.settings:
        yield "Throughout: " + ", ".join(f"{key} {value}" for key, value in experiment.settings.items()) + ".\n"
    if not results.cells:
        yield f"Not run yet: `python -m loadgen experiment {experiment.name}`.\n"
        return
    if experiment.claims:
        yield from _claims(results)
    for name in pictures(results):
        yield f"![{name}](../results/experiments/{name})\n"
    yield from _table(results)
    for remark in experiment.remarks:
        yield f"* {remark}"
    if experiment.remarks:
        yield ""


def _claims(results: Results) -> Iterator[str]:
    yield "| | ours | median seed | the paper's | ours / the paper's | |"
    yield "|---|---|---|---|---|---|"
    for claim in results.experiment.claims:
        ours = ours_of(results, claim)
        paper, quotient = NOT_KNOWN, "-"
        if claim.paper is not None:
            low, high = claim.paper
            paper = number(low) if low == high else f"{number(low)}-{number(high)}"
            if low > 0:
                quotient = number(ours.mean / math.sqrt(low * high))
        said = verdict(claim, ours) if claim.paper is not None else ""
        why = f"; {claim.why}" if claim.why and said and not said.startswith(REPRODUCES) else ""
        yield f"| {claim.what} | {ours} | {number(ours.median)} | {paper} | {quotient} | {said}{why} |"
    yield ""


def _table(results: Results) -> Iterator[str]:
    experiment = results.experiment
    axes = list(dict.fromkeys(axis for condition in experiment.conditions for axis in condition))
    yield "<details><summary>all conditions</summary>\n"
    yield "| " + " | ".join([*axes, *experiment.figures.values()]) + " |"
    yield "|" + "---|" * (len(axes) + len(experiment.figures))
    for condition in experiment.conditions:
        yield "| " + " | ".join([*_places(condition, axes), *_row(results, condition)]) + " |"
    yield "\n</details>\n"


def _places(condition: Condition, axes: Sequence[str]) -> list[str]:
    return [str(condition.get(axis, "")) for axis in axes]


def _row(results: Results, condition: Condition) -> list[str]:
    return [str(results.mean(figure, condition)) for figure in results.experiment.figures]
