"""`python -m app.drain`: what it asks of the coordinator, what it prints, how it ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import RayTaskError

from app import drain


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
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "LOOK_S", 0.0)


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


def test_out_of_time_is_not_success() -> None:
    """What is not empty in time goes on draining, and the exit code says so."""
    fleet = Fleet()
    fleet.stuck = True
    assert run(fleet, "b", timeout_s=0.0) == 3
    assert fleet.rows["b"]["state"] == "draining"


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
