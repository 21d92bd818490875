"""Sequences that move between replicas while they stream: the client's answer is one, and so are its books."""

from __future__ import annotations

import asyncio
import logging
import random
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from app.config.model import DEFAULT_MODEL_ID
from app.incoming import Incoming, incoming
from app.request_log import RequestLog
from app.streams import Failover
from app.vllm_compat import RequestOutput, tokens_input
from deployments.wire import Outcome

from .scripted_fleet import END, PROMPT, FleetMaker, Script, Submission, collect, lost_with, moves, params, says, silent

TEXT = "Hi 🍕 日本語 — done"


ONCE = Failover(max_attempts=1, timeout_s=5)  # nothing is sent again: what is lost fails


def relay(ids: list[int], cuts: list[int], hop: int = 0) -> Script:
    """A script that makes these tokens and the end on one replica after the other, moving at each cut."""
    if not cuts:
        return says(ids)

    async def script(call: Submission) -> Outcome:
        for token in ids[call.sent : cuts[0]]:
            call.send(token)
            await asyncio.sleep(0)
        return call.move(f"replica-{hop + 1}", relay(ids, cuts[1:], hop + 1))

    return script


@pytest.mark.parametrize("hops", [1, 2, 5])
@pytest.mark.parametrize("over_zmq", [False, True])
def test_moved_answers_equal_unmoved_ones(
    run: Any, make_fleet: FleetMaker, pauses: list[float], hops: int, over_zmq: bool
) -> None:
    """Cut anywhere, inside characters and before the first token too, the text is whole, and nothing is sent again."""

    async def scenario() -> None:
        rng = random.Random(5)
        fleet = await make_fleet(silent, over_zmq=over_zmq, failover=ONCE)
        ids, expected = fleet.ids(TEXT), 0
        for case in range(20):
            cuts = sorted(rng.sample(range(len(ids)), hops))
            fleet.replicas.scripts[:] = [relay(ids, cuts)]
            assert (await collect(fleet, rid=f"r{case}"))[0] == (TEXT, [*ids, END], ("stop", None))
            expected += hops - (cuts[0] == 0)
        assert len(fleet.replicas.calls) == 20
        assert len(fleet.replicas.adopted) == 20 * hops
        assert {run.attached for run in fleet.replicas.adopted} <= {0, 1}  # 0: it had moved on in the same frame
        assert len(pauses) == expected, "each move with tokens before and after it has a pause"
        assert all(0 <= pause < 60 for pause in pauses)

    run(scenario())


def test_the_books_know_of_one_request(run: Any, make_fleet: FleetMaker, tmp_path: Path) -> None:
    """Usage, lengths, rate limits and the request log count each token once, cached ones as the first replica said."""

    class Charge:
        def __init__(self) -> None:
            self.charged: list[int] = []

        def tokens(self, n: int) -> None:
            self.charged.append(n)

    async def scenario() -> None:
        log = RequestLog(str(tmp_path / "log"), 1 << 20)
        fleet = await make_fleet(silent, failover=ONCE, log=log)
        charge: Any = Charge()
        incoming.set(Incoming(1, session=7, charge=charge))

        async def last(call: Submission) -> Outcome:
            call.send(502, 503, cached_tokens=1, cache_creation_tokens=2)
            call.send(504, finish="length")
            return Outcome(call.sent, "length")

        async def first(call: Submission) -> Outcome:
            call.send(500, cached_tokens=2)
            call.send(501)
            return call.move("B", last)

        fleet.replicas.scripts[:] = [first]
        outputs: list[RequestOutput] = [o async for o in fleet.client.generate(tokens_input(PROMPT), params(), "r")]
        assert {output.num_cached_tokens for output in outputs} == {2}
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == 5
        assert charge.charged == [len(PROMPT), 1, 1, 2, 1]
        assert fleet.observed == [(len(PROMPT), 5)]
        log.close()
        assert len((tmp_path / "log").read_text().splitlines()) == 1
        assert '"output_tokens":5' in (tmp_path / "log").read_text()

    run(scenario())


def test_the_newer_replica_may_be_heard_first(run: Any, make_fleet: FleetMaker) -> None:
    """Tokens of the destination that overtake the source's last ones wait for them."""

    async def scenario() -> None:
        fleet = await make_fleet(silent, over_zmq=False, failover=ONCE)
        ids = fleet.ids(TEXT)

        async def overtaken(call: Submission) -> Outcome:
            call.send(ids[0])
            call.sent = 3
            outcome = call.move("B", says(ids))
            await asyncio.sleep(0.02)
            call.send_late(1, ids[1], ids[2])
            return outcome

        fleet.replicas.scripts[:] = [overtaken]
        assert (await collect(fleet))[0] == (TEXT, [*ids, END], ("stop", None))

    run(scenario())


def test_moves_are_no_attempts(run: Any, make_fleet: FleetMaker, failovers: list[str]) -> None:
    """However often it moves, a sequence has as many submissions as before; a loss after moves counts as one."""

    async def scenario() -> None:
        fleet = await make_fleet(silent, failover=Failover(max_attempts=2, timeout_s=5))
        ids = fleet.ids(TEXT)
        dies: Script = lost_with(ActorDiedError())
        for replica in "DCB":
            dies = moves(replica, dies)
        fleet.replicas.scripts[:] = [dies, says(ids)]
        assert (await collect(fleet))[0] == (TEXT, [*ids, END], ("stop", None))
        assert failovers == ["actor_died"]

    run(scenario())


def test_moved_waiting_then_moved_on(run: Any, make_fleet: FleetMaker, pauses: list[float]) -> None:
    """Replicas that had the sequence but made no token of it are no part of the stream, and their moves no pause."""

    async def scenario() -> None:
        fleet = await make_fleet(silent, failover=ONCE)
        ids = fleet.ids(TEXT)
        fleet.replicas.scripts[:] = [moves("B", moves("C", moves("D", says(ids), ids[0])))]
        assert (await collect(fleet))[0] == (TEXT, [*ids, END], ("stop", None))
        assert len(pauses) == 1  # from C to D

    run(scenario())


@pytest.mark.parametrize("told", [False, True])
def test_a_client_that_leaves_ends_the_moved_run(run: Any, make_fleet: FleetMaker, told: bool) -> None:
    """Leaving after a move aborts the sequence where it is now, whether or not the source has said so yet."""

    async def scenario() -> None:
        fleet = await make_fleet(silent, over_zmq=False)

        async def destination(call: Submission) -> Outcome:
            call.send(502)
            return await silent(call)

        async def source(call: Submission) -> Outcome:
            call.send(500, 501)
            outcome = call.move("B", destination)
            return outcome if told else await silent(call)

        fleet.replicas.scripts[:] = [source]
        request = asyncio.create_task(collect(fleet))
        await asyncio.sleep(0.1)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert await fleet.settle() == {}
        assert fleet.replicas.adopted[0].state == "aborted"
        assert fleet.replicas.calls[0].state == ("ended" if told else "aborted")

    run(scenario())


def test_a_stop_string_over_a_move(run: Any, make_fleet: FleetMaker) -> None:
    """A stop string that begins on one replica and ends on another is found, and the run is aborted there."""

    async def scenario() -> None:
        fleet = await make_fleet(silent, failover=ONCE)
        ids = fleet.ids(TEXT)

        async def endless(call: Submission) -> Outcome:
            for token in ids[call.sent :]:
                call.send(token)
                await asyncio.sleep(0.002)
            return await silent(call)

        for cut in range(1, len(ids)):
            fleet.replicas.scripts[:] = [moves("B", endless, *ids[:cut])]
            text, _, reasons = (await collect(fleet, params(stop=["日本"]), rid=f"r{cut}"))[0]
            assert (text, reasons) == ("Hi 🍕 ", ("stop", "日本"))
        assert await fleet.settle() == {}

    run(scenario())


def test_a_move_is_logged_with_its_trace(
    run: Any, make_fleet: FleetMaker, pauses: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """The trace id of a request's `traceparent` is in every submission and in the log lines of moves and fail-overs."""
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    header = f"00-{trace}-00f067aa0ba902b7-01"

    async def scenario() -> None:
        fleet = await make_fleet(silent, over_zmq=False)
        ids = fleet.ids(TEXT)
        fleet.replicas.scripts[:] = [moves("B", lost_with(ActorDiedError(), ids[2]), *ids[:2]), says(ids)]
        body = {"model": DEFAULT_MODEL_ID, "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        answer = await fleet.post("/v1/chat/completions", body, headers={"traceparent": header})
        assert answer.text == TEXT
        assert {(call.submit.trace or {})["traceparent"] for call in fleet.replicas.calls} == {header}
        assert len(fleet.replicas.calls) == 2

    with caplog.at_level(logging.INFO, "ray.serve"):
        run(scenario())
    lines = [record.getMessage() for record in caplog.records]
    (moved,) = [line for line in lines if line.startswith("moved ")]
    (again,) = [line for line in lines if line.startswith("failover ")]
    assert f"trace={trace} epoch=1 hop=1 replica=B delivered=3 pause_ms={pauses[0] * 1e3:.1f}" in moved
    assert f"trace={trace} epoch=1 hop=1 delivered=3 reason=actor_died" in again


@pytest.mark.parametrize("stream", [False, True])
def test_usage_over_http(run: Any, make_fleet: FleetMaker, stream: bool) -> None:
    """Over moves and a fail-over the HTTP answer has the text, finish reason and usage of an undisturbed one."""

    async def scenario() -> None:
        fleet = await make_fleet(silent, over_zmq=False)
        ids = fleet.ids(TEXT)
        body = {"model": DEFAULT_MODEL_ID, "prompt": "Hi", "stream": stream, "n": 2, "temperature": 1.0}
        if stream:
            body["stream_options"] = {"include_usage": True}

        async def answer(*scripts: Script) -> Any:
            fleet.replicas.scripts[:] = scripts
            fleet.replicas.calls.clear()
            answer = await fleet.post("/v1/completions", body)
            assert answer.status == 200
            if not stream:
                whole = answer.json()
                return whole["usage"], [(c["index"], c["text"], c["finish_reason"]) for c in whole["choices"]]
            texts: dict[int, str] = {}
            for event in answer.events[:-1]:
                for choice in event["choices"]:
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            return answer.events[-2]["usage"], texts

        lost = lost_with(ActorDiedError(), ids[4])
        plain = await answer(says(ids))
        assert await answer(relay(ids, [1, 3, 6]), relay(ids, [2]), says(ids)) == plain
        assert await answer(moves("B", lost, *ids[:4]), relay(ids, [2]), relay(ids, [7])) == plain

    run(scenario())
