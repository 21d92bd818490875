"""One stream: exactly-once by epoch and position, and what each submission carries."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError

from app.errors import NoReplicaAvailable
from app.incoming import Incoming
from app.streams import Failover, Stream, run_stream
from app.vllm_compat import SamplingParams
from deployments.wire import Delta, Outcome

from .scripted_fleet import Script, ScriptedReplicas, Submission


def new_stream(tier: int = 1, **more: Any) -> Stream:
    """A stream of three prompt tokens."""
    return Stream("rid", [1, 2, 3], SamplingParams(max_tokens=9), 12.5, Incoming(tier, session=77), **more)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 12), st.integers(0, 4)), max_size=60))
def test_accepts_only_what_is_next(deltas: list[tuple[int, int, int]]) -> None:
    """Whatever deltas come, the delivered tokens are the positions 0, 1, 2, ... of the current epoch, each once."""
    stream = new_stream(epoch=2)
    for epoch, start, size in deltas:
        before = len(stream.delivered)
        taken = stream.accept(epoch, start, list(range(start, start + size)))
        assert taken == (epoch == 2 and start == before)
        assert len(stream.delivered) == before + (size if taken else 0)
    assert stream.delivered == list(range(len(stream.delivered)))


async def drive(stream: Stream, *scripts: Script, failover: Failover) -> tuple[ScriptedReplicas, list[Exception]]:
    """Run a stream over scripted replicas; the submissions and what it failed with."""

    def link(reply_to: str, delta: Delta) -> None:
        assert reply_to == "tcp://ingress"
        if stream.accept(delta.epoch, delta.start, delta.token_ids) and delta.finish_reason:
            stream.finished.set()

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


def test_no_more_attempts_after_the_time() -> None:
    """Attempts end `timeout_s` after the first loss, even if some are left."""

    async def dies(call: Submission) -> Outcome:
        await asyncio.sleep(0.06)
        raise ActorDiedError

    replicas, failures = asyncio.run(drive(new_stream(), dies, failover=Failover(100, 0.1)))
    assert 2 <= len(replicas.calls) <= 4
    assert len(failures) == 1
