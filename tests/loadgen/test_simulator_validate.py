"""Measuring and validating without an engine: the simulator stands for it, so what should come out is known."""

from __future__ import annotations

import argparse
import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from deployments.step_content import Step
from deployments.step_log import COLUMNS, StepLog
from loadgen.bench.policies import ENGINE
from loadgen.cli import main, parser
from loadgen.simulator import calibrate, measure, validate
from loadgen.simulator.calibrate import Measured
from loadgen.simulator.cluster import Cluster, Fleet, Job
from loadgen.simulator.hardware import MODELS
from loadgen.simulator.measure import Window
from loadgen.simulator.step_cost import Fitted
from loadgen.simulator.validate import FIGURES, Run, Trace

CPU = Fitted(19.3e-3, 556e-6, 1.5e-3, 0.46e-6, 785e-6, 3.1e-6)


def played(trace: Trace, number: int, engine: str, factor: float = 1.0) -> Run:
    """A run on an "engine" whose steps take exactly CPU's times, times a factor."""
    cost = Fitted(*(factor * getattr(CPU, name) for name in CPU.__dataclass_fields__))
    fleet = Fleet(MODELS["smollm2-135m"], validate.shape_of(ENGINE), cost, scheduling=trace.policy, oracle=True)
    cluster = Cluster(fleet, coast=False)
    rows: list[dict[str, Any]] = []
    StepLog(cluster.replicas[0].scheduler, rows.append, timer=cluster.clock)
    plan = trace.plan
    outcome = cluster.run(
        [Job(due, len(p), n) for due, p, n in zip(plan.due, plan.prompts, plan.output_lens, strict=True)]
    )
    steps = [Measured(Step(*(row[f] for f in Step._fields)), row["seconds"], f"{number}{engine}") for row in rows]
    return Run(trace, number, engine, outcome.records, sum(outcome.preemptions), Window(0, 0), steps)


def trace(load: float | None = 0.7, seed: int = 0, policy: str = "fcfs") -> Trace:
    """A trace of 16 requests."""
    rng = np.random.default_rng(seed)
    due = np.cumsum(rng.exponential(0.2, 16)).tolist()
    plan = measure.burst(rng.integers(20, 600, 16).tolist(), rng.integers(4, 40, 16).tolist(), rng, due)
    return Trace("chat", load, {"name": policy}, plan)


def test_known_step_times_are_predicted_exactly() -> None:
    """If step times are what the model says, a run is predicted from the other runs without error."""
    runs = [
        played(one, number, engine)
        for number in (1, 2)
        for one in (trace(), trace(1.1, seed=1, policy="larry"))
        for engine in ("first", "second")
    ]
    compared = validate.compare(runs, ENGINE)
    assert [one["engine"] for one in compared] == ["first", "second"] * 4
    for one in compared:
        assert one["step_error"] < 1e-6
        for key in FIGURES:
            assert abs(one["error"][key]) < 1e-6
            assert one["twin"][key] == one["rounds"][key] == 0.0
        assert one["preemptions"][0] == one["preemptions"][1]
    summary = validate.summed_up(compared)
    assert list(summary) == ["chat, load 0.7, fcfs", "chat, load 1.1, larry", "all"]
    assert summary["all"]["runs"] == 8


def test_a_run_and_its_twin_are_left_out_of_their_own_prediction() -> None:
    """A round in which the machine was slow does not know of it: it is predicted at the speed of the others."""
    one = trace()
    runs = [played(one, number, engine) for number in (1, 2, 3) for engine in ("first", "second")]
    slow = [replace(run, rows=[replace(row, seconds=2 * row.seconds) for row in run.rows]) for run in runs[4:]]
    compared = validate.compare([*runs[:4], *slow], ENGINE)
    assert all(each["error"]["duration"] == pytest.approx(0.0, abs=1e-6) for each in compared[4:])
    assert all(each["step_error"] == pytest.approx(0.5) for each in compared[4:])
    assert all(each["step_error"] > 0.1 for each in compared[:4])  # their fits have the slow rows in them


def test_noise_is_what_real_runs_differ_by() -> None:
    """`twin` compares with the run at the same time, `rounds` with the others of the trace; bursts are not in `all`."""
    one, burst = trace(), trace(None, seed=2)
    runs = [played(one, 1, "first"), played(one, 1, "second", 1.2), played(one, 2, "first", 2.0)]
    runs += [played(burst, 0, "first"), played(burst, 0, "second")]
    compared = validate.compare(runs, ENGINE)
    total = [run.figures()["duration"] for run in runs]
    assert compared[0]["twin"]["duration"] == pytest.approx(total[1] / total[0] - 1)
    assert compared[0]["rounds"]["duration"] == pytest.approx(total[2] / total[0] - 1)
    assert compared[2]["twin"]["duration"] is None
    summary = validate.summed_up(compared)
    assert summary["all"]["runs"] == 3
    assert summary["chat, all at once, fcfs"]["rounds"] == dict.fromkeys(FIGURES)


def test_traces_load_the_engine_as_asked() -> None:
    """Each load of each length model is a share of its capacity; policies get the same requests."""
    args = parser().parse_args(
        ["validate", "--loads", "0.5", "1.5", "--seconds", "40", "--scheduling", "fcfs", "larry"]
    )
    traces = list(validate._traces(args, {"chat": 4.0, "code": 2.0}, 2048))
    assert [len(one.plan.due) for one in traces] == [80, 80, 240, 240, 40, 40, 120, 120]
    assert traces[0].plan == traces[1].plan
    assert len({str(one) for one in traces}) == 8
    for one in traces:
        assert one.load is not None
        rate = len(one.plan.due) / one.plan.due[-1]
        assert rate == pytest.approx(one.load * {"chat": 4.0, "code": 2.0}[one.lengths], rel=0.4)
        assert all(len(p) + n <= 2048 for p, n in zip(one.plan.prompts, one.plan.output_lens, strict=True))


def test_two_cores_are_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On one core a run cannot have a twin: the command says so."""
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda self: [0])
    assert main(["validate"]) == 1
    assert "two are needed" in capsys.readouterr().out


def test_sweep_covers_the_engine_and_fits_it() -> None:
    """No request of a sweep is too long, none has to be preempted; another seed gives other sizes."""
    room = (ENGINE["num_gpu_blocks_override"] - 1) * ENGINE["block_size"]
    plans = dict(measure.sweep(1, ENGINE))
    assert len(plans) == len(measure.sweep(1, ENGINE))
    for plan in plans.values():
        assert all(len(p) + n <= ENGINE["max_model_len"] for p, n in zip(plan.prompts, plan.output_lens, strict=True))
        assert all(plan.prompts)
    for size in measure.BATCHES:
        mine = [plan for name, plan in plans.items() if name.startswith(f"{size} decodes")]
        assert len(mine) == 2
        for plan in mine:
            blocks = sum(
                -(-(len(p) + n) // ENGINE["block_size"]) for p, n in zip(plan.prompts, plan.output_lens, strict=True)
            )
            assert blocks * ENGINE["block_size"] <= room
    assert plans.keys() != dict(measure.sweep(2, ENGINE)).keys()


def test_rows_go_to_the_run_in_whose_time_they_began(tmp_path: Path) -> None:
    """Steps before, between and after the runs belong to none; what is written is read back by `calibrate`."""
    log = tmp_path / "log.csv"
    with log.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        for second in range(10):
            numbers = dict.fromkeys(Step._fields, second)
            writer.writerow({**numbers, "now": 1e9 + second, "seconds": 0.1 + second})
    rows = measure.rows_of(log, {"a": Window(1e9 + 2, 1e9 + 3.5), "b": Window(1e9 + 5, 1e9 + 6)})
    assert [(row.run, row.step.decodes, row.seconds) for row in rows] == [
        ("a", 2, 2.1),
        ("a", 3, 3.1),
        ("b", 5, 5.1),
        ("b", 6, 6.1),
    ]
    measure.write(rows, tmp_path / "kept" / "steps.csv")
    assert calibrate.read(tmp_path / "kept" / "steps.csv") == rows


def test_calibrate_measures_only_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--measure` fits what it measured and keeps the rows in the file that is named; without both it asks for one."""
    asked: list[Any] = []

    def measured(*args: Any) -> list[Measured]:
        asked.append(args)
        return [row for number in (1, 2) for row in played(trace(seed=number), number, "").rows]

    monkeypatch.setattr(measure, "measure", measured)
    out, rows = tmp_path / "times.json", tmp_path / "steps.csv"
    assert main(["calibrate", str(rows), "--measure", "--runs", "2", "--seed", "7", "--out", str(out)]) == 0
    assert asked[0][:3] == (None, 2, 7)
    assert calibrate.load(out).seconds(Step(decodes=1)) == pytest.approx(CPU.seconds(Step(decodes=1)), rel=1e-3)
    assert {row.run for row in calibrate.read(rows)} == {"1", "2"}
    assert main(["calibrate"]) == 1
    assert "--measure" in capsys.readouterr().out
    assert len(asked) == 1


def test_defaults_are_small() -> None:
    """A round of the default traces is at most two minutes of arrivals."""
    args: argparse.Namespace = parser().parse_args(["validate"])
    assert len(args.lengths) * len(args.loads) * len(args.scheduling) * args.seconds <= 120
