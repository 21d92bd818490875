"""`python -m app.drain`: what it asks of the coordinator, what it prints, how it ends."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import RayTaskError

from app import drain

ROOT = Path(__file__).parents[2]


class Fleet:
    """Stands for the coordinator's handle: replica b empties by one request at each look."""

    def __init__(self, waiting: int = 1) -> None:
        self.rows: dict[str, dict[str, Any]] = {
            name: {"state": "serving", "running": 2, "waiting": waiting} for name in ("a", "b")
        }
        self.asked: list[tuple[str, str]] = []
        self.stuck = False
        self.state = self._method(self._state)
        self.drain = self._method(self._drain)
        self.undrain = self._method(lambda name: self.asked.append(("undrain", name)))

    def _method(self, function: Any) -> Any:
        return SimpleNamespace(remote=lambda *arguments: SimpleNamespace(result=lambda timeout_s: function(*arguments)))

    def _drain(self, name: str) -> None:
        if name not in self.rows:
            raise RayTaskError("drain", "", ValueError(f"no such replica: {name!r}. There are: a, b"))
        self.asked.append(("drain", name))
        self.rows[name]["state"] = "draining"

    def _state(self) -> dict[str, Any]:
        rows = {name: dict(row) for name, row in self.rows.items()}
        for row in self.rows.values():
            if row["state"] == "draining" and not self.stuck:
                key = "running" if row["running"] else "waiting"
                row[key] = max(0, row[key] - 1)
        return {"replicas": rows}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(drain, "LOOK_S", 0.0)
    logger = logging.getLogger("ray.serve")
    level = logger.level
    yield
    logger.setLevel(level)  # the command quiets it


def run(fleet: Fleet, replica: str | None, *, undo: bool = False, timeout_s: float = 5.0) -> int:
    """The command on this fleet."""
    return drain.run(cast(Any, fleet), replica, undo=undo, timeout_s=timeout_s)


def test_it_drains_until_empty(capsys: pytest.CaptureFixture[str]) -> None:
    """Progress is a line per change, exit code 0 means that nothing is left."""
    fleet = Fleet()
    assert run(fleet, "b") == 0
    assert fleet.asked == [("drain", "b")]
    assert capsys.readouterr().out.splitlines() == [
        "b  draining: 2 running, 1 waiting",
        "b  draining: 1 running, 1 waiting",
        "b  draining: 0 running, 1 waiting",
        "b  draining: 0 running, 0 waiting",
        "b is empty",
    ]


def test_a_replica_that_ends_is_done() -> None:
    """One that Serve stopped meanwhile is no longer there: nothing is left to wait for."""
    fleet = Fleet()
    fleet.drain = fleet._method(lambda name: fleet.rows.pop(name))
    assert run(fleet, "b") == 0


def test_an_unknown_replica_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The coordinator's reason goes to stderr, the exit code is 1."""
    assert run(Fleet(), "z") == 1
    assert capsys.readouterr().err == "no such replica: 'z'. There are: a, b\n"


def test_out_of_time_is_not_success(capsys: pytest.CaptureFixture[str]) -> None:
    """What is not empty in time goes on draining, and the exit code says so."""
    fleet = Fleet()
    fleet.stuck = True
    assert run(fleet, "b", timeout_s=0.0) == 3
    assert fleet.rows["b"]["state"] == "draining"
    err = capsys.readouterr().err
    assert err == "b is not empty after 0 s; it goes on draining, until `undrain` takes that back\n"


def test_an_impatient_user_is_told_what_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ctrl-C ends the waiting, not the drain, with a line instead of a traceback."""

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(drain.time, "sleep", interrupted)
    assert run(Fleet(), "b") == 3
    err = capsys.readouterr().err
    assert err == "no longer waiting for b; it goes on draining, until `undrain` takes that back\n"


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RAY_ADDRESS": "127.0.0.1:1"}, "nobody answers at 127.0.0.1:1"),
        ({"RAY_ADDRESS": "nonsense"}, "nonsense"),
        ({"RAY_ADDRESS": "127.0.0.1:{open}", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/none"}, "/none"),
    ],
)
def test_no_way_into_the_cluster(environment: dict[str, str], said: str) -> None:
    """A cluster that is gone, or its token, is named within seconds, with the variables that lead there."""
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        port = somebody.getsockname()[1]
        more = {name: value.format(open=port) for name, value in environment.items()}
        done = subprocess.run(
            [sys.executable, "-m", "app", "drain"], cwd=ROOT, env={**os.environ, "RAY_AUTH_MODE": "disabled", **more},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert said in done.stderr
    assert "RAY_AUTH_TOKEN_PATH say which cluster" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_application_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ray Serve answers an unknown name with KeyError; the user is told which name, and what names another."""

    def none(deployment: str, app: str) -> None:
        raise KeyError(f"Deployment(name='{deployment}', app='{app}') does not exist.")

    monkeypatch.setattr(drain, "connect", lambda address: None)
    monkeypatch.setattr(drain.serve, "get_deployment_handle", none)
    assert drain.main(["--app", "nosuch"]) == 1
    err = capsys.readouterr().err
    assert "No application 'nosuch'" in err
    assert "--app" in err


def test_undo(capsys: pytest.CaptureFixture[str]) -> None:
    """The order to take requests again needs no waiting."""
    fleet = Fleet()
    assert run(fleet, "b", undo=True) == 0
    assert fleet.asked == [("undrain", "b")]


def test_without_a_name_it_lists(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody is drained; each replica is named with its state."""
    fleet = Fleet()
    assert run(fleet, None) == 0
    assert fleet.asked == []
    assert capsys.readouterr().out.splitlines() == [
        "a  serving: 2 running, 1 waiting",
        "b  serving: 2 running, 1 waiting",
    ]


def test_undo_needs_a_name() -> None:
    """Usage errors are argparse's, before anything is asked."""
    with pytest.raises(SystemExit) as ended:
        drain.main(["--undo"])
    assert ended.value.code == 2
