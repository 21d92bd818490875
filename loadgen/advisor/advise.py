"""The search: all pairs of policies on the busiest stretch of the workload, the promising ones on all of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from loadgen.advisor.search import Found, least
from loadgen.advisor.trial import Pair, Run, Trial, Trials, alone, busiest
from loadgen.run.slo import Slos
from loadgen.simulator.cluster import Fleet, Job

FAR = 1  # replicas above the best so far beyond which the coarse search rules a pair out
WHOLE = 2  # times the coarse stretch: a workload up to that long is searched as a whole only
ALONE = 200  # requests of each tier that an idle replica is asked to serve
IDLE = Pair({"name": "fcfs"}, {"name": "least_requests"})  # nothing keeps a lone request waiting
CLEARLY = 3.0  # standard errors by which an idle replica must miss the target for a tier to be given up
SLOWER = (1.1, 1.25)  # factors on all step times with which the answer is tried again


@dataclass(slots=True)
class Advice:
    """What was found.

    `alone`: the share of each tier that keeps its bounds on an idle replica, where it can be no better; `hopeless`:
    tiers that clearly miss the target even there, so that nothing else was tried. `best`: the cheapest trial that keeps
    every promise; None: there is none up to `most` replicas. `shaky`: with one replica more it would not. `nearest`:
    without a best one, the trial that went on longest before it was clear that it misses the target. `needs`: replicas
    of each pair that was searched on the whole workload (None: none is enough, or none up to the count of a better
    pair), by its name; `dropped`: pairs that the coarse search ruled out, and what they needed there. `slower`: by
    factor on the step times, the replicas that the best pair then needs. `coarse` and `fine`: all that was run.
    """

    most: int
    target: float
    alone: dict[int, float] = field(default_factory=dict)
    hopeless: list[int] = field(default_factory=list)
    best: Trial | None = None
    shaky: bool = False
    nearest: Trial | None = None
    needs: dict[str, int | None] = field(default_factory=dict)
    dropped: dict[str, int | None] = field(default_factory=dict)
    slower: dict[float, int | None] = field(default_factory=dict)
    coarse: list[Trial] = field(default_factory=list)
    fine: list[Trial] = field(default_factory=list)


def steps(pairs: Sequence[Pair]) -> int:
    """How often `advise` calls `step`."""
    return 2 * len(pairs) + 3


def advise(
    fleet: Fleet,
    workloads: Mapping[int, Sequence[Job]],
    slos: Slos,
    pairs: Sequence[Pair],
    *,
    target: float,
    most: int,
    coarse: int,
    tell: Callable[[str], None] = lambda text: None,
    step: Callable[[], None] = lambda: None,
) -> Advice:
    """Search 1..`most` replicas of `fleet` under each pair; `target` is a share of each tier's requests.

    `workloads` by seed: the search goes by the first, the answer must hold on all. The coarse search takes the `coarse`
    busiest requests in a row. `tell` hears of each simulation before it begins; `step`: see `steps`.
    """
    advice = Advice(most, target)
    trials = Trials(fleet, workloads, slos, target, tell)
    jobs = workloads[trials.seeds[0]]
    idle = trials.of(alone(jobs, ALONE)).trial(IDLE, 1, trials.seeds[:1], whole=True).runs[0]
    advice.alone = {tier: outcome.within for tier, outcome in idle.tiers.items()}
    advice.hopeless = _hopeless(idle, target)
    step()
    if advice.hopeless:
        return advice
    hints = _coarse(advice, trials, jobs, pairs, coarse, step)
    _fine(advice, trials, pairs, hints, step)
    best = _confirmed(advice, trials, pairs)
    step()
    if best is not None:
        count = advice.needs[str(best)] or most
        advice.best = trials.trial(best, count, trials.seeds)
        for factor in SLOWER:
            enough = partial(trials.slower(factor).enough, best, seeds=trials.seeds[:1])
            advice.slower[factor] = least(enough, most, count, sure=False).replicas
    else:
        near = max(trials.ran(), key=lambda trial: (trial.played, -trial.replicas))
        advice.nearest = trials.trial(near.pair, near.replicas, trials.seeds, whole=True)
    step()
    advice.fine = trials.ran()
    return advice


def _hopeless(idle: Run, target: float) -> list[int]:
    """Tiers whose share on an idle replica cannot be below the target by the luck of which requests were asked."""
    return [
        tier
        for tier, outcome in idle.tiers.items()
        if outcome.within < target - CLEARLY * math.sqrt(target * (1 - target) / outcome.judged)
    ]


def _coarse(
    advice: Advice, trials: Trials, jobs: Sequence[Job], pairs: Sequence[Pair], count: int, step: Callable[[], None]
) -> dict[str, int | None]:
    """Replicas that each pair needs for the busiest requests; 1 for all where the whole workload is not much longer."""
    if len(jobs) <= WHOLE * count:
        for _ in pairs:
            step()
        return {str(pair): 1 for pair in pairs}
    few, hints, start = trials.of(busiest(jobs, count)), {}, 1
    for pair in pairs:
        enough = partial(few.enough, pair, seeds=few.seeds)
        hints[str(pair)] = least(enough, advice.most, start, sure=False).replicas
        start = hints[str(pair)] or start
        step()
    advice.coarse = few.ran()
    return hints


def _fine(
    advice: Advice, trials: Trials, pairs: Sequence[Pair], hints: Mapping[str, int | None], step: Callable[[], None]
) -> None:
    """The least replicas for the whole workload on the first seed, of pairs that can be better than those before."""
    limit, seeds, found_one = advice.most, trials.seeds[:1], False
    start = 1
    for pair in sorted(pairs, key=lambda each: hints[str(each)] or advice.most + 1):
        name, hint = str(pair), hints[str(pair)] or advice.most
        if found_one and hint > limit + FAR:
            advice.dropped[name] = hints[name]
        else:
            enough = partial(trials.enough, pair, seeds=seeds)
            found = least(enough, limit, min(max(hint, start), limit), sure=False)
            advice.needs[name] = found.replicas
            if found.replicas is not None:
                limit, found_one, start = found.replicas, True, found.replicas
        step()


def _confirmed(advice: Advice, trials: Trials, pairs: Sequence[Pair]) -> Pair | None:
    """The pair with the fewest replicas on all seeds, the one with more to spare of equals; None if there is none.

    What a pair needs on all seeds replaces what it needs on the first.
    """
    known: dict[str, Found] = {}
    while True:
        left = [pair for pair in pairs if advice.needs.get(str(pair)) is not None]
        if not left:
            return None
        best = min(left, key=lambda pair: _rank(advice, trials, pair))
        if str(best) in known:
            advice.shaky = known[str(best)].shaky
            return best
        found = least(partial(trials.enough, best, seeds=trials.seeds), advice.most, advice.needs[str(best)] or 1)
        known[str(best)], advice.needs[str(best)] = found, found.replicas


def _rank(advice: Advice, trials: Trials, pair: Pair) -> tuple[int, float]:
    count = advice.needs[str(pair)] or advice.most
    return count, -trials.trial(pair, count, trials.seeds[:1]).worst
