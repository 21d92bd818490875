"""The one door: listing, defaults, and errors in the arguments."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loadgen.cli import BENCHES, main, parser

ROOT = Path(__file__).parents[2]


def test_bench_alone_lists_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    """`bench` without a name prints all names with their descriptions and succeeds."""
    assert main(["bench"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for name, module in BENCHES.items():
        assert name in printed
        assert module.TITLE.split(":")[0].split()[0] in printed


def test_listing_loads_no_engine() -> None:
    """Listing the names imports neither vLLM nor Ray nor torch, so that it takes no time."""
    code = (
        "import sys; from loadgen.cli import main; main(['bench']);"
        "print([m for m in ('vllm', 'ray', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", sorted(BENCHES))
def test_defaults_of_every_bench(name: str) -> None:
    """Without options a bench has seeds and writes to results/NAME.json."""
    args = parser().parse_args(["bench", name])
    assert args.seeds == list(BENCHES[name].SEEDS)
    assert args.out.parts[-2:] == ("results", f"{name}.json")


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["bench", "nothing"], "larry"),
        (["bench", "larry", "--seeds", "-1"], "-1 is no seed"),
        (["bench", "larry", "--seeds", "one"], "--seeds"),
        (["bench", "larry", "--requests", "0"], "--requests"),
        (["bench", "larry", "--rate", "nan"], "--rate"),
        (["bench", "router", "--replicas", "0"], "--replicas"),
        (["bench", "ingress", "--rounds", "-2"], "--rounds"),
        (["bench", "router", "--speed", "9"], "--speed"),
        ([], "COMMAND"),
    ],
)
def test_wrong_arguments_are_named(argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong command line ends with status 2 and names the argument or the choices."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_router_bench_runs_and_writes_its_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tiny `bench router` measures with the real router, pages and sockets, and its JSON has every figure."""
    out = tmp_path / "router.json"
    options = ["--replicas", "4", "--calls", "200", "--publishers", "2", "--seconds", "0.5", "--seeds", "0"]
    assert main(["bench", "router", *options, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert 0 < result["fleet_table_us"]["sal"]["4"]["choose"]["p50_us"] < 1000
    assert 0 < result["serve_router_us"]["sal"]["4"]["p50_us"] < 10_000
    assert 0 < result["report_age_ms"]["2"]["delivery_count"]["p50_ms"] < 1000
    assert "microseconds" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        ["bench", "larry", "--out"],
        ["calibrate", "steps.csv", "--out"],
        ["simulate", "--out"],
        ["validate", "--out"],
        ["workload", "create", "--out"],
        ["report", "runs/a", "--out"],
        ["train-predictor", "--log", "x.jsonl", "--out"],
    ],
    ids=lambda argv: argv[0],
)
def test_a_result_that_cannot_be_written_is_said_before_the_work(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder in place of a file, or a file in place of a folder on the way to it, is refused with the options."""
    (tmp_path / "file").touch()
    for place, complaint in ((tmp_path, "name a file"), (tmp_path / "file" / "x", "is no folder")):
        with pytest.raises(SystemExit) as ended:
            main([*argv, str(place)])
        assert ended.value.code == 2
        assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "advise", "experiment"])
def test_a_file_is_no_folder_for_results(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What writes a folder refuses the name of a file before it does anything."""
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        main([command, "--out", str(tmp_path / "file")])
    assert "is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "said"), [(KeyboardInterrupt(), 130, "interrupted"), (OSError("full"), 1, "full")]
)
def test_an_interrupt_and_a_full_disk_end_without_a_traceback(
    error: BaseException, status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ctrl-C in any command ends it with status 130, an error of the system with status 1, each with a line."""

    def fails(*_: object) -> int:
        raise error

    monkeypatch.setattr("loadgen.workloads.command.run", fails)
    assert main(["workload", "describe", "x"]) == status
    assert said in capsys.readouterr().out


def test_a_model_that_is_none_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder without a model is refused before an engine is started on it."""
    for command in (["calibrate", "--measure"], ["validate"], ["bench", "policies"]):
        with pytest.raises(SystemExit):
            main([*command, "--model", str(tmp_path)])
        assert "has no config.json" in capsys.readouterr().err
