"""An engine's step log comes out of the simulator again, step by step; whatever differs is found and named."""

from __future__ import annotations

import csv
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from deployments.scheduler import make_policy
from deployments.step_log import COLUMNS, StepLog, log_steps
from loadgen.cli import main
from loadgen.simulator.calibrate import read as read_steps
from loadgen.simulator.replay import Difference, read, replay
from policies.scheduling import SCHEDULING
from tests.deployments.scheduler_rig import Driver, request, scheduler, tier_spec, trace

Rows = list[dict[str, str]]


def as_text(rows: list[dict[str, Any]]) -> Rows:
    """Rows as they are read back from a file."""
    return [{name: str(value) for name, value in row.items()} for row in rows]


def logged(spec: dict[str, Any], asynchronous: bool = False, tiers: dict[str, Any] | None = None) -> Rows:
    """The log of a burst on a scheduler that runs out of KV blocks, with a clock of its own."""
    engine = scheduler(spec, asynchronous, tiers=tiers, blocks=96)
    driver = Driver(engine, asynchronous, step_s=0.05)
    rows: list[dict[str, Any]] = []
    StepLog(engine, rows.append)
    for _ in driver.steps(trace(3, count=40, tiers=3 if tiers else 1)):
        driver.step()
    return as_text(rows)


@cache
def burst() -> tuple[dict[str, str], ...]:
    """A log of FCFS."""
    return tuple(logged({"name": "fcfs"}))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", ["fcfs", "larry", "mlfq", "no_preempt", "larry_preemptive"])
def test_log_is_reproduced(name: str, asynchronous: bool) -> None:
    """Every step of a burst with preemptions is the same again, with one step under way or with two."""
    spec = {"name": name}
    if "predictor" in SCHEDULING.parameters(name):
        spec["predictor"] = "max_tokens"
    rows = logged(spec, asynchronous)
    same = replay(rows)
    assert (same.steps, same.requests, same.left, same.policies) == (len(rows), 40, 40, (name,))
    assert (same.preemptions > 0) == (name != "no_preempt")


def test_tiers_are_reproduced() -> None:
    """The log has the tiers of the engine and of its requests."""
    same = replay(logged({"name": "larry"}, tiers=tier_spec(None, 1.0, 1.0)))
    assert (same.requests, same.left) == (40, 40)


def test_another_policy_on_the_way() -> None:
    """A policy that was changed in the running engine is changed at the same step."""
    engine = scheduler({"name": "fcfs"}, blocks=96)
    driver = Driver(engine)
    rows: list[dict[str, Any]] = []
    StepLog(engine, rows.append)
    for number in driver.steps(trace(5, count=40)):
        if number == 40:
            engine.policy_spec = {"name": "larry", "alpha": 5}
            engine.use_policy(make_policy(engine.policy_spec))
        driver.step()
    same = replay(as_text(rows))
    assert same.policies == ("fcfs", "larry")
    without = [{**row, "setting": row["setting"] if row["step"] == "1" else ""} for row in as_text(rows)]
    with pytest.raises(Difference):
        replay(without)


def test_stops_and_aborts_are_reproduced() -> None:
    """Requests that end before their limit, by a stop word or because the client left, leave after the same step."""
    engine = scheduler({"name": "larry"}, blocks=96)
    driver = Driver(engine)
    rows: list[dict[str, Any]] = []
    StepLog(engine, rows.append)
    for number in driver.steps(trace(7, count=40)):
        if number % 9 == 5 and engine.requests:
            engine.finish_requests([*engine.requests][-1], RequestStatus.FINISHED_ABORTED)
        driver.step()
    same = replay(as_text(rows))
    assert 30 < same.requests == same.left < 40  # some left before a step had seen them


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("free_blocks", "1"),
        ("decodes", "77"),
        ("context_tokens", "1"),
        ("waiting", "55"),
        ("preempted", "0"),
        ("scheduled", "0:3"),
        ("left", "0:1"),
    ],
)
def test_difference_is_named(column: str, value: str) -> None:
    """The first step that is not the same is named with what differs."""
    rows = [dict(row) for row in burst()]
    rows[20][column] = value
    with pytest.raises(Difference) as found:
        replay(rows)
    assert (found.value.step, found.value.what) == ("21", column)


def test_an_arrival_seen_a_step_later_is_noticed() -> None:
    """The same requests, one of them seen one step later, is not the same log."""
    rows = [dict(row) for row in burst()]
    came = next(i for i in range(5, len(rows)) if rows[i]["arrivals"] and not rows[i + 1]["arrivals"])
    rows[came + 1]["arrivals"], rows[came]["arrivals"] = rows[came]["arrivals"], ""
    with pytest.raises(Difference) as found:
        replay(rows)
    assert found.value.step == str(came + 1)


def test_file_serves_both_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file that a scheduler writes is read by `replay` and by `calibrate`; a changed one ends with status 1."""
    engine, path = scheduler({"name": "larry"}), tmp_path / "steps.csv"
    log_steps(engine, str(path))
    driver = Driver(engine)
    for _ in driver.steps(trace(1, count=20)):
        driver.step()
    rows = read(path)  # complete as soon as the engine is idle
    assert [row.seconds > 0 for row in read_steps(path)] == [True] * len(rows)
    engine.shutdown()
    assert main(["replay", str(path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{len(rows)} steps of 20 requests under larry: identical schedules" in printed
    rows[4]["scheduled"] = "3"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    assert main(["replay", str(path)]) == 1
    assert "step 5: scheduled is '3' in the engine" in " ".join(capsys.readouterr().out.split())


def test_seconds_add_up_to_the_busy_time() -> None:
    """A step lasts from the end of the one before, or from its own begin after a pause."""
    engine, time = scheduler({"name": "fcfs"}), [0.0]
    rows: list[dict[str, Any]] = []
    StepLog(engine, rows.append, timer=lambda: time[0])
    driver = Driver(engine)
    for at in (10.0, 50.0):
        engine.add_request(request(f"r{at}", 300, 3, arrival=at))
        time[0] = at
        while engine.has_unfinished_requests():
            time[0] += 0.5
            driver.step(lambda: time.__setitem__(0, time[0] + 1.0))
    seconds = [row["seconds"] for row in rows]
    assert len(seconds) == 8
    assert sum(seconds[1:4]) == pytest.approx(3 * 2.5)  # the pause before a busy engine's next step belongs to that
    assert seconds[0] == seconds[4] < 2.5


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"setting": ""}, "replay the whole log"),
        ({"setting": json.dumps({**json.loads(burst()[0]["setting"]), "prefix_caching": True})}, "prefix caching"),
    ],
)
def test_logs_that_cannot_be_replayed(change: dict[str, str], complaint: str) -> None:
    """A log without its beginning, and one of an engine with prefix caching, are refused."""
    rows = [dict(row) for row in burst()]
    rows[0] |= change
    with pytest.raises(ValueError, match=complaint):
        replay(rows)


def test_files_that_are_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file without the columns, an empty one and a cut row are refused with what is missing."""
    path = tmp_path / "steps.csv"
    for text, complaint in (
        ("seconds,run\n", "no column arrivals"),
        (",".join(COLUMNS) + "\n", "there are no steps"),
        (",".join(COLUMNS) + "\n1,2\n", "line 2: the row is not complete"),
    ):
        path.write_text(text)
        assert main(["replay", str(path)]) == 1
        assert complaint in " ".join(capsys.readouterr().out.split())
