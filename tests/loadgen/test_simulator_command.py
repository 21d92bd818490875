"""`python -m loadgen simulate`: table and result file, workload files, and errors without a traceback."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from loadgen import arguments
from loadgen.cli import main
from loadgen.simulator.command import jobs
from loadgen.workloads.make import make
from loadgen.workloads.workload import Request, Workload

FLEET = ["simulate", "--model", "smollm2-135m", "--device", "l4-24g", "--replicas", "2"]
SMALL = [*FLEET, "--requests", "40"]


def simulate(tmp_path: Path, *options: str) -> dict[str, Any]:
    """The result file of one small run."""
    out = tmp_path / "result.json"
    assert main([*(FLEET if "--workload" in options else SMALL), *options, "--out", str(out)]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_result_by_tier_and_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each seed is a run with the keys of `vllm bench serve`, in all and by tier; the table has a line per tier."""
    options = ["--arrivals", "poisson:rate=100", "--tiers", "uniform", "--tier-count", "3", "--repeat", "2"]
    result = simulate(tmp_path, *options, "--scheduling", "larry:alpha=1", "--balancing", "tiered_sal")
    assert [run["seed"] for run in result["runs"]] == [0, 1] == result["seeds"]
    for run in result["runs"]:
        assert list(run["tiers"]) == ["0", "1", "2"]
        assert sum(tier["completed"] for tier in run["tiers"].values()) == run["total"]["completed"] == 40
        assert run["total"]["p95_ttft_ms"] > 0
        assert sum(run["requests"]) == 40
    printed = capsys.readouterr().out
    assert all(f"tier {tier}" in printed for tier in range(3))
    assert "larry + tiered_sal" in printed


def test_plain_gives_the_same(tmp_path: Path) -> None:
    """Without short cuts all figures but the CPU time are the same."""
    options = ["--arrivals", "gamma:rate=200,cv=3", "--report-hz", "20", "--routers", "2", "--max-queued", "4"]
    options += ["--kill", "0@0.1+0.05", "1@0.2"]
    fast, plain = simulate(tmp_path, *options)["runs"][0], simulate(tmp_path, *options, "--plain")["runs"][0]
    assert fast.pop("cpu_s") > 0
    assert plain.pop("cpu_s") > 0
    assert fast == plain
    assert fast["total"]["outcomes"].get("shed", 0) > 0


def test_moves_drains_and_autoscaling(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The result file and the console say what moved, what the autoscaler decided and what was paid for."""
    options = ["--arrivals", "poisson:rate=40", "--migrate", "threshold=0.05,slowdown=0.02", "--drain", "0@0.3+0.5"]
    run = simulate(tmp_path, *options, "--kv-blocks", "600")["runs"][0]
    assert run["total"]["completed"] == 40
    assert run["moves"]["drain"]["done"] > 0
    assert run["moved_gib"] > 0
    assert run["pauses_s"]["p50"] <= run["pauses_s"]["p99"] <= run["pauses_s"]["max"] < 1
    assert run["scaling"] == []
    assert run["replica_s"] == pytest.approx(2 * run["simulated_s"], rel=1e-3)
    options = [
        "--arrivals",
        "poisson:rate=40",
        "--autoscale",
        "ongoing:target_ongoing_requests=4",
        "--startup-s",
        "0.2",
    ]
    options += ["--upscale-delay-s", "0", "--max-replicas", "3"]
    run = simulate(tmp_path, *options)["runs"][0]
    assert [target for _, target, _, _ in run["scaling"]][:2] == [2, 3]
    assert len(run["requests"]) == 3
    printed = capsys.readouterr().out
    assert "moves: " in printed
    assert "autoscaling: " in printed


def test_workload_file_and_fitted_times(tmp_path: Path) -> None:
    """A workload file is played with its tiers and deadlines, on an engine of fitted times; too long, it is scaled."""
    made = make(30, arrivals="poisson:rate=1", tier_mix="enterprise", deadline=4.0, seed=3)
    path, cost = tmp_path / "work.jsonl", tmp_path / "cost.json"
    made.save(path)
    cost.write_text(json.dumps({"seconds": dict.fromkeys(FIELDS, 0.0) | {"step": 0.1}}))
    engine = ["--fitted", str(cost), "--kv-blocks", "64", "--block-size", "32", "--sync"]
    run = simulate(tmp_path, *engine, "--workload", str(path))["runs"][0]
    assert set(run["tiers"]) == {str(request.tier) for request in made.requests}
    assert run["workload"]["scaled"]["to"] == 2048
    assert run["total"]["outcomes"]["unfinished"] > 0
    assert run["total"]["p50_tpot_ms"] == 100


FIELDS = ("step", "prefill_token", "prefill_request", "attention_pair", "decode", "context_token")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--model", "llama-3-70b"], "take more devices (--tp)"),
        (["--model", "llama-3-8b", "--tp", "3"], "cannot be split over 3 devices"),
        (["--model", "qwen2.5-7b", "--tp", "7"], "cannot be split over 7 devices"),
        (["--fitted", "nowhere.json"], "--kv-blocks"),
        (["--fitted", "nowhere.json", "--kv-blocks", "64"], "nowhere.json"),
        (["--workload", "nowhere.jsonl"], "requests: --requests is for requests that models make, nowhere.jsonl has"),
        (["--tiers", "1,1", "--aging-s", "1e-300"], "aging_s must be >= 0.001 s"),
        (["--arrivals", "poisson"], "poisson needs rate"),
        (["--tiers", "uniform", "--tier-count", "17"], "a fleet 16 at most"),
        (["--kill", "2@1"], "name a replica below 2"),
        (["--max-num-batched-tokens", "8"], "a lower max_num_seqs"),
        (["--block-size", "100000000"], "block_size: 100000000 tokens"),
        (["--drain", "2@1"], "name a replica below 2"),
        (["--autoscale", "freeness", "--min-replicas", "3"], "keeps 3 to 4"),
        (["--autoscale", "freeness", "--startup-s", "-1"], "startup_s must be >= 0"),
    ],
)
def test_what_does_not_fit_is_said(
    options: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be simulated ends with status 1 and a sentence, not with a traceback."""
    assert main([*SMALL, *options, "--out", str(tmp_path / "x.json")]) == 1
    assert complaint in " ".join(capsys.readouterr().out.split())


def test_a_workload_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file that cannot be read is in the message."""
    assert main([*FLEET, "--workload", "nowhere.jsonl", "--out", str(tmp_path / "x.json")]) == 1
    assert "No such file or directory: 'nowhere.jsonl'" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--scheduling", "nothing"], "larry"),
        (["--balancing", "sal:gamma=1"], "gamma"),
        (["--device", "b200"], "a100-40g"),
        (["--report-hz", "0"], "--report-hz"),
        (["--kill", "1:30"], "REPLICA@SECOND"),
        (["--drain", "x@30"], "REPLICA@SECOND"),
        (["--migrate", "speed=3"], "no setting speed"),
        (["--migrate", "threshold=none"], "threshold must be a number"),
        (["--migrate", "threshold"], "KEY=VALUE"),
        (["--migrate", "bandwidth=fast"], "bandwidth must be a number > 0"),
        (["--migrate", "bandwidth={"], "KEY=VALUE"),
        (["--scheduling", "larry:alpha={"], "name:parameter=value"),
        (["--autoscale", "nothing"], "freeness, ongoing"),
    ],
)
def test_wrong_options_are_named(options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong command line ends with status 2 and names the choices."""
    with pytest.raises(SystemExit) as ended:
        main([*SMALL, *options])
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_jobs_of_a_workload() -> None:
    """Who leaves first of deadline and cancellation counts; sessions stay apart; a length left open is an error."""
    found = jobs(
        Workload(
            (
                Request(due=0.0, prompt_tokens=5, output_tokens=7, tier=2, session="a", deadline=9.0, cancel_after=2.0),
                Request(due=1.0, prompt_tokens=0, output_tokens=7, session="b", deadline=1.0, cancel_after=2.0),
                Request(due=2.0, prompt_tokens=5, output_tokens=7, session="a"),
            )
        )
    )
    assert [(job.patience, job.left) for job in found[:2]] == [(2.0, "cancelled"), (1.0, "unfinished")]
    assert found[2].patience is None
    assert [job.tier for job in found] == [2, 0, 0]
    assert found[0].session == found[2].session != found[1].session
    assert found[1].prompt_tokens == 1
    with pytest.raises(ValueError, match="request 0 leaves the length"):
        jobs(Workload((Request(due=0.0, prompt_tokens=5),)))
    with pytest.raises(ValueError, match="no requests"):
        jobs(Workload(()))


def test_migration_takes_numbers_as_the_docs_write_them(tmp_path: Path) -> None:
    """The example of docs/simulator.md runs: 3e9 is a number, which YAML alone would read as a text."""
    example = re.search(
        r"`--migrate (threshold=\S+)`", (Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    )
    assert example is not None
    assert arguments.settings(example[1])["bandwidth"] == 3e9
    assert simulate(tmp_path, "--migrate", example[1])["runs"]


def test_options_that_change_requests_hold_for_a_file_too(tmp_path: Path) -> None:
    """Tiers, deadlines, cancellations and the window change the requests of a workload file as they do made ones."""
    path = tmp_path / "work.jsonl"
    make(30, arrivals="poisson:rate=30", seed=3).save(path)
    options = ["--tiers", "1,1", "--cancel-rate", "1", "--cancel-delay", "0.001", "--context", "512"]
    run = simulate(tmp_path, "--workload", str(path), *options)["runs"][0]
    assert set(run["tiers"]) == {"0", "1"}
    assert run["total"]["outcomes"] == {"cancelled": 30}
    assert run["workload"]["scaled"]["to"] == 512
    run = simulate(tmp_path, "--workload", str(path), "--deadline", "0.001")["runs"][0]
    assert run["total"]["outcomes"] == {"unfinished": 30}


@pytest.mark.parametrize("step", ["0.1", -0.1, None, 0])
def test_step_times_that_cannot_be_are_refused(
    step: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of step times whose figures are texts, negative or all nothing is no result of calibrate."""
    cost = tmp_path / "cost.json"
    cost.write_text(json.dumps({"seconds": dict.fromkeys(FIELDS, 0.0) | {"step": step}}))
    assert main([*SMALL, "--fitted", str(cost), "--kv-blocks", "64", "--out", str(tmp_path / "x.json")]) == 1
    assert "is not a result of" in " ".join(capsys.readouterr().out.split())
