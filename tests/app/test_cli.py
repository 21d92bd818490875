"""`python -m app`: what it prints, for people and as JSON, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from app.cli import command
from app.cli.status import URL_VARIABLE
from app.config import TidegateConfig
from app.config.admin import TOKEN_VARIABLE

from .admin_rig import TOKEN, Rig, listening

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


def run(*arguments: str) -> int:
    """The command; usage errors end it as they end the process."""
    try:
        return command.main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)


def test_status_for_people(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every replica has a row with its figures, and tiers, moves, settings and the newest events are named."""
    assert run("status", "--url", url) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if "k3x9q1ab" in line and "430/512" in line)
    for figure in ("serving", "14/32", "84 %", "143", "-0.31", "critical 2+0, standard 9+3, background 3+2"):
        assert figure in row
    assert "moving: 2 from m7w2e5cd to z1p8r4ef" in out
    assert "scheduling: larry alpha=1.0" in out
    assert "m7w2e5cd was told to drain" in out


def test_status_on_a_narrow_terminal(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In 80 columns, which a pipe has too, nothing is lost: what each tier has gets a line of its own."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run("status", "--url", url) == 0
    out = capsys.readouterr().out
    assert "k3x9q1ab: critical 2+0, standard 9+3, background 3+2 (running + waiting)" in out
    row = next(line for line in out.splitlines() if line.startswith("k3x9q1ab │"))
    for figure in ("serving", "14/32", "430/512", "84 %", "143", "-0.31"):
        assert figure in row


def test_status_for_programs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints the document of the page."""
    assert run("status", "--url", url, "--json") == 0
    status = json.loads(capsys.readouterr().out)
    assert [replica["id"] for replica in status["replicas"]] == ["k3x9q1ab", "m7w2e5cd", "z1p8r4ef"]


def test_status_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody there is exit code 1 and a line that says where it looked and what to set."""
    assert run("status", "--url", "http://127.0.0.1:9") == 1
    err = capsys.readouterr().err
    assert "http://127.0.0.1:9/status.json" in err
    assert "--url" in err


def test_status_of_a_public_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One that wants the token for reading gets it from the environment; without it the refusal names the variable."""
    with listening(Rig(public=True)) as url:
        assert run("status", "--url", url) == 1
        assert TOKEN_VARIABLE in capsys.readouterr().err
        monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
        assert run("status", "--url", url) == 0


def test_a_token_that_no_header_can_hold(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is exit code 1 and the variable's name."""
    for token in ("ключ", "two\nlines"):
        monkeypatch.setenv(TOKEN_VARIABLE, token)
        assert run("status", "--url", url) == 1
        assert TOKEN_VARIABLE in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["config", "schema"], ["status", "--json"], ["status", "--json", "--watch"]])
def test_a_reader_that_has_enough(url: str, arguments: list[str]) -> None:
    """`| head` ends the command without a traceback."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "app", *arguments]
    with os.fdopen(write, "w") as out:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, URL_VARIABLE: url}, stdout=out, stderr=subprocess.PIPE, timeout=60
        )
    assert (done.returncode, done.stderr) == (1, b"")


def test_config_check_explains(capsys: pytest.CaptureFixture[str]) -> None:
    """A valid file: what each tier gets, the policies with their defaults, where API and page will be."""
    assert run("config", "check", str(ROOT / "serve_config.yaml")) == 0
    out = capsys.readouterr().out
    assert "tier 0 critical: keeps 20.0 % of the KV cache (51 MiB) free" in out
    assert "tier 1 standard, the default" in out
    assert "scheduling: larry, written in user_config; alpha 1.0" in out
    assert "status page http://127.0.0.1:8001/status" in out
    assert out.rstrip().endswith("is valid")


def test_config_check_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Given values and derived ones are told apart; live settings win over args."""
    content = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    application = content["applications"][0]
    application["args"]["tiers"] = {"levels": [{"name": "gold", "headroom": 0.25, "ttft_slo_s": 0.5}, {"name": "rest"}]}
    application["args"]["tiers"]["default"] = "rest"
    application["deployments"][0]["user_config"] = {"scheduling": {"policy": "guarded_larry", "guard_s": 3.0}}
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(content))
    assert run("config", "check", str(file), "--json") == 0
    (meaning,) = json.loads(capsys.readouterr().out)["applications"]
    gold, rest = meaning["tiers"]
    assert (gold["headroom_share"], gold["headroom_mib"], gold["ttft_slo_s"]) == (0.25, 64.0, 0.5)
    assert rest["default"]
    assert meaning["scheduling"]["policy"] == "guarded_larry"
    assert meaning["scheduling"]["given"] == ["guard_s"]
    assert set(meaning["scheduling"]["parameters"]) > {"guard_s"}
    assert meaning["balancing"]["written_in"] != "user_config"


def test_config_check_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong file is exit code 1, with field, range and remedy, for people on stderr, as JSON on stdout."""
    content = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    content["applications"][0]["args"]["admin"] = {"host": "0.0.0.0"}
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(content))
    assert run("config", "check", str(file)) == 1
    assert "applications[0].args.admin.token_file" in capsys.readouterr().err
    assert run("config", "check", str(file), "--json") == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["valid"] is False
    assert [problem["path"] for problem in answer["problems"]] == ["applications[0].args.admin.token_file"]
    assert run("config", "check", str(tmp_path / "none.yaml"), "--json") == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["path"] == str(tmp_path / "none.yaml")


def test_config_schema(capsys: pytest.CaptureFixture[str]) -> None:
    """The schema names every section of the configuration, or those that change live."""
    assert run("config", "schema") == 0
    assert set(json.loads(capsys.readouterr().out)["properties"]) == set(TidegateConfig.model_fields)
    assert run("config", "schema", "--user-config") == 0
    assert set(json.loads(capsys.readouterr().out)["properties"]) == {"scheduling", "balancing"}


def test_keys_is_the_program_that_makes_them(capsys: pytest.CaptureFixture[str]) -> None:
    """`keys new` prints a key and its entry; its usage errors are exit code 2 under the name that was typed."""
    assert run("keys", "new", "--tenant", "acme") == 0
    assert "tenant: acme" in capsys.readouterr().out
    assert run("keys", "new") == 2
    assert "tidegate keys" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["config"], ["config", "check"], ["undrain"]])
def test_wrong_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be understood ends with usage and exit code 2, before anything is asked."""
    assert run(*arguments) == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["status", "drain", "undrain", "keys", "dashboards", "config"])
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command explains itself, and the list of commands names it."""
    assert run(name, "--help") == 0
    assert "usage:" in capsys.readouterr().out
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert f"    {name}" in out
    assert "Exit codes: 0 done, 1 failed or refused, 2 wrong usage" in out
