"""Experiments of the multi-tier paper: the figures are those of our notes, accountings differ as they say."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from deployments.step_content import Step
from loadgen.experiments import tiers, tiers_paper
from loadgen.experiments.tiers import HONEST, MULTI_TIER, PAPER, SYSTEMS, Clamped, Play
from loadgen.metrics import RequestRecord
from loadgen.simulator.cluster import Job, Outcome
from loadgen.simulator.step_cost import Fitted
from policies.balancing import BALANCING
from policies.scheduling import SCHEDULING

COST = Fitted(step=1.0, prefill_token=0.5, prefill_request=0.0, attention_pair=0.0, decode=0.1, context_token=0.01)


def small(system: str, accounting: str, **changed: Any) -> Play:
    """A burst of a few requests in two tiers."""
    return Play(
        **{
            "system": system,
            "accounting": accounting,
            "mix": "uniform",
            "tiers": 2,
            "requests": 60,
            "rate": 1250.0,
            **changed,
        }
    )


def test_every_claim_and_plot_picks_one_condition() -> None:
    """Each claim names one condition of its experiment, and those of the tables are the 72 of our notes, twice."""
    for experiment in tiers_paper.EXPERIMENTS:
        for claim in experiment.claims:
            for where in filter(None, (claim.of, claim.over)):
                assert len([c for c in experiment.conditions if where.items() <= c.items()]) == 1, claim.what
            assert claim.figure in experiment.figures
    (tables,) = [e for e in tiers_paper.EXPERIMENTS if e.name == "tiers-tables"]
    assert sum(claim.paper is not None for claim in tables.claims) == 2 * 72


def test_systems_can_be_made() -> None:
    """Every system's policies exist."""
    for system in SYSTEMS.values():
        parameters = dict(system.scheduling)
        assert SCHEDULING.make(parameters.pop("name"), **parameters)
        assert BALANCING.make(system.balancing)


def test_decodes_beyond_the_priced_ones_are_free_in_the_papers_accounting() -> None:
    """Up to 32 decodes cost what they cost, 64 cost what 32 of the same length do; prefill is never free."""
    clamped = Clamped(COST)
    assert clamped.seconds(Step(decodes=32, context_tokens=320)) == COST.seconds(Step(decodes=32, context_tokens=320))
    assert clamped.seconds(Step(decodes=64, context_tokens=640)) == COST.seconds(Step(decodes=32, context_tokens=320))
    more = clamped.seconds(Step(prefill_tokens=100, prefill_requests=1, decodes=64, context_tokens=640))
    assert more == pytest.approx(clamped.seconds(Step(decodes=64, context_tokens=640)) + 50)


def test_only_the_papers_system_has_no_limits_and_only_in_its_accounting() -> None:
    """KV cache without end for one system of one accounting; the reserve is capped in the honest one alone."""
    assert tiers.shape(small(MULTI_TIER, PAPER)).kv_blocks == tiers.WITHOUT_END
    for system in SYSTEMS:
        assert tiers.shape(small(system, HONEST)).kv_blocks == tiers.BLOCKS
        if system != MULTI_TIER:
            assert tiers.shape(small(system, PAPER)).kv_blocks == tiers.BLOCKS
    ten: dict[str, Any] = {"tiers": 10}
    paper, honest = (tiers.fleet(small(MULTI_TIER, a, **ten), 0).tiers for a in (PAPER, HONEST))
    assert paper is not None
    assert honest is not None
    assert sum(paper["headroom"]) == pytest.approx(0.773, abs=0.001)  # executed check in our notes
    assert sum(honest["headroom"]) <= 0.35 + 1e-9
    assert paper["aging_s"] == [None] * 10
    assert honest["aging_s"] == [tiers.AGING_S] * 10


def test_tiers_leave_times_and_lengths_alone() -> None:
    """Mixes and systems are compared on the same requests."""
    plain, mixed = tiers.jobs(small(MULTI_TIER, PAPER, mix="none", tiers=1), 3), tiers.jobs(small(MULTI_TIER, PAPER), 3)
    assert [(j.due, j.prompt_tokens, j.output_tokens) for j in plain] == [
        (j.due, j.prompt_tokens, j.output_tokens) for j in mixed
    ]
    assert {j.tier for j in plain} == {0}
    assert {j.tier for j in mixed} == {0, 1}


def test_a_cell_is_repeatable_and_the_accountings_differ() -> None:
    """The same cell twice is the same; memory without end waits less, preempts nobody; too little orders by tier."""
    paper, honest = (tiers.play(small(MULTI_TIER, a, requests=200), 0) for a in (PAPER, HONEST))
    assert honest == tiers.play(small(MULTI_TIER, HONEST, requests=200), 0)
    assert honest.keys() == paper.keys() == tiers.FIGURES.keys()
    assert paper["ttft_mean_s"] < honest["ttft_mean_s"]
    assert paper["preempted_pct"] == 0
    assert honest["top_ttft_p50_s"] < honest["last_ttft_p50_s"]


def test_what_has_not_ended_in_time_is_left_out() -> None:
    """Figures under a limit know only what ended before it; nothing at all is no number."""
    record = RequestRecord(due=1.0, sent=1.0, prompt_len=8, output_len=4, ttft=1.0, latency=3.0, status=200)
    late = replace(record, due=2.0, latency=9.0, ttft=8.0)
    outcome = Outcome([record, late], [0, 0], 11.0, [1], [0], [1.0])
    work = [Job(1.0, 8, 4), Job(2.0, 8, 4, tier=1)]
    found = tiers.figures(work, outcome, 5.0)
    assert (found["ended_pct"], found["ttft_mean_s"], found["replica_s"]) == (50.0, 1.0, 16.0)
    assert math.isnan(found["last_ttft_max_s"])
    assert tiers.figures(work, outcome, math.inf)["last_ttft_max_s"] == 8.0


def test_cells_of_the_experiments() -> None:
    """Each experiment's cell plays its condition and gives all the figures that its table has."""
    for experiment in tiers_paper.EXPERIMENTS:
        condition = experiment.conditions[-1]
        found = experiment.cell(condition, 0, 0.02 if "requests" not in condition else 20 / int(condition["requests"]))
        assert set(experiment.figures) <= found.keys()
