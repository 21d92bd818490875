"""Results on disk: the conditions of a measurement are written beside its figures."""

import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from loadgen import report


def test_result_carries_its_conditions(tmp_path: Path) -> None:
    """Machine, versions, commit, seeds, arguments, date and load average before and after are in the JSON."""
    stamp = report.Stamp("demo", {"out": tmp_path, "rate": 2.0}, [3, 4])
    path = stamp.write({"answer": 1.23456789}, tmp_path / "sub" / "demo.json")
    result = json.loads(path.read_text())
    assert result["bench"] == "demo"
    assert result["seeds"] == [3, 4]
    assert result["arguments"] == {"out": str(tmp_path), "rate": 2.0}
    assert result["machine"]["cpu"]
    assert result["machine"]["cores"] >= 1
    assert result["machine"]["memory_gib"] > 0
    assert {"python", "vllm", "ray", "torch", "tidegate"} <= result["versions"].keys()
    assert {"commit", "dirty"} == result["versions"]["tidegate"].keys()
    assert len(result["load_average_before"]) == len(result["load_average_after"]) == 3
    assert result["answer"] == pytest.approx(1.2346)


def test_result_replaces_the_old_one_whole(tmp_path: Path) -> None:
    """Writing twice leaves the newer result and no partial file."""
    stamp = report.Stamp("demo", {}, [0])
    for value in (1, 2):
        stamp.write({"value": value}, tmp_path / "demo.json")
    assert json.loads((tmp_path / "demo.json").read_text())["value"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["demo.json"]


def test_rounding_reaches_every_level() -> None:
    """Floats are cut to significant digits inside lists and dictionaries; other values stay as they are."""
    assert report.rounded({"a": [1 / 3, (2e-9 / 3,)], 5: "x", "n": 10**9}) == {
        "a": [0.33333, [6.6667e-10]],
        "5": "x",
        "n": 10**9,
    }


def test_tables_show_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    """Square brackets in titles, headings and cells are printed as they are."""
    report.show(Console(width=80), "a [title]", ("b [min-max]", "c"), [("d [e]", 1.0)])
    printed = capsys.readouterr().out
    for text in ("a [title]", "b [min-max]", "d [e]"):
        assert text in printed


def test_tables_show_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is no figure there is a dash."""
    report.show(Console(), "x", ("", "p50"), [("ttft", math.nan)])
    assert "nan" not in (out := capsys.readouterr().out)
    assert "-" in out


def test_results_are_json_for_every_reader(tmp_path: Path) -> None:
    """A figure that is no number is null in the file: nan is no JSON, and many readers refuse the whole file."""
    path = report.Stamp("x", {}, []).write({"p50": math.nan, "list": [math.inf, 1.0]}, tmp_path / "x.json")
    found = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in the file"))
    assert found["p50"] is None
    assert found["list"] == [None, 1.0]
