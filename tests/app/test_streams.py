"""One stream: what each submission carries, how often it is sent, and under which reason a loss is counted."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.exceptions import RayServeException

from app.calls import REASONS
from app.errors import NoReplicaAvailable
from app.incoming import Incoming
from app.stream import Stream
from app.streams import Failover, run_stream
from app.vllm_compat import SamplingParams
from deployments.routing import NoReplicaError
from deployments.wire import Delta, Outcome, trace_id

from .scripted_fleet import Script, ScriptedReplicas, Submission, lost_with


def new_stream(tier: int = 1, **more: Any) -> Stream:
    """A stream of three prompt tokens."""
    return Stream("rid", [1, 2, 3], SamplingParams(max_tokens=9), 12.5, Incoming(tier, session=77), **more)


async def drive(stream: Stream, *scripts: Script, failover: Failover) -> tuple[ScriptedReplicas, list[Exception]]:
    """Run a stream over scripted replicas; the submissions and what it failed with."""

    def link(reply_to: str, delta: Delta) -> None:
        assert reply_to == "tcp://ingress"
        stream.take(delta, 0.0)

    replicas, failures = ScriptedReplicas(link, *scripts), list[Exception]()
    fail = lambda failed, error: failures.append(error)  # noqa: E731
    await run_stream(stream, replicas, "tcp://ingress", failover, fail)
    return replicas, failures


def test_submission_carries_everything() -> None:
    """Prompt, parameters, arrival, tier, salt, trace and reasoning state go to the replica, on every attempt alike."""

    async def dies(call: Submission) -> Outcome:
        raise ActorDiedError

    async def answers(call: Submission) -> Outcome:
        call.send(7, 8, finish="stop")
        return Outcome(2, "stop")

    more = {"cache_salt": "s", "trace": {"traceparent": "00-1"}, "reasoning_ended": True}
    stream = new_stream(tier=3, **more, reasoning_parser_kwargs={"a": 1})
    replicas, failures = asyncio.run(drive(stream, dies, answers, failover=Failover(3, 5.0)))
    assert failures == []
    assert stream.delivered == [7, 8]
    first, second = (call.submit for call in replicas.calls)
    assert (first.epoch, second.epoch) == (1, 2)
    for submit in (first, second):
        assert (submit.rid, submit.prompt, submit.arrival, submit.priority) == ("rid", [1, 2, 3], 12.5, 3)
        assert {name: getattr(submit, name) for name in more} == more
        assert submit.reasoning_parser_kwargs == {"a": 1}
    tickets = {call.params.extra_args["tidegate"]["ticket"] for call in replicas.calls}
    assert len(tickets) == 2, "each attempt is a submission of its own in the load reports"


@pytest.mark.parametrize("attempts", [1, 2, 5])
def test_attempts_are_counted(attempts: int) -> None:
    """A stream is submitted `max_attempts` times in all, then fails once."""

    async def dies(call: Submission) -> Outcome:
        raise ActorDiedError

    replicas, failures = asyncio.run(drive(new_stream(), dies, failover=Failover(attempts, 5.0)))
    assert len(replicas.calls) == attempts
    assert [type(error) for error in failures] == [NoReplicaAvailable]


def test_the_time_in_a_replicas_queue_does_not_count() -> None:
    """A sequence that loses each replica after longer than `timeout_s` still has all its attempts."""

    async def dies(call: Submission) -> Outcome:
        await asyncio.sleep(0.06)
        raise ActorDiedError

    replicas, failures = asyncio.run(drive(new_stream(), dies, failover=Failover(4, 0.05)))
    assert len(replicas.calls) == 4
    assert len(failures) == 1


def test_time_without_a_replica_is_bounded() -> None:
    """While nobody can take the sequence it is kept for `timeout_s` after the loss, however many attempts are left."""

    async def dies_then_nobody(call: Submission) -> Outcome:
        await asyncio.sleep(0.01)
        if losses:
            raise NoReplicaError("none")
        losses.append(call)
        raise ActorDiedError

    losses: list[Submission] = []
    replicas, failures = asyncio.run(drive(new_stream(), dies_then_nobody, failover=Failover(100, 0.1)))
    assert 2 <= len(replicas.calls) < 30
    assert len(failures) == 1


LOSSES = [
    (ActorDiedError(), "actor_died"),
    (ActorUnavailableError("gone", None), "actor_died"),
    (RayServeException("a bug of Serve"), "other"),
    (Outcome(0, fault="engine", message="engine_dead: EngineCore died"), "engine_dead"),
    (Outcome(0, fault="engine", message="draining"), "draining"),
    (Outcome(0, fault="engine", message="stalled"), "stalled"),
    (Outcome(0, fault="engine", message="ValueError: draining"), "other"),
    (Outcome(3, "stop"), "tokens_lost"),
    (NoReplicaError("none"), "no_replica"),
]


@pytest.mark.parametrize(("loss", "reason"), LOSSES, ids=lambda value: value if isinstance(value, str) else "")
def test_fail_overs_are_counted_by_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, loss: Exception | Outcome, reason: str
) -> None:
    """Each re-send counts once under a label of a small set, and its log line has the trace id of the request."""
    monkeypatch.setattr("app.streams._LAST_DELTA_S", 0.05)
    counted: list[str] = []
    monkeypatch.setattr("app.streams.metrics.failed_over", counted.append)
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"

    async def answers(call: Submission) -> Outcome:
        call.send(7, finish="stop")
        return Outcome(1, "stop")

    stream = new_stream(trace={"traceparent": f"00-{trace}-00f067aa0ba902b7-01"})
    with caplog.at_level(logging.WARNING, "ray.serve"):
        replicas, failures = asyncio.run(drive(stream, lost_with(loss), answers, failover=Failover(3, 5.0)))
    assert (failures, stream.delivered, len(replicas.calls)) == ([], [7], 2)
    assert counted == [reason]
    assert reason in REASONS
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("ray.serve.app")]
    assert f"failover request=rid trace={trace} epoch=1 hop=0 delivered=0 reason={reason}" in line


@pytest.mark.parametrize(
    "headers", [None, {}, {"traceparent": "00-xyz"}, {"traceparent": f"00-{'0' * 32}-00f067aa0ba902b7-01"}]
)
def test_no_trace_id(headers: dict[str, str] | None) -> None:
    """A request without a valid traceparent has "-" in its log lines."""
    assert trace_id(headers) == "-"
