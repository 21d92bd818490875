"""The survey's cells: what they simulate, that they repeat, and what an accounting changes."""

from __future__ import annotations

import dataclasses

import numpy as np

from loadgen.experiments import survey, survey_fleet
from loadgen.experiments.survey import HONEST, PAPER, POLICIES, Play, jobs, play

SMALL = Play(rate=8.0, requests=60, scheduling=POLICIES["fcfs"], accounting=PAPER)


def test_a_cell_repeats_and_is_whole() -> None:
    """The same arguments give the same figures, all of those that the tables show."""
    first, second = play(SMALL, 1), play(SMALL, 1)
    assert first == second
    assert set(first) == set(survey.FIGURES)
    assert first != play(SMALL, 2)


def test_policies_share_their_workload() -> None:
    """Requests depend on the seed and not on policy or accounting; only what predictors are told differs."""
    fcfs = jobs(SMALL, 8192, 0.0, 3)
    larry = jobs(dataclasses.replace(SMALL, scheduling=POLICIES["larry"], accounting=HONEST), 8192, 0.6, 3)
    assert [(j.due, j.prompt_tokens, j.output_tokens) for j in fcfs] == [
        (j.due, j.prompt_tokens, j.output_tokens) for j in larry
    ]
    assert [j.told for j in fcfs] == [j.output_tokens for j in fcfs]
    off = np.log([j.told / j.output_tokens for j in larry])  # type: ignore[operator]
    assert 0.4 < off.std() < 0.8


def test_larry_lets_short_prompts_pass_under_load() -> None:
    """Where a queue builds up, LARRY's median wait is clearly below that of FCFS on the same requests."""
    crowd = dataclasses.replace(SMALL, rate=40.0, requests=150)
    larry = play(dataclasses.replace(crowd, scheduling=POLICIES["larry"]), 0)
    assert larry["ttft_p50_s"] < 0.8 * play(crowd, 0)["ttft_p50_s"]


def test_oracles_are_told_the_length_that_the_accounting_gives() -> None:
    """Wrong predictions change what TRAIL+ does and nothing of FCFS."""
    crowd = dataclasses.replace(SMALL, rate=40.0, requests=100)
    for policy, changes in (("fcfs", False), ("trail+", True)):
        one = dataclasses.replace(crowd, scheduling=POLICIES[policy])
        right, wrong = (play(dataclasses.replace(one, sigma=sigma), 0) for sigma in (0.0, 1.5))
        assert (right != wrong) is changes


def test_a_fleet_is_played() -> None:
    """A cell of the fleet experiment serves its requests on all its servers."""
    condition = {
        "accounting": HONEST,
        "server": "70b-h100",
        "workload": "chat",
        "balancer": "sal",
        "scheduler": "larry",
    }
    found = survey_fleet.cell(condition, 0, 0.05)
    assert 0 < found["ttft_p50_s"] < found["ttft_p95_s"]
    assert found["served_per_s"] > 0
