"""Autoscaling as Serve sees it: its policy contract, its windows, and what a replica records for it."""

from __future__ import annotations

import asyncio
import inspect
import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.serve import autoscaling_policy
from ray.serve._private import autoscaling_state
from ray.serve._private import replica as serve_replica
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from deployments.autoscaling import POLICY, FirstTokens, FreenessPolicy, stats
from deployments.load_page import Figures
from deployments.replica import EngineReplica
from deployments.wire import Delta, Outcome, Submit
from policies.autoscaling.windows import Windows

ENGINE = DeploymentID("EngineReplica", "tidegate")
R1, R2 = ReplicaID("r1", ENGINE), ReplicaID("r2", ENGINE)
FIGURES = Figures(1.0, 728, 728, 16, 0, 0, 0, 0, 2048, 32, 0, 5)


class Clock:
    """A clock that is set by hand."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def busy(running: int, **changes: Any) -> Figures:
    """Figures of an engine with so many requests of 20 blocks."""
    return FIGURES._replace(running=running, free_blocks=728 - 20 * running, **changes)


def context(
    told: dict[ReplicaID, tuple[float, Figures]], now: float, running: list[ReplicaID] | None = None, **changes: Any
) -> AutoscalingContext:
    """Serve's context when each replica recorded its figures at a time of its own clock."""
    raw: dict[str, dict[ReplicaID, list[TimeStampedValue]]] = {}
    for replica, (at, figures) in told.items():
        for name, value in stats(figures, FirstTokens([]), False).items():
            raw.setdefault(name, {})[replica] = [TimeStampedValue(at - 1, math.nan), TimeStampedValue(at, value)]
    running = list(told) if running is None else running
    known: dict[str, Any] = {
        "deployment_id": ENGINE,
        "deployment_name": ENGINE.name,
        "app_name": ENGINE.app_name,
        "current_num_replicas": len(running),
        "target_num_replicas": len(running),
        "running_replicas": running,
        "total_num_requests": lambda: 0.0,
        "total_queued_requests": lambda: 0.0,
        "aggregated_metrics": dict,
        "raw_metrics": lambda: raw,
        "capacity_adjusted_min_replicas": 1,
        "capacity_adjusted_max_replicas": 8,
        "policy_state": {},
        "last_scale_up_time": None,
        "last_scale_down_time": None,
        "current_time": now,
        "config": AutoscalingConfig(min_replicas=1, max_replicas=8, upscale_delay_s=0, downscale_delay_s=0),
    }
    return AutoscalingContext(**(known | changes))


def test_serve_makes_the_policy_once_from_its_name_and_parameters() -> None:
    """Serve imports the class by name, makes it with policy_kwargs, and calls it with its context."""
    policy = AutoscalingPolicy(policy_function=POLICY, policy_kwargs={"scale_up_steps": 100.0})
    made = autoscaling_state._resolve_policy_callable(policy)
    assert type(made).__name__ == FreenessPolicy.__name__
    wrapped = autoscaling_policy._apply_autoscaling_config(made)
    replicas, state = wrapped(context({R1: (1.0, busy(31))}, 1.0))
    assert replicas == 2
    assert state["reason"] == "busy"


def test_serve_asks_replicas_by_this_name() -> None:
    """Serve looks up `record_autoscaling_stats`, calls it every metrics_interval_s and takes plain numbers."""
    source = inspect.getsource(serve_replica)
    assert f'"{EngineReplica.record_autoscaling_stats.__name__}"' in source
    pusher = inspect.getsource(serve_replica.ReplicaMetricsManager.start_metrics_pusher)
    assert "autoscaling_config.metrics_interval_s" in pusher, "Serve asks by another interval: see app/config"
    told = stats(busy(3), FirstTokens([]), True)
    assert all(type(value) is float and math.isfinite(value) for value in told.values())
    assert told["draining"] == 1.0


@given(
    st.lists(st.tuples(st.integers(0, 4), st.floats(0, 20)), min_size=1, max_size=40),
    st.sampled_from([0.0, 5.0, 30.0]),
    st.sampled_from([0.0, 10.0, 40.0]),
    st.sampled_from([None, 0.0, 60.0]),
)
@settings(max_examples=40, deadline=None)
def test_windows_are_serves(
    wanted: list[tuple[int, float]], up_s: float, down_s: float, to_zero_s: float | None
) -> None:
    """`Windows` gives the targets that Serve's own delays give, from none as well."""
    config = AutoscalingConfig(
        min_replicas=0,
        max_replicas=8,
        upscale_delay_s=up_s,
        downscale_delay_s=down_s,
        downscale_to_zero_delay_s=to_zero_s,
    )
    windows, target, now = Windows(up_s, down_s, to_zero_s), 2, 1e9
    state: dict[str, Any] = {}
    for replicas, gap in wanted:
        now += gap
        if target == 0 and replicas > 0:
            theirs = replicas
        else:
            theirs, state = autoscaling_policy._apply_delay_logic(replicas, target, config, state, now)
        assert windows.apply(replicas, target, target, now) == theirs
        target = theirs


def test_figures_age_by_the_controllers_clock() -> None:
    """A replica whose clock is an hour behind counts as heard; one that tells nothing new is held against scaling."""
    policy = FreenessPolicy(stale_s=5.0)
    told = {R1: (-3600.0, busy(1)), R2: (50.0, busy(1))}
    assert policy(context(told, 100.0)) == (1, {"reason": "free"})
    silent = {R1: (-3600.0, busy(1)), R2: (56.0, busy(0))}
    assert policy(context(silent, 106.0)) == (2, {"reason": "stale"})
    told = {R1: (-3590.0, busy(0)), R2: (57.0, busy(0))}
    assert policy(context(told, 107.0)) == (1, {"reason": "idle"})


def test_a_replica_without_figures_starts() -> None:
    """A replica that runs and has told nothing yet is counted as one that starts, for a while."""
    policy = FreenessPolicy(stale_s=5.0)
    assert policy(context({}, 1.0, [R1, R2])) == (2, {"reason": "starting"})
    assert policy(context({R1: (2.0, busy(30))}, 2.0, [R1, R2]))[0] == 2
    assert policy(context({}, 9.0, [R1, R2])) == (2, {"reason": "stale"})


def test_a_replica_that_fell_silent_does_not_start() -> None:
    """Serve forgets old figures; the replica that told them counts as silent, not as one that starts."""
    policy = FreenessPolicy()
    policy(context({R1: (1.0, busy(1)), R2: (1.0, busy(20))}, 1.0))
    assert policy(context({R1: (7.0, busy(0))}, 7.0, [R1, R2])) == (2, {"reason": "stale"})


def test_calls_that_wait_outside_start_a_replica() -> None:
    """Without any replica the calls in Serve's handles are the demand."""
    empty = context({}, 1.0, capacity_adjusted_min_replicas=0, total_queued_requests=3.0)
    assert FreenessPolicy()(empty) == (1, {"reason": "cold_start"})


def test_a_changed_decision_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The log says each new decision with its reason, not every tick."""
    policy = FreenessPolicy()
    with caplog.at_level("INFO", logger="ray.serve"):
        for now in (1.0, 2.0, 3.0):
            policy(context({R1: (now, busy(30))}, now))
    (line,) = [record.getMessage() for record in caplog.records if "autoscaling" in record.getMessage()]
    assert "wanted=2 target=1 running=1 reason=busy" in line


def test_before_the_engine_has_figures_nothing_is_recorded() -> None:
    """An engine that made no step has no load to tell."""
    assert stats(None, FirstTokens([]), False) == {}


def submission(rid: str, tier: int = 0, output: tuple[int, ...] = (), prompt: int = 1, hop: int = 0) -> Submit:
    """A sequence that arrived at 1000 s."""
    return Submit(rid, 0, "tcp://a", [1] * prompt, b"", 1000.0, priority=tier, output=list(output), hop=hop)


def waits(first_tokens: FirstTokens) -> dict[str, float]:
    """What is recorded of the time until the first token."""
    return {name: first_tokens.record()[name] for name in ("wait_s", "first_tokens", "late")}


def watched(first_tokens: FirstTokens, submit: Submit, answer: asyncio.Event) -> Any:
    """Run a sequence whose first token comes with the event; returns its task."""

    async def generate(submit: Submit, entries: dict[str, Any], emit: Any) -> Outcome:
        await answer.wait()
        emit(Delta(submit.rid, 0, 0, [7]))
        emit(Delta(submit.rid, 0, 1, [8], "stop"))
        return Outcome(2, "stop")

    return asyncio.create_task(first_tokens.watching(generate)(submit, {}, lambda delta: None))


def test_first_tokens_are_held_against_their_tiers_promise() -> None:
    """Late is what came, or still waits, beyond the tier's TTFT; it is forgotten after a while."""

    async def scenario() -> None:
        clock, soon, later = Clock(), asyncio.Event(), asyncio.Event()
        first_tokens = FirstTokens([2.0, 10.0, None], clock)
        tasks = [
            watched(first_tokens, submission("a"), soon),
            watched(first_tokens, submission("b"), later),
            watched(first_tokens, submission("c", tier=1), later),
            watched(first_tokens, submission("batch", tier=2), later),  # was promised nothing
            watched(first_tokens, submission("moved", output=(5,)), later),  # had its first token elsewhere
        ]
        await asyncio.sleep(0)
        clock.now += 1.0
        soon.set()
        await tasks[0]
        assert waits(first_tokens) == {"wait_s": 1.0, "first_tokens": 1.0, "late": 0.0}
        clock.now += 4.0
        assert waits(first_tokens) == {"wait_s": 5.0, "first_tokens": 2.0, "late": 1.0}
        later.set()
        await asyncio.gather(*tasks)
        assert waits(first_tokens) == {"wait_s": 0.0, "first_tokens": 3.0, "late": 1.0}
        clock.now += 31.0
        assert waits(first_tokens) == {"wait_s": 0.0, "first_tokens": 0.0, "late": 0.0}

    asyncio.run(scenario())


def test_prompt_tokens_are_counted_where_they_arrive_and_while_they_wait() -> None:
    """Tokens/s of the last ten seconds, of tiers with a promise; what moves here arrived elsewhere, but waits here."""

    async def scenario() -> None:
        clock, answer = Clock(), asyncio.Event()
        first_tokens = FirstTokens([2.0, None], clock)
        came = [submission("a", prompt=100), submission("moved", prompt=30, hop=1), submission("b", tier=1, prompt=900)]
        tasks = [watched(first_tokens, submit, answer) for submit in came]
        await asyncio.sleep(0)
        clock.now += 4.0
        told = first_tokens.record()
        assert (told["prompt_rate"], told["due_tokens"]) == (100 / 10, 130.0)
        answer.set()
        await asyncio.gather(*tasks)
        clock.now += 7.0
        told = first_tokens.record()
        assert (told["prompt_rate"], told["due_tokens"]) == (0.0, 0.0)

    asyncio.run(scenario())


def test_a_replica_of_an_older_version_scales_by_its_memory() -> None:
    """One that reports nothing of its prompts holds nobody up, whatever the others compute."""
    ctx = context({R1: (1.0, busy(31))}, 1.0)
    new = {"full_rate", "prompt_rate", "due_tokens"}
    raw = {name: series for name, series in ctx.raw_metrics.items() if name not in new}
    assert len(raw) == len(ctx.raw_metrics) - len(new)
    assert FreenessPolicy()(context({R1: (1.0, busy(31))}, 1.0, raw_metrics=lambda: raw)) == (2, {"reason": "busy"})


def test_without_promises_every_request_counts_as_waiting() -> None:
    """A fleet whose tiers promise no TTFT still sees how long its requests wait, and none of them is late."""

    async def scenario() -> None:
        clock, answer = Clock(), asyncio.Event()
        first_tokens = FirstTokens([None, None], clock)
        task = watched(first_tokens, submission("a", tier=1), answer)
        await asyncio.sleep(0)
        clock.now += 7.0
        assert waits(first_tokens) == {"wait_s": 7.0, "first_tokens": 0.0, "late": 0.0}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert first_tokens.record()["wait_s"] == 0.0

    asyncio.run(scenario())


def test_a_replica_tells_its_state() -> None:
    """EngineReplica records its page, its first tokens, and whether it drains."""
    replica: Any = SimpleNamespace(
        _page=SimpleNamespace(read=lambda: busy(3, waiting=2)),
        _first_tokens=FirstTokens([]),
        _migration=SimpleNamespace(draining=SimpleNamespace(on=True)),
    )
    told = EngineReplica.record_autoscaling_stats(replica)
    assert (told["running"], told["waiting"], told["draining"]) == (3.0, 2.0, 1.0)
