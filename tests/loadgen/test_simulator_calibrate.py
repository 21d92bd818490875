"""Fitting step times: what was put in comes out, also under noise, and bad files are refused with the line at fault."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from deployments.step_content import Step
from loadgen.cli import main
from loadgen.simulator.calibrate import Measured, error, fit, load, unseen_error
from loadgen.simulator.step_cost import Fitted

CPU = Fitted(19.3e-3, 556e-6, 1.5e-3, 0.46e-6, 785e-6, 3.1e-6)


def measured(cost: Fitted, count: int, noise: float, seed: int = 0) -> list[Measured]:
    """Steps of four runs, mixed of prefill and decode, whose times are off by a lognormal factor."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        decodes = int(rng.integers(0, 33))
        chunks = int(rng.integers(0, 3))
        tokens = int(rng.integers(1, 512)) * chunks
        step = Step(tokens, chunks, tokens * float(rng.integers(1, 600)), decodes, decodes * int(rng.integers(20, 900)))
        rows.append(Measured(step, cost.seconds(step) * float(rng.lognormal(0, noise)), f"run{i % 4}"))
    return rows


def test_exact_measurements_give_the_coefficients() -> None:
    """Without noise the six numbers are found again."""
    found = asdict(fit(measured(CPU, 60, 0.0)))
    assert found == pytest.approx(asdict(CPU), rel=1e-6)


def test_noise_is_averaged_out() -> None:
    """With 10 % noise on each step the fit is within noise on steps that it has seen and on runs that it has not."""
    rows = measured(CPU, 800, 0.1)
    found = fit(rows)
    assert found.decode == pytest.approx(CPU.decode, rel=0.1)
    assert error(found, measured(CPU, 400, 0.0, seed=1)) < 0.03
    unseen = unseen_error(rows)
    assert unseen is not None
    assert error(found, rows) <= unseen < 0.1


def test_no_part_takes_less_than_nothing() -> None:
    """Parts that cost nothing are found to, never less, whatever the noise makes of them."""
    cheap = Fitted(10e-3, 0.0, 0.0, 0.0, 100e-6, 0.0)
    for seed in range(5):
        assert min(asdict(fit(measured(cheap, 40, 0.3, seed))).values()) >= 0


def test_what_was_never_measured_costs_nothing() -> None:
    """Rows without any prefill say nothing about it: its coefficients are 0."""
    rows = [Measured(Step(decodes=n, context_tokens=100 * n * n), 0.01 + 0.001 * n) for n in range(1, 20)]
    found = fit(rows)
    assert (found.prefill_token, found.prefill_request, found.attention_pair) == (0, 0, 0)
    assert found.decode == pytest.approx(0.001)


def test_one_run_has_no_unseen_error() -> None:
    """Nothing can be left out of a single run."""
    assert unseen_error([Measured(row.step, row.seconds) for row in measured(CPU, 20, 0.0)]) is None


def test_runs_that_are_too_short_have_none_either() -> None:
    """Two runs of ten steps make a fit of twenty, but neither can be judged by a fit to the other."""
    rows = [Measured(row.step, row.seconds, str(i % 2)) for i, row in enumerate(measured(CPU, 20, 0.0))]
    fit(rows)
    assert unseen_error(rows) is None


def write(path: Path, lines: Sequence[str]) -> Path:
    """A CSV file."""
    path.write_text("\n".join((",".join((*Step._fields, "seconds", "run")), *lines)) + "\n")
    return path


def test_command_writes_what_simulate_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`calibrate` fits a file, says how far off it is, and its result is a step-time model."""
    lines = [",".join(map(str, (*row.step, row.seconds, row.run))) for row in measured(CPU, 60, 0.0)]
    out = tmp_path / "cost.json"
    assert main(["calibrate", str(write(tmp_path / "steps.csv", lines)), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "0.0% off on the 60 steps" in " ".join(printed.split())
    assert load(out).seconds(Step(decodes=1)) == pytest.approx(CPU.seconds(Step(decodes=1)), rel=1e-4)
    assert json.loads(out.read_text())["rows"] == 60


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["1,1,1,1,1,0.1,a"], "1 steps are too few"),
        (["1,1,1,1,1,0.1,a", "1,1,1,1,x,0.1,a"], "line 3: not all columns hold numbers"),
        (["1,1,1,1,1,0,a"], "line 2: give seconds > 0"),
        (["1,1,-1,1,1,0.1,a"], "line 2: give seconds > 0, and nothing below 0"),
    ],
)
def test_bad_rows_are_named(
    lines: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that cannot be used ends with status 1 and says which line it is."""
    assert main(["calibrate", str(write(tmp_path / "steps.csv", lines)), "--out", str(tmp_path / "o.json")]) == 1
    assert complaint in " ".join(capsys.readouterr().out.split())


def test_missing_columns_and_foreign_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A CSV without the columns names them; a JSON file that is no calibration is refused."""
    path = tmp_path / "steps.csv"
    path.write_text("decodes,seconds\n1,2\n")
    assert main(["calibrate", str(path)]) == 1
    assert "no column attention, context_tokens, prefill_requests" in " ".join(capsys.readouterr().out.split())
    path.write_text("{}")
    with pytest.raises(ValueError, match="loadgen calibrate"):
        load(path)
