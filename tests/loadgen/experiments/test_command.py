"""`python -m loadgen experiment`: list, a quick run in two processes, going on, and the page that is generated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen.cli import main
from loadgen.experiments import page, plots
from loadgen.experiments.registry import EXPERIMENTS
from loadgen.experiments.results import FOLDER, Results, load_all

SMALL = "larry-alpha"


def test_list_names_every_experiment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a name all experiments are listed with what is done of them."""
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["experiment"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in EXPERIMENTS)


def test_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that there is none of ends with status 2 and the choices."""
    with pytest.raises(SystemExit) as ended:
        main(["experiment", "no-such"])
    assert ended.value.code == 2
    assert "larry-engine" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_every_claim_and_figure_can_be_had(name: str, tmp_path: Path) -> None:
    """Claims pick one condition each, conditions are distinct, and plots can be drawn of results with gaps."""
    experiment = EXPERIMENTS[name]
    results = Results(experiment, tmp_path / "none.json")
    keys = {json.dumps(condition, sort_keys=True) for condition in experiment.conditions}
    assert len(keys) == len(experiment.conditions)
    for claim in experiment.claims:
        assert results.pick(claim.of) in experiment.conditions
        assert claim.over is None or results.pick(claim.over) in experiment.conditions
        assert claim.figure in experiment.figures
    for plot in experiment.plots(results).values():
        assert plots.text(plot).startswith("<svg viewBox=")
    assert len(experiment.seeds) >= 5


def test_page_equals_what_the_files_give() -> None:
    """docs/experiments.md and the plots beside the results are those that the result files give."""
    every = load_all(EXPERIMENTS.values())
    remedy = "make it anew: python -m loadgen experiment --page"
    assert page.PAGE.read_text() == page.render(every), remedy
    for results in every:
        for name, plot in page.pictures(results).items():
            assert (FOLDER / name).read_text() == plots.text(plot), remedy


def test_every_committed_cell_belongs_to_an_experiment() -> None:
    """Each result file is of an experiment that there is, and of its grid as it is now."""
    for path in FOLDER.glob("*.json"):
        found = json.loads(path.read_text())
        assert found["experiment"] in EXPERIMENTS
        results = Results.load(EXPERIMENTS[found["experiment"]], path)
        assert len(results.cells) == len(found["cells"])


@pytest.mark.slow
def test_quick_run_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes give the cells that one gives, and a second run has nothing left to do."""
    options = ["--quick", "--seeds", "0", "--out", str(tmp_path)]
    assert main(["experiment", SMALL, *options, "--processes", "2"]) == 0
    path = tmp_path / f"{SMALL}.json"
    cells = json.loads(path.read_text())["cells"]
    assert len(cells) == len(EXPERIMENTS[SMALL].conditions)
    kept = {"cells": cells[:3], **{k: v for k, v in json.loads(path.read_text()).items() if k != "cells"}}
    path.write_text(json.dumps(kept))
    capsys.readouterr()
    assert main(["experiment", SMALL, *options, "--processes", "1"]) == 0
    again = json.loads(path.read_text())["cells"]
    assert [c["figures"] for c in again] == [c["figures"] for c in cells]
    assert f"{len(cells) - 3} cells" in capsys.readouterr().out
