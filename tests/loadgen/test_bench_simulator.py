"""`bench simulator`: every case is a whole run, and growth is what its name says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen.bench.simulator import Case, cases, growth, measure
from loadgen.cli import main


def test_growth_is_the_exponent() -> None:
    """Cost proportional to the requests has exponent 1, to their square 2; one size says nothing."""
    rows = [{"requests": n, "cpu_s": 0.001 * n} for n in (1000, 10_000, 100_000)]
    assert growth(rows) == pytest.approx(1.0)
    assert growth([{**row, "cpu_s": row["requests"] ** 2} for row in rows]) == pytest.approx(2.0)
    assert growth(rows[:1]) is None


def test_cases_cover_the_goal() -> None:
    """By default the goal's run is there, three sizes of workload, three of fleet with equal shares."""
    found = cases([1000, 10_000, 100_000], [4, 16, 64])
    assert Case("requests", 10_000, 4) in found
    assert [case.requests for case in found if case.group == "requests"] == [1000, 10_000, 100_000]
    assert {case.requests // case.replicas for case in found if case.group == "replicas"} == {625}


def test_measured_case_is_whole() -> None:
    """Agents' prompts are found in a prefix cache, and without one there is no hit rate."""
    cached = measure(Case("agents", 60, 4, rate=1.0, lengths="agents", prefix_caching=True), 0)
    assert 0 < cached["prefix_hit_rate"] < 1
    assert cached["cpu_s"] > 0
    assert cached["cpu_ms_per_request"] == pytest.approx(cached["cpu_s"] / 60 * 1e3)
    assert measure(Case("agents", 60, 4, rate=1.0, lengths="agents"), 0)["prefix_hit_rate"] is None


def test_bench_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A small bench has a row for each case, the exponents, and no verdict on a goal that it did not measure."""
    out = tmp_path / "simulator.json"
    options = ["--requests", "40", "80", "--replicas", "2", "4", "--main", "200", "--out", str(out)]
    assert main(["bench", "simulator", *options]) == 0
    result = json.loads(out.read_text())
    assert [row["requests"] for row in result["rows"]] == [40, 80, 25, 50, 200, 200, 200, 20]
    assert set(result["growth"]) == {"requests", "replicas"}
    assert result["met"] is None
    assert "cost grows with replicas" in " ".join(capsys.readouterr().out.split())
