"""Make a workload from models of arrivals, lengths and tiers, and one seed.

Each aspect draws from a random stream of its own, so changing the tiers (or the arrivals) leaves everything else as it
was: policies can be compared on common random numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from loadgen import lengths, tiers
from loadgen.workloads.arrival_models import arrival_model
from loadgen.workloads.length_models import Agents, Lengths, length_model, lognormal
from loadgen.workloads.workload import Request, Workload, by_due

STREAMS = ("lengths", "arrivals", "tiers", "cancel")
CREDIT = (
    'Azure LLM inference traces 2023; P. Patel et al., "Splitwise", ISCA 2024; CC-BY 4.0, '
    "https://creativecommons.org/licenses/by/4.0/; quantiles computed from them"
)


def make(
    requests: int,
    *,
    lengths_model: str = "chat",
    arrivals: str = "poisson:rate=1",
    tier_mix: str | None = None,
    tier_count: int = 4,
    context: int | None = None,
    deadline: float | None = None,
    cancel_rate: float = 0.0,
    cancel_delay: float = 1.0,
    seed: int = 0,
) -> Workload:
    """So many requests. `context` scales the lengths to that window; a share `cancel_rate` leaves early.

    `tier_mix` is a name or the weights of `loadgen.tiers`; None: no tiers. ValueError names what is wrong.
    """
    if requests < 1:
        raise ValueError(f"requests: {requests} are too few; give at least 1")
    rng = _streams(seed)
    model, process = length_model(lengths_model), arrival_model(arrivals)
    context = model.context if context is None else min(context, model.context)
    about: dict[str, Any] = {
        "made": {"lengths": lengths_model, "arrivals": arrivals, "requests": requests, "seed": seed, "context": context}
    }
    if lengths_model.partition(":")[0] in lengths.names():
        about["credit"] = CREDIT
    try:
        times = process.times(requests, rng["arrivals"])
        if isinstance(model, Agents):
            drawn, block_tokens = _agents(model, times, context, rng["lengths"])
        else:
            drawn, block_tokens = _independent(model, times, context, rng["lengths"]), 0
    except (ArithmeticError, MemoryError) as error:
        raise ValueError(f"{lengths_model}, {arrivals}: no {requests} requests can be drawn: {error}") from None
    workload = Workload(by_due(drawn), about, block_tokens, context)
    if tier_mix is not None:
        workload = tiered(workload, tier_mix, tier_count, seed)
    if cancel_rate:
        workload = cancelling(workload, cancel_rate, cancel_delay, seed)
    if deadline is not None:
        workload = with_deadline(workload, deadline)
    return workload


def tiered(workload: Workload, mix: str, count: int, seed: int = 0) -> Workload:
    """The workload with a tier for each request; all requests of a session have the same."""
    shares = tiers.mix(mix, count)
    names = [r.session if r.session is not None else i for i, r in enumerate(workload.requests)]
    owners = {name: None for name in names}
    drawn = dict(zip(owners, tiers.draw(len(owners), shares, _streams(seed)["tiers"]).tolist(), strict=True))
    how = {"mix": mix, "count": count, "seed": seed}
    return _changed(workload, {"tiers": how}, [{"tier": drawn[name]} for name in names])


def cancelling(workload: Workload, rate: float, delay: float, seed: int = 0) -> Workload:
    """The workload with a share `rate` of clients that leave, `delay` s after sending on average (exponential)."""
    if not 0 <= rate <= 1 or not delay > 0:
        raise ValueError(f"cancel: rate {rate:g} and delay {delay:g} s; give a share of 0 to 1 and a delay > 0")
    rng = _streams(seed)["cancel"]
    leaves, after = rng.random(len(workload.requests)), rng.exponential(delay, len(workload.requests))
    changes = [{"cancel_after": round(float(a), 4)} if u < rate else {} for u, a in zip(leaves, after, strict=True)]
    return _changed(workload, {"cancel": {"rate": rate, "delay": delay, "seed": seed}}, changes)


def with_deadline(workload: Workload, seconds: float) -> Workload:
    """The workload with a deadline, seconds after it was due, for each request that has none."""
    if not seconds > 0:
        raise ValueError(f"deadline: {seconds:g} s is no time; give a number > 0")
    changes = [{"deadline": float(seconds)} if r.deadline is None else {} for r in workload.requests]
    return _changed(workload, {"deadline": seconds}, changes)


def _changed(workload: Workload, about: dict[str, Any], changes: Sequence[dict[str, Any]]) -> Workload:
    requests = tuple(msgspec.structs.replace(r, **c) for r, c in zip(workload.requests, changes, strict=True))
    return dataclasses.replace(workload, requests=requests, about={**workload.about, **about})


def _streams(seed: int) -> dict[str, np.random.Generator]:
    parts = np.random.SeedSequence(seed).spawn(len(STREAMS))
    return {name: np.random.default_rng(part) for name, part in zip(STREAMS, parts, strict=True)}


def _independent(model: Lengths, times: Any, context: int, rng: np.random.Generator) -> list[Request]:
    prompts, answers = lengths.fit(*model.draw(len(times), rng), context, model.context)
    return [
        Request(due=float(t), prompt_tokens=int(p), output_tokens=int(a))
        for t, p, a in zip(times, prompts, answers, strict=True)
    ]


def _agents(model: Agents, times: Any, context: int, rng: np.random.Generator) -> tuple[list[Request], int]:
    """One request for each turn, as many as there are times: a session begins at one of the times, drawn at random."""
    turns = _turns(model, len(times), rng)
    factor = context / model.context
    prompts, answers = lengths.fit(
        np.asarray([t[2] for t in turns]), np.asarray([t[3] for t in turns]), context, model.context
    )
    sessions = turns[-1][0] + 1
    starts = times[np.sort(rng.choice(len(times), sessions, replace=False))]
    kinds = rng.integers(model.kinds, size=sessions)
    block = max(16, context // 512)
    shared = round(model.system * factor) // block
    most = int(prompts.max()) // block + 1
    requests = []
    for (session, offset, _, _), prompt, answer in zip(turns, prompts.tolist(), answers.tolist(), strict=True):
        own = model.kinds * shared + session * most
        count = prompt // block
        system = range(kinds[session] * shared, kinds[session] * shared + min(shared, count))
        blocks = (*map(int, system), *range(own, own + max(0, count - shared)))
        requests.append(
            Request(
                due=float(starts[session] + offset),
                prompt_tokens=prompt,
                output_tokens=answer,
                session=f"agent-{session}",
                blocks=blocks,
            )
        )
    return requests, block


def _turns(model: Agents, count: int, rng: np.random.Generator) -> list[tuple[int, float, int, int]]:
    """(session, seconds since its start, prompt tokens, answer tokens) of `count` turns; the last session is cut."""
    found: list[tuple[int, float, int, int]] = []
    session = 0
    while len(found) < count:
        turns = int(rng.geometric(1.0 / model.turns))
        answers, tools = lognormal(model.answer, 1.0, turns, rng), lognormal(model.tool, 1.0, turns, rng)
        gaps = rng.lognormal(np.log(model.gap) - 0.5, 1.0, turns)  # mean `gap`
        prompt, offset = model.system + int(lognormal(model.user, 1.0, 1, rng)[0]), 0.0
        for turn in range(turns):
            if turn and prompt + answers[turn] > model.context:
                break
            found.append((session, offset, prompt, int(answers[turn])))
            prompt += int(answers[turn] + tools[turn])
            offset += float(gaps[turn])
        session += 1
    return found[:count]
