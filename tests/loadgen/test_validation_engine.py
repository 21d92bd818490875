"""Measuring, validating and replaying with real engines: short runs, and limits wide enough for a busy machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen.bench.policies import ENGINE
from loadgen.cli import main
from loadgen.simulator import calibrate, measure, validate

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_schedules_of_real_engines_are_those_of_the_simulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under both policies, with preemptions, each step is the same; and times are predicted from other runs."""
    tight = {**ENGINE, "max_model_len": 1024, "num_gpu_blocks_override": 41}  # 1280 tokens of KV cache
    monkeypatch.setattr(validate, "ENGINE", tight)
    out, logs = tmp_path / "validation.json", tmp_path / "logs"
    argv = ["--lengths", "chat", "--loads", "1.5", "--scheduling", "fcfs", "larry", "--rounds", "1", "--seconds", "5"]
    assert main(["validate", *argv, "--burst", "16", "--logs", str(logs), "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert len(result["replay"]) == 2
    assert all("under fcfs, larry: identical schedules" in line for line in result["replay"])
    assert any(run["preemptions"][0] for run in result["runs"])
    assert {run["trace"] for run in result["runs"] if run["round"]} == {
        "chat, load 1.5, fcfs",
        "chat, load 1.5, larry",
    }
    for run in result["runs"]:
        assert run["steps"] > 10
        assert 0.4 < run["simulated"]["duration"] / run["live"]["duration"] < 2.5
    capsys.readouterr()
    assert main(["replay", *map(str, sorted(logs.glob("*.csv")))]) == 0
    assert capsys.readouterr().out.count("identical schedules") == 2


def test_calibration_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two short sweeps on a real engine give step times that grow with the prompt and with the batch."""
    monkeypatch.setattr(measure, "ENGINE", {**ENGINE, "max_model_len": 512})
    monkeypatch.setattr(measure, "BATCHES", (1, 8))
    monkeypatch.setattr(measure, "PROMPTS", (60, 400))
    rows, out = tmp_path / "steps.csv", tmp_path / "step-times.json"
    assert main(["calibrate", str(rows), "--measure", "--runs", "2", "--out", str(out)]) == 0
    assert {row.run for row in calibrate.read(rows)} == {"run0", "run1"}
    cost = calibrate.load(out)
    assert cost.step > 0
    assert cost.prefill_token > 0
    assert json.loads(out.read_text())["unseen_error"] < 1.0
