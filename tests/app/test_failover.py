"""Lost replicas: their sequences go on elsewhere after the tokens that the client has, within bounds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from app.errors import NoReplicaAvailable, ReplicaLost
from app.streams import Failover
from app.vllm_compat import VLLMValidationError, tokens_input
from deployments.routing import NoReplicaError
from deployments.wire import Outcome

from .scripted_fleet import END, PROMPT, FleetMaker, Submission, collect, lost_with, params, says, silent

TEXT = "Hi 🍕 日本語 — done"
LOSSES = [ActorDiedError(), Outcome(0, fault="engine", message="EngineCore died")]


@pytest.mark.parametrize("loss", LOSSES, ids=["actor", "engine"])
def test_lost_before_the_first_token_is_sent_again(run: Any, make_fleet: FleetMaker, loss: Any) -> None:
    """The same request goes to another replica under a new epoch; late tokens of the lost one are ignored."""

    async def scenario() -> None:
        fleet = await make_fleet(lost_with(loss), lost_with(loss), silent)
        ids = fleet.ids(TEXT)

        async def third(call: Submission) -> Outcome:
            for late in fleet.replicas.calls[:2]:
                late.send(901, 902, finish="stop")
            return await says(ids)(call)

        fleet.replicas.scripts[2] = third
        assert (await collect(fleet))[0] == (TEXT, [*ids, END], ("stop", None))
        submits = [call.submit for call in fleet.replicas.calls]
        assert [s.epoch for s in submits] == [1, 2, 3]
        assert len({(s.rid, tuple(s.prompt), s.arrival, s.priority) for s in submits}) == 1

    run(scenario())


def test_attempts_are_bounded(run: Any, make_fleet: FleetMaker) -> None:
    """After `max_attempts` losses the client hears 503 with a Retry-After."""

    async def scenario() -> None:
        fleet = await make_fleet(lost_with(ActorDiedError()), failover=Failover(max_attempts=2, timeout_s=5))
        with pytest.raises(NoReplicaAvailable, match="2 attempts") as refused:
            await collect(fleet)
        assert refused.value.retry_after
        assert len(fleet.replicas.calls) == 2

    run(scenario())


def test_time_to_send_again_counts_from_the_first_loss(run: Any, make_fleet: FleetMaker) -> None:
    """A request that has queued longer than `failover.timeout_s` is still sent again when its replica dies."""

    async def scenario() -> None:
        fleet = await make_fleet(silent, failover=Failover(max_attempts=3, timeout_s=0.1))

        async def dies_late(call: Submission) -> Outcome:
            await asyncio.sleep(0.25)
            raise ActorDiedError

        fleet.replicas.scripts[:] = [dies_late, says(fleet.ids("ok"))]
        assert (await collect(fleet))[0][0] == "ok"

    run(scenario())


@pytest.mark.parametrize("loss", LOSSES, ids=["actor", "engine"])
@pytest.mark.parametrize("cut", range(1, 9))
def test_lost_after_the_first_token_goes_on_elsewhere(run: Any, make_fleet: FleetMaker, loss: Any, cut: int) -> None:
    """The next submission carries the delivered tokens, and the client gets each token once, inside a character too."""

    async def scenario() -> None:
        fleet = await make_fleet(silent, over_zmq=False)
        ids = fleet.ids(TEXT)
        fleet.replicas.scripts[:] = [lost_with(loss, *ids[:cut]), lost_with(loss), says(ids)]
        assert (await collect(fleet, params(prompt_logprobs=1)))[0] == (TEXT, [*ids, END], ("stop", None))
        submits = [call.submit for call in fleet.replicas.calls]
        assert [s.output for s in submits] == [[], ids[:cut], ids[:cut]]
        assert len({(s.rid, tuple(s.prompt), s.arrival) for s in submits}) == 1
        assert [call.params.prompt_logprobs for call in fleet.replicas.calls] == [1, None, None]

    run(scenario())


def test_progress_renews_the_attempts(run: Any, make_fleet: FleetMaker) -> None:
    """A stream that gets on between losses is carried further than `max_attempts` replicas."""

    async def scenario() -> None:
        fleet = await make_fleet(silent, over_zmq=False, failover=Failover(max_attempts=2, timeout_s=5))
        ids = fleet.ids(TEXT)
        fleet.replicas.scripts[:] = [*(lost_with(ActorDiedError(), one) for one in ids[:5]), says(ids)]
        assert (await collect(fleet))[0] == (TEXT, [*ids, END], ("stop", None))

    run(scenario())


def test_nobody_can_go_on(run: Any, make_fleet: FleetMaker) -> None:
    """Out of attempts, a stream that has begun ends with an error that says how far it came."""

    async def scenario() -> None:
        fleet = await make_fleet(
            lost_with(ActorDiedError(), 500, 501),
            over_zmq=False,
            failover=Failover(max_attempts=2, timeout_s=5),
        )
        fleet.replicas.scripts.append(lost_with(ActorDiedError()))
        outputs = fleet.client.generate(tokens_input(PROMPT), params(), "r")
        assert (await anext(outputs)).outputs[0].token_ids == [500, 501]
        with pytest.raises(ReplicaLost, match="after 2 tokens"):
            await anext(outputs)
        assert len(fleet.replicas.calls) == 2

    run(scenario())


def test_one_lost_sequence_ends_its_siblings(run: Any, make_fleet: FleetMaker) -> None:
    """When one of n sequences fails for good the request fails, and the others are aborted on their replicas."""

    async def scenario() -> None:
        fleet = await make_fleet(
            silent,
            lost_with(ZeroDivisionError("a bug"), 500),
            silent,
            over_zmq=False,
            failover=Failover(max_attempts=1, timeout_s=5),
        )
        with pytest.raises(ZeroDivisionError):
            await collect(fleet, params(n=3, temperature=1.0))
        assert await fleet.settle() == {}
        assert [call.state for call in fleet.replicas.calls] == ["aborted", "failed", "aborted"]

    run(scenario())


def test_request_fault_is_the_clients(run: Any, make_fleet: FleetMaker) -> None:
    """What the engine refuses is a validation error that names the field, and is not sent again."""

    async def scenario() -> None:
        refusal = Outcome(0, fault="request", message="no such grammar", parameter="structured_outputs")
        fleet = await make_fleet(lost_with(refusal))
        with pytest.raises(VLLMValidationError, match="no such grammar") as refused:
            await collect(fleet)
        assert refused.value.parameter == "structured_outputs"
        assert len(fleet.replicas.calls) == 1

    run(scenario())


def test_no_replica_is_waited_for(run: Any, make_fleet: FleetMaker) -> None:
    """While the router finds no replica the request is kept for `failover.timeout_s`, then refused with 503."""

    async def scenario() -> None:
        async def nobody(call: Submission) -> Outcome:
            await asyncio.sleep(0.05)  # the router waits before it gives up
            raise NoReplicaError("no engine replica can take requests now")

        fleet = await make_fleet(nobody, nobody, silent, failover=Failover(max_attempts=2, timeout_s=1.0))
        fleet.replicas.scripts[2] = says(fleet.ids("ok"))
        assert (await collect(fleet))[0][0] == "ok"
        hopeless = await make_fleet(nobody, failover=Failover(max_attempts=2, timeout_s=0.2))
        with pytest.raises(NoReplicaAvailable) as refused:
            await collect(hopeless)
        assert refused.value.retry_after
        assert len(hopeless.replicas.calls) > 2

    run(scenario())


def test_unforeseen_error_reaches_the_client(run: Any, make_fleet: FleetMaker) -> None:
    """An error that nobody foresaw ends the request instead of letting it wait for ever."""

    async def scenario() -> None:
        fleet = await make_fleet(lost_with(ZeroDivisionError("a bug")))
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(collect(fleet), 5)

    run(scenario())


def test_lost_last_tokens_are_noticed(run: Any, make_fleet: FleetMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that ended although its last tokens never came is a loss, not a stream that hangs."""
    monkeypatch.setattr("app.streams._LAST_DELTA_S", 0.1)

    async def scenario() -> None:
        fleet = await make_fleet(lost_with(Outcome(5, "stop")), silent, over_zmq=False)
        fleet.replicas.scripts[1] = says(fleet.ids("ok"))
        assert (await collect(fleet))[0][0] == "ok"

    run(scenario())


def test_a_call_that_serve_cancels_leaves_nothing(run: Any, make_fleet: FleetMaker) -> None:
    """Serve cancels the calls of a client that left; vLLM's handler may not notice, its request ends all the same."""

    async def scenario() -> None:
        async def cancelled(call: Submission) -> Outcome:
            raise asyncio.CancelledError

        fleet = await make_fleet(cancelled)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(collect(fleet), 5)
        assert await fleet.settle() == {}
        assert len(fleet.replicas.calls) == 1

    run(scenario())
