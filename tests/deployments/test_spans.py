"""Spans that router, replica and moves make: what they say, when they began and ended, what they hang under."""

from __future__ import annotations

import ast
import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode
from vllm.v1.metrics.stats import RequestStateStats

from deployments.route_span import MOST
from deployments.routing import NoReplicaError
from deployments.run_spans import Run, Stats, traced
from deployments.spans import clock
from deployments.wire import Outcome, Submit
from tests.recorded_spans import CLIENT, TRACE, Recorded, hex_of, recording, seconds
from tests.test_imports import imported

from .migration_world import World
from .router_rig import Fleet
from .virtual_loop import run_virtual

ROOT = Path(__file__).parents[2]
UNDER = {"traceparent": f"00-{TRACE}-{CLIENT}-01"}
SUBMIT = Submit("rid", 2, "tcp://one", [1, 2, 3], b"", 0.0, priority=1, trace=UNDER, output=[7])
WHOSE = {
    "tidegate.sequence_id": "rid",
    "tidegate.replica": "r1",
    "tidegate.epoch": 2,
    "tidegate.hop": 0,
    "tidegate.tier": 1,
}


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    with recording() as made:
        yield made


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """Its attributes."""
    return dict(span.attributes or {})


def under(span: ReadableSpan) -> tuple[str, str]:
    """Trace and parent."""
    assert span.parent is not None
    return hex_of(span)[0], f"{span.parent.span_id:016x}"


def times(now: float, **more: Any) -> SimpleNamespace:
    """vLLM's times of a request that began a minute ago: 1 s in the queue, 2 s of prefill, 4 s of decoding."""
    at = now - 60
    figures = {"queued_ts": at, "scheduled_ts": at + 1, "first_token_ts": at + 3, "last_token_ts": at + 7}
    return SimpleNamespace(**{**figures, "num_preemptions": 1, "num_generation_tokens": 5, **more})


async def run_of(
    recorded: Recorded, stats: Any, end: Any, fate: Any = None, submit: Submit = SUBMIT, entries: Any = None
) -> None:
    """A run whose engine gives `stats` with its first token and ends so."""

    async def generate(submit: Submit, entries: Any, emit: Any, run: Run | None = None) -> Outcome:
        assert run is not None
        run.stats, run.cached_tokens = stats, 2
        if isinstance(end, BaseException):
            raise end
        outcome: Outcome = end
        return outcome

    await traced(generate, recorded.spans, "r1", lambda submit: fate)(submit, entries or {}, lambda delta: None)


def test_a_run_from_queue_to_end(recorded: Recorded) -> None:
    """Queue, prefill and decode have the engine's times to the microsecond, adjoin, and say what was done."""
    now = time.monotonic()
    asyncio.run(run_of(recorded, times(now), Outcome(6, "stop")))
    spans = {span.name: span for span in recorded.all()}
    assert list(spans) == ["queue", "prefill", "decode"]
    assert [round(seconds(span), 6) for span in spans.values()] == [1, 2, 4]
    assert spans["queue"].end_time == spans["prefill"].start_time
    assert spans["prefill"].end_time == spans["decode"].start_time
    assert abs((spans["queue"].start_time or 0) / 1e9 - (time.time() - (time.monotonic() - now) - 60)) < 1
    assert {under(span) for span in spans.values()} == {(TRACE, CLIENT)}
    assert attributes(spans["queue"]) == WHOSE
    assert attributes(spans["prefill"]) == {
        **WHOSE,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "tidegate.recomputed_tokens": 1,
    }
    assert attributes(spans["decode"]) == {
        **WHOSE,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.response.finish_reasons": ("stop",),
        "tidegate.preemptions": 1,
        "tidegate.outcome": "finished",
    }


def test_a_run_that_came_with_its_kv(recorded: Recorded) -> None:
    """A sequence that moved here has no prefill: it decodes as soon as it is scheduled. One without KV has."""
    stats, end = times(time.monotonic()), Outcome(6, "length")
    asyncio.run(run_of(recorded, stats, end, entries={"adopt": {"move": "m", "computed": 3}}))
    assert [(span.name, round(seconds(span), 6)) for span in recorded.all()] == [("queue", 1), ("decode", 6)]
    assert attributes(recorded.one("decode"))["tidegate.kv_tokens"] == 3
    asyncio.run(run_of(recorded, stats, end, entries={"adopt": {"move": "m", "computed": 0}}))
    assert len(recorded.named("prefill")) == 1


MOVED = Outcome(4, moved_to="r2", hop=1)
HANDED_BACK = Outcome(1, fault="engine", message="draining")
LOST = Outcome(1, fault="engine", message="engine_dead: it is")


@pytest.mark.parametrize(
    ("begun", "end", "fate", "said", "failed"),
    [
        (True, asyncio.CancelledError(), MOVED, {"outcome": "moved", "destination": "r2"}, None),
        (True, asyncio.CancelledError(), None, {"outcome": "aborted"}, None),
        (True, LOST, None, {"outcome": "failed"}, "engine_dead: it is"),
        (False, asyncio.CancelledError(), MOVED, {"outcome": "moved", "destination": "r2"}, None),
        (False, asyncio.CancelledError(), HANDED_BACK, {"outcome": "failed"}, "draining"),
        (False, LOST, None, {"outcome": "failed"}, "engine_dead: it is"),
    ],
)  # fmt: skip
def test_a_run_that_does_not_finish(
    recorded: Recorded, begun: bool, end: Any, fate: Outcome | None, said: dict[str, str], failed: str | None
) -> None:
    """The last span of a run says how it ended and where it went; one without a token has been in the queue."""

    async def scenario() -> None:
        try:
            await run_of(recorded, times(time.monotonic()) if begun else None, end, fate)
        except asyncio.CancelledError:
            assert isinstance(end, asyncio.CancelledError)

    asyncio.run(scenario())
    last = recorded.all()[-1]
    assert last.name == ("decode" if begun else "queue")
    assert {f"tidegate.{key}": value for key, value in said.items()}.items() <= attributes(last).items()
    assert (last.status.status_code, last.status.description) == (
        (StatusCode.UNSET, None) if failed is None else (StatusCode.ERROR, failed)
    )


def test_runs_of_unsampled_requests(recorded: Recorded) -> None:
    """What the ingress did not record, or sent without a trace, the replica does not record either."""
    for trace in (None, {"traceparent": f"00-{TRACE}-{CLIENT}-00"}):
        submit = Submit("rid", 1, "tcp://one", [1], b"", 0.0, trace=trace)
        asyncio.run(run_of(recorded, times(time.monotonic()), Outcome(6, "stop"), submit=submit))
    assert recorded.all() == []


def test_a_choice_tells_what_the_router_knew(run: Any, recorded: Recorded) -> None:
    """`route` names policy, choice, and each candidate's loads as they stood before this call was added."""

    async def scenario() -> None:
        fleet = Fleet("a", "b")
        fleet.report("a", running=5, waiting=2, queued_tokens=70)
        fleet.report("b", running=1, free_blocks=10)
        assert await fleet.pick(ticket=1, prompt_tokens=10, trace=UNDER) == "b"
        assert await fleet.pick(ticket=2, prompt_tokens=10) == "b"
        span = recorded.one("route")
        assert under(span) == (TRACE, CLIENT)
        assert attributes(span) == {
            "gen_ai.usage.input_tokens": 10,
            "tidegate.tier": 0,
            "tidegate.again": False,
            "tidegate.policy": "least_requests",
            "tidegate.reports_stale": False,
            "tidegate.replica": "b",
            "tidegate.candidates": 2,
            "tidegate.candidates.replica": ("b", "a"),
            "tidegate.candidates.running": (1, 5),
            "tidegate.candidates.waiting": (0, 2),
            "tidegate.candidates.inflight": (0, 0),
            "tidegate.candidates.queued_tokens": (0, 70),
            "tidegate.candidates.free_tokens": (160, 1600),
        }

    run(scenario)


def test_candidates_are_bounded(run: Any, recorded: Recorded) -> None:
    """In a large fleet the loads of a bounded number are told, the chosen one's first."""

    async def scenario() -> None:
        fleet = Fleet(*(f"r{i}" for i in range(40)))
        for i in range(40):
            fleet.report(f"r{i}", running=0 if i == 30 else 3)
        assert await fleet.pick(ticket=1, prompt_tokens=10, trace=UNDER) == "r30"
        told = attributes(recorded.one("route"))
        assert told["tidegate.candidates"] == 40
        assert len(told["tidegate.candidates.replica"]) == len(told["tidegate.candidates.running"]) == MOST
        assert told["tidegate.candidates.replica"][0] == "r30"

    run(scenario)


def test_the_wait_for_a_replica(run: Any, recorded: Recorded) -> None:
    """The span lasts as long as the call waited, also when nobody came; a refused call's next choice says so."""

    async def scenario() -> None:
        fleet = Fleet(wait_s=0.1)
        with pytest.raises(NoReplicaError):
            await fleet.pick(ticket=1, trace=UNDER)
        span = recorded.one("route")
        assert seconds(span) >= 0.1
        assert (span.status.description, attributes(span)["tidegate.candidates"]) == ("no replica", 0)
        fleet.router._wait_for_replica_s = 5.0
        waiting = asyncio.create_task(fleet.pick(ticket=2, trace=UNDER, is_retry=True))
        await asyncio.sleep(0.05)
        fleet.set("late")
        await waiting
        span = recorded.named("route")[-1]
        assert seconds(span) >= 0.05
        assert (attributes(span)["tidegate.replica"], attributes(span)["tidegate.again"]) == ("late", True)

    run(scenario)


def move(scenario: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario in a world of two replicas, to its clean end."""

    async def body() -> None:
        world = World()
        await scenario(world)
        await world.settle()
        world.check()

    run_virtual(body())


@pytest.mark.parametrize("how", ["live", "recompute"])
def test_a_move_is_a_span_of_its_request(recorded: Recorded, how: Any) -> None:
    """`migrate` says who went where and why, what was sent, the pause and the end; without a trace there is none."""

    async def scenario(world: World) -> None:
        for rid, trace in (("traced", UNDER), ("other", None)):
            client = world.ask(rid, 40, 60, "a")
            client.stream.trace = trace
        await asyncio.sleep(0.5)
        for rid in ("traced", "other"):
            await world.give("a", "b", rid=rid, how=how)

    move(scenario)
    span = recorded.one("migrate")
    told = attributes(span)
    assert under(span) == (TRACE, CLIENT)
    assert (told["tidegate.sequence_id"], told["tidegate.replica"], told["tidegate.epoch"]) == ("traced", "a", 1)
    assert told["tidegate.reason"] == "hand"
    if how == "recompute":
        assert (told["tidegate.outcome"], told["tidegate.why"]) == ("recompute", "handed_back")
        assert not {"tidegate.destination", "tidegate.hop", "tidegate.pause_s"} & told.keys()
    else:
        assert (told["tidegate.outcome"], told["tidegate.why"]) == ("done", "moved")
        assert (told["tidegate.destination"], told["tidegate.hop"]) == ("b", 1)
        assert told["tidegate.kv_blocks"] >= 10
        assert told["tidegate.kv_bytes"] > 0
        assert told["tidegate.stages"] >= 1
        assert told["tidegate.pause_s"] > 0
        assert told["tidegate.generated_tokens"] > 0


def test_opentelemetry_is_imported_by_one_module() -> None:
    """All others import it, or that module, for types or when spans are made: not while tracing is off."""
    files = [path for folder in ("app", "deployments") for path in (ROOT / folder).rglob("*.py")]
    names = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for _, name in imported(node)
        if name.startswith(("opentelemetry", "deployments.spans"))
    }
    assert {name.partition(":")[0] for name in names} == {"deployments/spans.py"}


def test_vllms_figures() -> None:
    """Contract: vLLM's figures of a request have the times and counts that spans are made of."""
    assert set(Stats.__annotations__) <= {field.name for field in fields(RequestStateStats)}


def test_the_clock() -> None:
    """Monotonic seconds become the wall clock's nanoseconds, and equal times equal ones."""
    epoch = clock()
    assert abs(epoch(time.monotonic()) - time.time_ns()) < 1e9
    assert epoch(12.5) - epoch(10.0) == 2_500_000_000
