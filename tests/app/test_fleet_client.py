"""FleetEngineClient over scripted replicas: exact text, exactly-once tokens, bounds, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from app.errors import NoReplicaAvailable, Overloaded, RequestTimeout
from app.incoming import Incoming, incoming
from app.streams import Failover
from app.vllm_compat import RequestOutput, RequestOutputKind, tokens_input
from deployments.routing import NoReplicaError
from deployments.wire import Outcome

from .scripted_fleet import END, PROMPT, FleetMaker, Submission, collect, params, says, silent

TEXT = "Hi 🍕🦄 👩‍👩‍👧‍👦 日本語 ภาษาไทย é naïve — done 中文字符 🏳️‍🌈!"


def test_text_equals_the_tokenizers(run: Any, make_fleet: FleetMaker) -> None:
    """Random UTF-8 heavy texts, cut into deltas of any size, come out as the tokenizer decodes them as a whole."""

    async def scenario() -> None:
        rng = random.Random(3)
        fleet = await make_fleet(silent)
        for case in range(60):
            text = "".join(rng.choices(TEXT, k=rng.randint(1, 60)))
            ids = fleet.ids(text)
            fleet.replicas.scripts[:] = [says(ids, per_delta=rng.randint(1, 5))]
            fleet.replicas.calls.clear()
            got, token_ids, reasons = (await collect(fleet, rid=f"r{case}"))[0]
            assert token_ids == [*ids, END]
            assert got == fleet.tokenizer.decode(ids)
            assert reasons == ("stop", None)
        assert fleet.observed[-1] == (len(PROMPT), len(ids) + 1)

    run(scenario())


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["日本", "🦄 👩", "ไทย é", "字符 🏳", "— done 中"])
def test_stop_string_across_deltas(run: Any, make_fleet: FleetMaker, stop: str, include: bool) -> None:
    """A stop string is found wherever the deltas cut it; the sequence ends there, and its replica is told to abort."""

    async def scenario() -> None:
        for per_delta in (1, 2, 3, 7):
            fleet = await make_fleet(silent)
            ids = fleet.ids(TEXT)

            async def script(call: Submission, ids: list[int] = ids, size: int = per_delta) -> Outcome:
                for start in range(0, len(ids), size):
                    call.send(*ids[start : start + size])
                    await asyncio.sleep(0)
                return await silent(call)  # would go on for ever: only an abort ends it

            fleet.replicas.scripts[:] = [script]
            sampling = params(stop=[stop], include_stop_str_in_output=include)
            got, _, reasons = (await collect(fleet, sampling))[0]
            assert got == TEXT[: TEXT.index(stop)] + (stop if include else "")
            assert reasons == ("stop", stop)
            assert await fleet.settle() == {}
            assert fleet.replicas.calls[0].state == "aborted"

    run(scenario())


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY, RequestOutputKind.CUMULATIVE])
def test_output_kinds(run: Any, make_fleet: FleetMaker, kind: RequestOutputKind) -> None:
    """Streams, whole answers and growing answers end with the same text."""

    async def scenario() -> None:
        fleet = await make_fleet(silent)
        ids = fleet.ids(TEXT)
        fleet.replicas.scripts[:] = [says(ids, per_delta=3)]
        outputs = [o async for o in fleet.client.generate(tokens_input(PROMPT), params(output_kind=kind), "r")]
        whole = "".join(o.outputs[0].text for o in outputs) if kind is RequestOutputKind.DELTA else None
        assert (whole if whole is not None else outputs[-1].outputs[0].text) == TEXT
        assert outputs[-1].finished
        assert len(outputs) == 1 or kind is not RequestOutputKind.FINAL_ONLY

    run(scenario())


def test_tokens_are_taken_exactly_once(run: Any, make_fleet: FleetMaker) -> None:
    """Repeated, skipped and out-of-order deltas, and those of another epoch or stream, change nothing."""

    async def scenario() -> None:
        fleet = await make_fleet(silent)
        ids = fleet.ids(TEXT)

        async def script(call: Submission) -> Outcome:
            rng = random.Random(7)
            position = 0
            while position < len(ids):
                for _ in range(rng.randint(0, 3)):
                    wrong = rng.choice([s for s in range(len(ids) + 5) if s != position])
                    call.send_late(wrong, 999, finish=rng.choice([None, "stop"]))
                    call.send_late(position, 999, epoch=rng.choice([0, 2, 7]), finish="stop")
                size = rng.randint(1, 4)
                piece = ids[position : position + size]
                position += len(piece)
                call.send(*piece, finish="length" if position == len(ids) else None)
                await asyncio.sleep(0)
            call.send_late(len(ids), 999)
            return Outcome(call.sent, "length")

        fleet.replicas.scripts[:] = [script]
        assert (await collect(fleet))[0] == (TEXT, ids, ("length", None))

    run(scenario())


def test_several_sequences(run: Any, make_fleet: FleetMaker) -> None:
    """With n = 3 each sequence gets its own tokens and seed, whatever order they arrive in."""

    async def scenario() -> None:
        fleet = await make_fleet(silent)
        texts = ["one 🍕", "two 日本語 and more", "three"]

        async def script(call: Submission) -> Outcome:
            index = int(call.submit.rid.split("_")[0])
            await asyncio.sleep(0.01 * (2 - index))
            return await says(fleet.ids(texts[index]))(call)

        fleet.replicas.scripts[:] = [script]
        result = await collect(fleet, params(n=3, temperature=1.0, seed=5))
        assert {index: text for index, (text, _, _) in result.items()} == dict(enumerate(texts))
        assert {call.params.seed for call in fleet.replicas.calls} == {5, 6, 7}
        assert {call.params.n for call in fleet.replicas.calls} == {1}

    run(scenario())


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("tokens", [0, 2])
def test_closing_the_stream_aborts_everywhere(run: Any, make_fleet: FleetMaker, n: int, tokens: int) -> None:
    """A client that leaves, before or after its first token, frees streams, tasks and the replicas' sequences."""

    async def scenario() -> None:
        fleet = await make_fleet(silent)

        async def script(call: Submission) -> Outcome:
            call.send(*range(600, 600 + tokens))
            return await silent(call)

        fleet.replicas.scripts[:] = [script if tokens else silent]
        request = asyncio.create_task(collect(fleet, params(n=n, temperature=1.0)))
        await asyncio.sleep(0.05)
        assert fleet.left()["calls"] == n
        assert ("queued" in fleet.left()) == (tokens == 0)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert await fleet.settle() == {}
        assert [call.state for call in fleet.replicas.calls] == ["aborted"] * n

    run(scenario())


def test_abort_by_external_id(run: Any, make_fleet: FleetMaker) -> None:
    """`abort` ends the sequences of the request with that id and spares the others."""

    async def scenario() -> None:
        fleet = await make_fleet(silent)
        one, two = (asyncio.create_task(collect(fleet, rid=rid)) for rid in ("one", "two"))
        await asyncio.sleep(0.02)
        await fleet.client.abort("one")
        assert (await asyncio.wait_for(one, 2))[0][2] == ("abort", None)
        assert not two.done()
        assert fleet.left()["calls"] >= 1
        two.cancel()

    run(scenario())


def test_timeout(run: Any, make_fleet: FleetMaker) -> None:
    """A request that takes longer than the limit is aborted and answered with 504's error, also in mid-stream."""

    async def scenario() -> None:
        async def slow(call: Submission) -> Outcome:
            for token in range(500, 600):
                call.send(token)
                await asyncio.sleep(0.05)
            raise AssertionError

        for script in (silent, slow):
            fleet = await make_fleet(script, timeout_s=0.2)
            with pytest.raises(RequestTimeout, match=r"0\.2 s"):
                await collect(fleet)
            assert await fleet.settle() == {}
            assert fleet.replicas.calls[0].state == "aborted"

    run(scenario())


def test_admission(run: Any, make_fleet: FleetMaker) -> None:
    """Beyond `max_queued` sequences without a token there is 429, without a replica 503, each with a Retry-After."""

    async def scenario() -> None:
        fleet = await make_fleet(silent, max_queued=3)
        waiting = [asyncio.create_task(collect(fleet, rid=f"r{i}")) for i in range(3)]
        await asyncio.sleep(0.02)
        with pytest.raises(Overloaded) as refused:
            fleet.client.check_admission()
        assert 1 <= (refused.value.retry_after or 0) <= 60
        for call in fleet.replicas.calls[:2]:
            call.send(500)
        await asyncio.sleep(0.05)
        fleet.client.check_admission(2)  # two have their first token: they do not count any more
        with pytest.raises(Overloaded):
            fleet.client.check_admission(3)
        fleet.has_replica = False
        with pytest.raises(NoReplicaAvailable) as unavailable:
            fleet.client.check_admission()
        assert unavailable.value.retry_after
        for task in waiting:
            task.cancel()

    run(scenario())


def test_cached_tokens_are_told(run: Any, make_fleet: FleetMaker) -> None:
    """Prompt tokens that the replica found in its prefix cache reach the client's usage."""

    async def scenario() -> None:
        async def script(call: Submission) -> Outcome:
            call.send(500, cached_tokens=2, cache_creation_tokens=1)
            call.send(501, finish="stop")
            return Outcome(2, "stop")

        fleet = await make_fleet(script)
        outputs: list[RequestOutput] = [o async for o in fleet.client.generate(tokens_input(PROMPT), params(), "r")]
        assert outputs[-1].num_cached_tokens == 2

    run(scenario())


def test_nothing_is_left_behind(run: Any, make_fleet: FleetMaker) -> None:
    """1,500 requests of all tiers under random deltas, losses, shedding and cancellations leave nothing behind."""

    async def scenario() -> None:
        rng = random.Random(11)
        failover = Failover(max_attempts=2, timeout_s=0.05)
        fleet = await make_fleet(silent, over_zmq=False, failover=failover, max_queued=9)
        ids = fleet.ids(TEXT)

        async def chaos(call: Submission) -> Outcome:
            for position in range(rng.randint(0, 12)):
                for _ in range(rng.randint(0, 3)):
                    await asyncio.sleep(0)
                event = rng.random()
                if event < 0.05:
                    raise rng.choice([*[ActorDiedError()] * 3, NoReplicaError("none"), ZeroDivisionError("a bug")])
                if event < 0.07:
                    return Outcome(call.sent, fault=rng.choice(["request", "engine"]), message="broken")
                if event < 0.12:
                    late = rng.choice(fleet.replicas.calls)
                    late.send_late(rng.randint(0, 9), 777, finish=rng.choice([None, "stop"]))
                call.send(ids[position % len(ids)])
            if rng.random() < 0.1:
                return await silent(call)
            call.send(500, finish="stop")
            return Outcome(call.sent, "stop")

        fleet.replicas.scripts[:] = [chaos]
        ends: Counter[str] = Counter()

        async def one(i: int) -> None:
            kind = rng.choice([RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
            sampling = params(n=rng.choice([1, 1, 3]), temperature=1.0, stop=[rng.choice("🍕本é")], output_kind=kind)
            incoming.set(Incoming(rng.randrange(4)))
            try:
                await collect(fleet, sampling, f"r{i}")
                ends["finished"] += 1
            except asyncio.CancelledError:
                ends["cancelled"] += 1
                raise
            except Exception as error:
                ends[type(error).__name__] += 1

        for batch in range(150):
            tasks = [asyncio.create_task(one(batch * 10 + i)) for i in range(10)]
            for task in tasks:
                for _ in range(rng.randint(0, 20)):
                    await asyncio.sleep(0)
                if rng.random() < 0.4:
                    task.cancel()
            _, pending = await asyncio.wait(tasks, timeout=0.05)
            for task in pending:  # waits for a silent replica
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert await fleet.settle() == {}
        assert sum(ends.values()) > 1400  # a task cancelled before its first step does not count
        expected = {"finished", "cancelled", "ReplicaLost", "VLLMValidationError", "ZeroDivisionError"}
        expected |= {"Overloaded", "Shed"}
        assert expected <= set(ends), ends
        assert {call.state for call in fleet.replicas.calls} == {"ended", "aborted", "failed"}
        assert any(call.submit.epoch > 1 for call in fleet.replicas.calls)

    run(scenario())
