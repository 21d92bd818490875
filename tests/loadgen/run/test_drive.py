"""The open-loop client against a small server: times kept, outcomes told apart, clients that leave."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest

from loadgen.client import Prompt, StreamingClient
from loadgen.metrics import OUTCOMES, RequestRecord
from loadgen.run.drive import Watch, drive
from loadgen.workloads.workload import Request
from tests.loadgen.run.fake_server import FakeServer


def play(
    server: FakeServer,
    requests: list[Request],
    *,
    drain: float = 30.0,
    watch: Watch | None = None,
    stop: float = -1.0,
    leave: int = 0,
) -> list[RequestRecord]:
    """Drive the requests, each with the text `p<number> x`; stopped after `stop` seconds if that is not negative.

    The server must see `leave` clients go before the end.
    """

    async def go() -> list[RequestRecord]:
        async with server.serving() as url, StreamingClient(url, "m") as client:
            asked = [Prompt(f"p{i} x", r.output_tokens, r.headers, r.body) for i, r in enumerate(requests)]
            seen = watch or Watch(len(requests))
            if stop >= 0:
                asyncio.get_running_loop().call_later(stop, seen.stop)
            records = await drive(client, requests, asked, drain=drain, watch=seen)
            assert await server.until_left(leave)
            return records

    return asyncio.run(go())


def request(due: float = 0.0, tokens: int = 3, **more: Any) -> Request:
    """A request of two words."""
    return Request(due=due, prompt_tokens=2, output_tokens=tokens, **more)


def test_slow_answers_do_not_hold_back_requests() -> None:
    """All requests are open at once though the first has not been answered; each has a record, in their order."""
    server = FakeServer(lambda body, headers: {"pause": 0.5})
    records = play(server, [request(i * 0.02) for i in range(20)])
    assert server.most_open == 20
    assert [r.due for r in records] == pytest.approx([i * 0.02 for i in range(20)])
    assert all(r.sent >= r.due for r in records)
    assert all(r.outcome == "ok" and r.output_len == 3 and r.ttft >= 0.5 for r in records)
    assert records[0].text.startswith("p00 ")


def test_outcomes_are_told_apart() -> None:
    """Good, refused, failed before and after the first token, left by plan, by deadline: each its own outcome."""
    rules: dict[str, Any] = {
        "ok": {},
        "full": {"status": 429, "headers": {"x-tidegate-reason": "queue_full", "Retry-After": "2"}},
        "nobody": {"status": 503},
        "broken": {"status": 500},
        "dies": {"cut": 2},
        "dies at once": {"cut": 0},
        "faults": {"fault": 1},
        "faults at once": {"fault": 0},
        "ends": {"silent": True},
        "stalls": {"stall": 1},
        "slow": {"pause": 0.05},
    }
    server = FakeServer(lambda body, headers: rules[headers["rule"]])
    requests = [request(headers={"rule": name}) for name in rules if name not in ("stalls", "slow")]
    requests += [
        request(headers={"rule": "stalls"}, cancel_after=2.0),
        request(headers={"rule": "stalls"}, deadline=2.0),
        request(headers={"rule": "slow"}, cancel_after=30.0, deadline=60.0),
    ]
    records = play(server, requests, leave=2)
    found = [r.outcome for r in records]
    assert found == [
        *("ok", "shed", "shed", "error", "cut", "error", "cut", "error", "cut"),
        *("cancelled", "unfinished", "ok"),
    ]
    assert set(found) == set(OUTCOMES)
    assert (records[1].reason, records[1].retry_after, records[1].status) == ("queue_full", 2.0, 429)
    assert "engine died" in records[6].error
    assert len(records[4].times) == 2
    assert len(records[9].times) == 1
    assert records[9].error == "cancelled"


def test_nothing_is_waited_for_beyond_the_drain() -> None:
    """What has not ended `drain` seconds after the last request was due is unfinished, and the connection closed."""
    server = FakeServer(lambda body, headers: {"pause": 60.0})
    records = play(server, [request(), request(0.1)], drain=0.2, leave=2)
    assert [r.outcome for r in records] == ["unfinished", "unfinished"]


def test_a_stopped_run_keeps_what_it_has() -> None:
    """Stopping ends open requests as unfinished, sends no more, and keeps those that had ended."""
    server = FakeServer(lambda body, headers: {"pause": float(headers["pause"])})
    requests = [request(headers={"pause": "0"}), request(headers={"pause": "60"}), request(60.0)]
    watch = Watch(3)
    records = play(server, requests, watch=watch, stop=1.5, leave=1)
    assert [r.outcome for r in records] == ["ok", "unfinished"]
    assert watch.ended == Counter(ok=1, unfinished=1)
    assert (watch.sent, watch.open) == (2, 0)


def test_no_server_is_an_error_for_each_request() -> None:
    """A refused connection is recorded, not raised."""

    async def go() -> list[RequestRecord]:
        async with StreamingClient("http://127.0.0.1:9", "m") as client:
            return await drive(client, [request()], [Prompt("x", 1)], drain=5, watch=Watch(1))

    (record,) = asyncio.run(go())
    assert record.outcome == "error"
    assert "Connect" in record.error


def test_a_request_that_cannot_be_sent_is_an_error() -> None:
    """A header that HTTP does not allow ends its own request, not the run."""
    records = play(FakeServer(), [request(headers={"a": "b\nc"}), request()])
    assert [r.outcome for r in records] == ["error", "ok"]


def test_lateness_is_measured() -> None:
    """When the event loop is held up, the requests of that time are sent late, and their waits count from when due."""
    server = FakeServer()
    watch = Watch(2)

    async def go() -> list[RequestRecord]:
        async with server.serving() as url, StreamingClient(url, "m") as client:
            asyncio.get_running_loop().call_later(0.05, time.sleep, 0.3)
            asked = [Prompt("x", 1), Prompt("x", 1)]
            return await drive(client, [request(), request(0.1)], asked, drain=5, watch=watch)

    _, late = asyncio.run(go())
    assert late.sent - late.due > 0.15
    assert late.ttft > late.sent - late.due
    assert 0.15 < watch.lag <= late.sent - late.due


def test_connections_are_used_again() -> None:
    """Requests one after the other go over one connection."""
    server = FakeServer()

    async def go() -> None:
        async with server.serving() as url, StreamingClient(url, "m") as client:
            for _ in range(3):
                assert (await client.ask(Prompt("x", 2), 0.0)).outcome == "ok"

    asyncio.run(go())
    assert len(server.asked) == 3
    assert len(server.peers) == 1
