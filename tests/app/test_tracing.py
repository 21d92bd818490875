"""Spans of the ingress: what a request's trace says, how it joins the client's, and that it costs nothing when off."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode
from ray.exceptions import ActorDiedError

from app.config.model import DEFAULT_MODEL_ID
from app.keys import new_key
from app.streams import Failover
from deployments import tracing
from deployments.routing import NoReplicaError
from deployments.settings import TracingSettings
from deployments.spans import EXPORT_LOG, Spans
from tests.recorded_spans import CLIENT, TRACE, Recorded, hex_of, recording, seconds, traceparent

from .scripted_fleet import FleetMaker, Submission, lost_with, moves, says, silent

TEXT = "Rome is the capital of Italy"
COMPLETIONS = "/v1/completions"
BODY = {"model": DEFAULT_MODEL_ID, "prompt": "A secret prompt", "max_tokens": 20}
SENT = {"traceparent": f"00-{TRACE}-{CLIENT}-01", "tracestate": "vendor=value"}


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    with recording() as made:
        yield made


def test_a_request_joins_its_clients_trace(run: Any, make_fleet: FleetMaker, recorded: Recorded) -> None:
    """`ingress` is a child of the client's span, and what the replica records a child of `ingress`."""

    async def scenario() -> None:
        fleet = await make_fleet(silent)
        fleet.replicas.scripts[:] = [says(fleet.ids(TEXT))]
        answer = await fleet.post(COMPLETIONS, BODY, headers={**SENT, "x-request-id": "mine"})
        assert answer.status == 200
        span = recorded.one("ingress")
        assert span.kind is SpanKind.SERVER
        assert span.parent is not None
        assert (hex_of(span)[0], f"{span.parent.span_id:016x}") == (TRACE, CLIENT)
        (call,) = fleet.replicas.calls
        assert call.submit.trace == {"traceparent": traceparent(span), "tracestate": "vendor=value"}
        first = span.attributes["gen_ai.response.time_to_first_chunk"]  # type: ignore[index]
        assert 0 < first < seconds(span)  # type: ignore[operator]
        assert dict(span.attributes or {}) == {
            "http.request.method": "POST",
            "http.route": COMPLETIONS,
            "url.path": COMPLETIONS,
            "http.response.status_code": 200,
            "tidegate.request_id": "mine",
            "tidegate.tier": "standard",
            "tidegate.outcome": "finished",
            "gen_ai.request.model": DEFAULT_MODEL_ID,
            "gen_ai.usage.input_tokens": len(call.submit.prompt),
            "gen_ai.usage.output_tokens": len(fleet.ids(TEXT)) + 1,
            "gen_ai.response.time_to_first_chunk": first,
        }

    run(scenario())


@pytest.mark.parametrize("headers", [{}, {"traceparent": "nonsense"}, {"traceparent": f"00-{'0' * 32}-{CLIENT}-01"}])
def test_without_a_valid_parent_a_trace_begins(
    run: Any, make_fleet: FleetMaker, recorded: Recorded, headers: dict[str, str]
) -> None:
    """A request whose client sends no trace context, or none that the standard allows, is a trace of its own."""

    async def scenario() -> None:
        fleet = await make_fleet(says([504]))
        assert (await fleet.post(COMPLETIONS, BODY, headers=headers)).status == 200
        span = recorded.one("ingress")
        assert span.parent is None
        (call,) = fleet.replicas.calls
        assert call.submit.trace == {"traceparent": traceparent(span)}

    run(scenario())


@pytest.mark.parametrize(("ratio", "flag", "recorded"), [(0.0, "01", 1), (0.0, None, 0), (1.0, "00", 0)])
def test_sampling(run: Any, make_fleet: FleetMaker, ratio: float, flag: str | None, recorded: int) -> None:
    """The client's decision holds, else `sample_ratio`; the trace id goes on with the request in any case."""

    async def scenario() -> None:
        fleet = await make_fleet(says([504]))
        headers = {} if flag is None else {"traceparent": f"00-{TRACE}-{CLIENT}-{flag}"}
        with recording(ratio) as made:
            assert (await fleet.post(COMPLETIONS, BODY, headers=headers)).status == 200
            assert len(made.all()) == recorded
        (call,) = fleet.replicas.calls
        _, trace_id, _, flags = (call.submit.trace or {})["traceparent"].split("-")
        assert int(flags, 16) & 1 == recorded
        assert flag is None or trace_id == TRACE

    run(scenario())


def test_a_lost_sequence_shows_its_resumption(run: Any, make_fleet: FleetMaker, recorded: Recorded) -> None:
    """Each further submission has a span `resume` from the loss to the next token, and its replica's hang under it."""

    async def scenario() -> None:
        fleet = await make_fleet(silent, over_zmq=False)
        ids = fleet.ids(TEXT)

        async def slowly(call: Submission) -> Any:
            await asyncio.sleep(0.05)
            call.send(ids[2])
            await asyncio.sleep(0.1)
            return await says(ids)(call)

        fleet.replicas.scripts[:] = [lost_with(ActorDiedError(), *ids[:2]), lost_with(ActorDiedError()), slowly]
        assert (await fleet.post(COMPLETIONS, BODY)).status == 200
        ingress, (hopeless, good) = recorded.one("ingress"), recorded.named("resume")
        assert recorded.tree() == [["ingress", ["resume"], ["resume"]]]
        assert [call.submit.trace for call in fleet.replicas.calls] == [
            {"traceparent": traceparent(span)} for span in (ingress, hopeless, good)
        ]
        silences = [span.attributes["tidegate.silent_s"] for span in (hopeless, good)]  # type: ignore[index]
        assert 0 <= silences[0] < silences[1]  # type: ignore[operator]
        assert dict(good.attributes or {}) == {
            "tidegate.sequence_id": fleet.replicas.calls[0].submit.rid,
            "tidegate.epoch": 3,
            "tidegate.cause": "actor_died",
            "tidegate.attempt": 2,
            "tidegate.delivered_tokens": 2,
            "tidegate.silent_s": silences[1],
        }
        assert hopeless.status.status_code is StatusCode.ERROR
        assert good.status.status_code is StatusCode.UNSET
        assert seconds(good) >= 0.05
        assert (good.end_time or 0) + 0.1e9 <= (ingress.end_time or 0)
        assert ingress.status.status_code is StatusCode.UNSET

    run(scenario())


def test_a_request_that_nobody_can_finish(run: Any, make_fleet: FleetMaker, recorded: Recorded) -> None:
    """503 is a failed span with the error's type; a cut stream is one too, although its status is 200."""

    async def scenario() -> None:
        failover = Failover(max_attempts=2, timeout_s=5)
        refusing = await make_fleet(lost_with(NoReplicaError("none")), failover=Failover(2, 0.01))
        assert (await refusing.post(COMPLETIONS, BODY)).status == 503
        span = recorded.one("ingress")
        attributes = dict(span.attributes or {})
        assert span.status.status_code is StatusCode.ERROR
        assert (attributes["http.response.status_code"], attributes["error.type"]) == (503, "no_replica")
        cutting = await make_fleet(lost_with(ActorDiedError(), 504), lost_with(ActorDiedError()), failover=failover)
        answer = await cutting.post(COMPLETIONS, {**BODY, "stream": True})
        assert answer.status == 200
        attributes = dict(recorded.named("ingress")[-1].attributes or {})
        assert recorded.named("ingress")[-1].status.status_code is StatusCode.ERROR
        assert (attributes["tidegate.outcome"], attributes["error.type"]) == ("failed", "failed")
        assert attributes["gen_ai.usage.output_tokens"] == 1

    run(scenario())


def test_what_the_client_did_wrong_is_no_failure(run: Any, make_fleet: FleetMaker, recorded: Recorded) -> None:
    """Refusals have their status and reason, and no error; what is not the API, and probes, have no span."""

    async def scenario() -> None:
        fleet = await make_fleet(says([504]))
        assert (await fleet.post(COMPLETIONS, {**BODY, "max_tokens": -1})).status == 400
        assert (await fleet.post("/v1/models", {})).status == 405
        assert (await fleet.post("/secrets", {})).status == 404
        assert (await fleet.post("/health/ready", {})).status == 405
        told = [(span.attributes or {}) for span in recorded.all()]
        assert [(t["http.route"], t["http.response.status_code"]) for t in told] == [
            (COMPLETIONS, 400),
            ("/v1/models", 405),
        ]
        assert {span.status.status_code for span in recorded.all()} == {StatusCode.UNSET}

    run(scenario())


def test_one_request_of_several_sequences(run: Any, make_fleet: FleetMaker, recorded: Recorded) -> None:
    """The prompt of n sequences counts once and their tokens all; sequences that move keep their trace."""

    async def scenario() -> None:
        fleet = await make_fleet(moves("other", says([504, 3575]), 504))
        answer = await fleet.post(COMPLETIONS, {**BODY, "n": 2, "temperature": 1.0})
        assert answer.status == 200
        attributes = dict(recorded.one("ingress").attributes or {})
        first, second = fleet.replicas.calls
        assert first.submit.trace == second.submit.trace
        assert attributes["gen_ai.usage.input_tokens"] == len(first.submit.prompt)
        assert attributes["gen_ai.usage.output_tokens"] == 6

    run(scenario())


def test_a_client_that_leaves(run: Any, make_fleet: FleetMaker, recorded: Recorded) -> None:
    """A request that its client gave up has ended, aborted, and is no failure."""

    async def scenario() -> None:
        fleet = await make_fleet(silent)
        leave = asyncio.Event()
        asked = asyncio.create_task(fleet.post(COMPLETIONS, {**BODY, "stream": True}, leave=leave))
        while not fleet.replicas.calls:
            await asyncio.sleep(0.005)
        leave.set()
        await asked
        await fleet.settle()
        span = recorded.one("ingress")
        assert (span.attributes or {})["tidegate.outcome"] == "aborted"
        assert span.status.status_code is StatusCode.UNSET

    run(scenario())


def test_calls_by_python_handle(run: Any, make_fleet: FleetMaker, recorded: Recorded) -> None:
    """What comes by a Python handle is a trace too, also of several prompts."""

    async def scenario() -> None:
        fleet = await make_fleet(says([504]))
        await (await fleet.python()).complete({**BODY, "prompt": ["one", "two"]})
        span = recorded.one("ingress")
        attributes = dict(span.attributes or {})
        assert (attributes["tidegate.outcome"], attributes["gen_ai.usage.output_tokens"]) == ("finished", 4)
        assert attributes["gen_ai.usage.input_tokens"] == sum(len(call.submit.prompt) for call in fleet.replicas.calls)
        assert [call.submit.trace for call in fleet.replicas.calls] == [{"traceparent": traceparent(span)}] * 2

    run(scenario())


def test_no_secrets_in_spans(run: Any, make_fleet: FleetMaker, recorded: Recorded) -> None:
    """Neither prompts nor answers nor keys are recorded, also not of a request that failed; the tenant is."""

    async def scenario() -> None:
        key, entry = new_key("blue")
        fleet = await make_fleet(silent, keys=[entry])
        ids = fleet.ids(TEXT)
        fleet.replicas.scripts[:] = [lost_with(ActorDiedError(), *ids[:2]), says(ids)]
        headers = {"authorization": f"Bearer {key}"}
        assert (await fleet.post(COMPLETIONS, BODY, headers=headers)).status == 200
        assert (await fleet.post(COMPLETIONS, {**BODY, "user": {"no": "text"}}, headers=headers)).status == 400
        text = recorded.text()
        assert '"tidegate.tenant": "blue"' in text
        assert not [secret for secret in ("secret prompt", "Rome", "capital", key, entry.hash) if secret in text]

    run(scenario())


def test_off_is_off(run: Any, make_fleet: FleetMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tracing nothing is made or imported for a request, and a client's headers go on as they came."""

    async def scenario() -> None:
        fleet = await make_fleet(lost_with(ActorDiedError()), says([504]))
        assert tracing.current() is None
        assert (await fleet.post(COMPLETIONS, BODY, headers=SENT)).status == 200
        assert [call.submit.trace for call in fleet.replicas.calls] == [SENT, SENT]
        assert (await fleet.post(COMPLETIONS, BODY)).status == 200
        assert fleet.replicas.calls[-1].submit.trace is None

    monkeypatch.setitem(sys.modules, "deployments.spans", None)  # importing it fails
    run(scenario())


class Stuck(SpanExporter):
    """A collector that answers when it is told to."""

    def __init__(self) -> None:
        self.asked, self.answers = threading.Event(), threading.Event()

    def export(self, spans: Any) -> SpanExportResult:
        self.asked.set()
        self.answers.wait(120)
        return SpanExportResult.FAILURE


def test_a_stuck_collector_delays_nobody(run: Any, make_fleet: FleetMaker) -> None:
    """While an export hangs requests are answered, and the end of the process waits only as long as it was told to."""

    async def scenario() -> None:
        fleet = await make_fleet(says([504]))
        for _ in range(5):
            assert (await fleet.post(COMPLETIONS, BODY)).status == 200

    stuck = Stuck()
    spans = Spans(TracingSettings("console"), "Test", "test", stuck)
    tracing.use(spans)
    try:
        for _ in range(600):  # a whole batch is sent at once
            spans.start("filler", None, {}).end()
        assert stuck.asked.wait(10)
        run(scenario())
        started = time.monotonic()
        tracing.stop(0.2)
        assert 0.2 <= time.monotonic() - started < 10
        assert not stuck.answers.is_set()
    finally:
        tracing.stop(0.0)
        stuck.answers.set()


def test_a_dead_collector_harms_nobody(
    run: Any, make_fleet: FleetMaker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With nobody at the endpoint requests are answered and the log has one line about it, not one for each try."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}/v1/traces"
        monkeypatch.setattr(logging.getLogger(EXPORT_LOG), "filters", [])  # those of other tests
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
        tracing.start(TracingSettings("otlp", endpoint), "Test", "test")

        async def scenario() -> None:
            fleet = await make_fleet(says([504]))
            for _ in range(10):
                assert (await fleet.post(COMPLETIONS, BODY)).status == 200
                await asyncio.sleep(0.05)

        try:
            run(scenario())
        finally:
            tracing.stop(1.0)
    lines = [record for record in caplog.records if record.name.startswith("opentelemetry")]
    assert len(lines) == 1, [line.getMessage() for line in lines]
