"""The commands of docs/operations.md do what the page says, on a scripted fleet."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from app.cli import command
from app.cli.status import URL_VARIABLE
from app.config.admin import TOKEN_VARIABLE

from .admin_rig import TOKEN, Rig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
#: Of each shell block: lines without their comments, those that go on put together.
LINES = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]
OURS = [line.removeprefix("python -m app ") for line in LINES if line.startswith("python -m app ")]
CURLS = [line for line in LINES if line.startswith("curl ")]
#: Need a real fleet (tests/integration/test_status_page.py, test_drain.py) or run until ctrl-C.
ELSEWHERE = ("drain", "undrain", "status --watch")


@pytest.mark.parametrize("line", OURS)
def test_our_commands(line: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command of ours is understood, and each that needs no real fleet ends well."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv(URL_VARIABLE, url)
    arguments = shlex.split(line.replace("DIR", str(tmp_path)))
    if line.startswith(ELSEWHERE):
        with pytest.raises(SystemExit) as ended:
            command.main([*arguments, "--help"])
        assert ended.value.code == 0
    else:
        assert command.main(arguments) == 0


@pytest.mark.parametrize("line", CURLS, ids=lambda line: line.split()[1])
def test_http_commands(line: str, rig: Rig, url: str) -> None:
    """Each curl line is answered, and the one that changes alpha changes it."""
    environment = {"PATH": "/usr/bin:/bin", TOKEN_VARIABLE: TOKEN}
    shell = ["bash", "-c", line.replace("curl", "curl -sS --fail", 1).replace("http://127.0.0.1:8001", url)]
    done = subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    if "settings" in line:
        assert rig.serve.user_config["scheduling"] == {"policy": "larry", "alpha": 2.0}
    else:
        assert '"k3x9q1ab"' in done.stdout


def test_the_page_has_commands() -> None:
    """The patterns above find what they are meant to find."""
    assert len(OURS) >= 10
    assert len(CURLS) == 2
    assert {line.split()[0] for line in OURS} == {"config", "status", "drain", "undrain", "dashboards"}


def test_every_status_of_an_error_is_on_the_page() -> None:
    """What the admin server answers besides success is what the page lists."""
    told = PAGE[PAGE.index("Errors are") : PAGE.index("On the terminal")]
    source = (ROOT / "app/admin/server.py").read_text(encoding="utf-8")
    statuses = re.compile(r"\b[45]\d\d\b")
    assert set(statuses.findall(told)) == set(statuses.findall(source))
