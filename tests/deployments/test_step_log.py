"""The step log: nothing of it where it is not asked for, and rows worked out by hand where it is."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from deployments.scheduler import PolicyScheduler, SchedulerSettings, make_policy
from deployments.step_log import COLUMNS, StepLog

from .scheduler_rig import BLOCK, Driver, request, scheduler, vllm_config

WRAPPED = ("schedule", "update_from_output", "add_request", "_preempt_request", "_free_request", "shutdown")


def drive(engine: Any, *requests: Any) -> None:
    """Add requests and run until all have ended."""
    driver = Driver(engine)
    for one in requests:
        engine.add_request(one)
    while engine.has_unfinished_requests():
        driver.step()


def test_scheduler_without_a_log_is_untouched() -> None:
    """By default no method is wrapped and no file is made: steps cost what they cost before."""
    assert SchedulerSettings().step_log is None
    engine = scheduler({"name": "fcfs"})
    assert not set(WRAPPED) & set(vars(engine))


def test_rows_of_one_request() -> None:
    """A prompt of 300 tokens in steps of 256, then two decodes: counts, pairs and blocks as worked out by hand."""
    engine = scheduler({"name": "fcfs"})
    rows: list[dict[str, Any]] = []
    engine.clock = lambda: 1e9 + engine.steps
    StepLog(engine, rows.append, timer=lambda: 7.0)
    drive(engine, request("a", 300, 3, arrival=12.5, tier=0))
    columns = ("now", "prefill_tokens", "prefill_requests", "attention", "decodes", "context_tokens", "free_blocks")
    assert [tuple(row[name] for name in columns) for row in rows] == [
        (1e9, 256, 1, 256 * 128.0, 0, 0, 128 - 16),
        (1e9 + 1, 44, 1, 44 * 278.0, 0, 0, 128 - 19),
        (1e9 + 2, 0, 0, 0.0, 1, 301, 128 - 19),
        (1e9 + 3, 0, 0, 0.0, 1, 302, 128 - 19),
    ]
    assert [row["scheduled"] for row in rows] == ["0:256", "0:44", "0", "0"]
    assert [row["left"] for row in rows] == ["", "", "", "0:3"]
    assert [(row["step"], row["running"], row["waiting"], row["in_flight"]) for row in rows] == [
        (number, 1, 0, 0) for number in (1, 2, 3, 4)
    ]
    assert json.loads(rows[0]["arrivals"]) == [["a", 12.5, 300, 3, 0, None, None, 0]]
    assert [row["arrivals"] for row in rows[1:]] == [""] * 3
    assert json.loads(rows[0]["setting"]) == {
        "policy": {"name": "fcfs"},
        "kv_blocks": 128,
        "block_size": BLOCK,
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "asynchronous": False,
        "prefix_caching": False,
        "tiers": None,
    }


def test_policy_sees_the_time_that_is_logged() -> None:
    """A step has one time, however often the clock is read in it; afterwards the clock runs on."""
    ticks = iter(range(1000))
    engine = scheduler({"name": "larry"})
    rows: list[dict[str, Any]] = []
    seen: list[float] = []
    engine.clock = lambda: float(next(ticks))
    StepLog(engine, rows.append)
    policy = make_policy({"name": "larry"})
    policy.on_step = lambda ctx: seen.append(ctx.now)  # type: ignore[method-assign]
    engine.use_policy(policy)
    drive(engine, request("a", 10, 3), request("b", 10, 5))
    assert [row["now"] for row in rows] == seen[: len(rows)]
    assert engine.clock() < engine.clock()


def test_a_request_that_comes_while_nothing_is_left_begins_a_new_stretch() -> None:
    """After an abort has emptied the engine, the pause is in nobody's seconds."""
    engine, time = scheduler({"name": "fcfs"}), [0.0]
    rows: list[dict[str, Any]] = []
    StepLog(engine, rows.append, timer=lambda: time[0])
    driver = Driver(engine)
    engine.add_request(request("a", 10, 50))
    driver.step()
    engine.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    time[0] = 100.0
    drive(engine, request("b", 10, 1))
    assert [(row["seconds"], row["left"]) for row in rows] == [(0.0, "0:1"), (0.0, "1:1")]


def test_settings_make_the_file(tmp_path: Path) -> None:
    """An engine that is asked to writes a row for each step; the file is whole when it is shut down in the middle."""
    path = tmp_path / "steps.csv"
    assert SchedulerSettings(step_log=str(path)).compute_hash() == SchedulerSettings().compute_hash()
    engine = scheduler({"name": "fcfs"}, cls=_logging(path))
    driver = Driver(engine)
    engine.add_request(request("a", 10, 50))
    for _ in range(5):
        driver.step()
    engine.shutdown()
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5"]
    assert all(float(row["seconds"]) > 0 for row in rows)


def _logging(path: Path) -> type:
    """The scheduler's class for an engine whose settings ask for a log."""

    class Logging(PolicyScheduler):
        def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            vllm_config.additional_config = SchedulerSettings(step_log=str(path))
            super().__init__(vllm_config, *args, **kwargs)

    return Logging


@pytest.mark.parametrize("asynchronous", [False, True])
def test_private_names_of_vllm(asynchronous: bool) -> None:
    """What the log reads of vLLM's scheduler and requests, beyond the names of scheduler.py, is there."""
    config = vllm_config(asynchronous, SchedulerSettings())
    assert (config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens) == (16, 256)
    engine = scheduler({"name": "fcfs"}, asynchronous)
    assert engine.scheduler_config.max_num_seqs == 16
    assert engine.kv_cache_manager.enable_caching is False
    assert engine.has_unfinished_requests() is False
    one = request("a", 10, 3)
    engine.add_request(one)
    assert engine.has_unfinished_requests() is True
    assert (one.num_prompt_tokens, one.num_output_tokens, one.max_tokens) == (10, 0, 3)
