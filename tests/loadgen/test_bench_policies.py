"""`bench policies` without engines: its choices, its bursts, its ratios, and what a cut run keeps."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from loadgen.bench import policies
from loadgen.cli import parser
from policies.scheduling import SCHEDULING


def pair(policy: str, seed: int, factor: float, preemptions: int = 0) -> dict[str, Any]:
    """A pair in which the policy has `factor` times FCFS's figures."""
    keys = (*policies.WAITING, *policies.RUNNING)
    return {
        "policy": policy,
        "seed": seed,
        "reference": {**{key: 2.0 for key in keys}, "preemptions": 4},
        "measured": {**{key: 2.0 * factor for key in keys}, "preemptions": preemptions},
    }


def test_every_policy_but_the_reference_is_measured_by_default() -> None:
    """Without options each name of the registry but fcfs is measured; `bench larry` measures larry by the same code."""
    chosen = parser().parse_args(["bench", "policies"]).policies
    assert [choice.label for choice in chosen] == [name for name in SCHEDULING.names() if name != "fcfs"]
    assert [choice.label for choice in parser().parse_args(["bench", "larry"]).policies] == ["larry"]


@pytest.mark.parametrize("name", SCHEDULING.names())
def test_choices_can_be_made(name: str) -> None:
    """A bare name gives a spec that the registry accepts, with the oracle where answer lengths are wanted."""
    spec = dict(policies.choice(name).spec)
    assert SCHEDULING.make(spec.pop("name"), **spec)
    assert ("predictor" in SCHEDULING.parameters(name)) == (spec.get("predictor") == "oracle")


def test_parameters_of_a_choice_have_their_types() -> None:
    """Parameters are read as YAML: numbers and truth values come out as such."""
    chosen = policies.choice("larry:alpha=500,preempted_first=false")
    assert chosen.spec == {"name": "larry", "alpha": 500, "preempted_first": False}
    assert chosen.label == "larry:alpha=500,preempted_first=false"


@pytest.mark.parametrize(
    ("text", "complaint"), [("nonsense", "fcfs"), ("larry:alpha=0", "alpha"), ("larry:alpha", "name:parameter=value")]
)
def test_impossible_choices_are_refused(text: str, complaint: str) -> None:
    """An unknown policy, a value out of range and a parameter without a value are named."""
    with pytest.raises(argparse.ArgumentTypeError, match=complaint):
        policies.choice(text)


def test_burst_is_the_same_for_every_policy() -> None:
    """One seed gives one burst that fits the window, another seed another."""
    burst, again, other = (policies.plan(seed, 30, 10.0, "chat") for seed in (1, 1, 2))
    assert burst == again
    assert burst.prompts != other.prompts
    assert burst.due == sorted(burst.due)
    assert all(len(p) + n <= policies.CONTEXT for p, n in zip(burst.prompts, burst.output_lens, strict=True))


def test_ratios_are_to_the_reference_of_the_same_pair() -> None:
    """Each policy's figures are over those of FCFS beside it: below 1 is less; preemptions are means per run."""
    found = policies.ratios([pair("larry", 0, 0.5, 2), pair("srpt", 0, 2.0), pair("larry", 1, 0.5, 4)])
    assert list(found) == ["larry", "srpt"]
    assert found["larry"]["p50_ttft_ms"]["mean"] == pytest.approx(0.5)
    assert found["srpt"]["p95_tgt_s"]["mean"] == pytest.approx(2.0)
    assert (found["larry"]["pairs"], found["srpt"]["pairs"]) == (2, 1)
    assert (found["larry"]["preemptions"], found["larry"]["fcfs_preemptions"]) == (3.0, 4.0)


def test_a_cut_run_keeps_its_pairs_under_the_same_conditions(tmp_path: Path) -> None:
    """Pairs of an earlier result are kept if workload and engine were the same, else the run is refused."""
    path, conditions = tmp_path / "policies.json", {"workload": {"rate": 1 / 3}, "engine_args": {"dtype": "bfloat16"}}
    assert policies._kept(path, conditions) == []
    path.write_text(json.dumps({"workload": {"rate": 0.33333}, "engine_args": {"dtype": "bfloat16"}, "pairs": [1]}))
    assert policies._kept(path, conditions) == [1]
    with pytest.raises(SystemExit, match="other conditions"):
        policies._kept(path, {**conditions, "workload": {"rate": 2.0}})
