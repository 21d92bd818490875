"""Parts of the client by themselves: SLOs, hooks, comparison of answers, counters, figures, answers on disk."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.metrics import RequestRecord
from loadgen.run import counters, results
from loadgen.run.exact import Reference, compare
from loadgen.run.figures import figures, peaks
from loadgen.run.hooks import Hook, hook
from loadgen.run.slo import Slo, slo_of, slos
from loadgen.workloads.workload import Request


def record(due: float = 0.0, times: tuple[float, ...] = (1.0, 2.0, 3.0), **more: object) -> RequestRecord:
    """A good answer whose tokens came at these times."""
    first, last = (times[0] - due, times[-1] - due) if times else (0.0, 0.0)
    values = {"status": 200, "times": times, "text": "abc"[: len(times)], **more}
    return RequestRecord(due, due, 10, len(times), first, last, **values)  # type: ignore[arg-type]


def sent(*records: RequestRecord, tiers: list[int] | None = None) -> list[tuple[int, Request, RequestRecord]]:
    """The records with requests of the given tiers."""
    which = tiers or [0] * len(records)
    return [
        (i, Request(due=r.due, prompt_tokens=10, output_tokens=3, tier=tier), r)
        for i, (r, tier) in enumerate(zip(records, which, strict=True))
    ]


def test_slo_of_a_tier_or_of_all() -> None:
    """A tier's own bounds go before those of all; without any there are none."""
    known = slos(["ttft=500", "1:ttft=100,tpot=20", "2:e2el=9"])
    assert slo_of(known, 1) == Slo(ttft=100, tpot=20)
    assert slo_of(known, 7) == slo_of(known, None) == Slo(ttft=500)
    assert slo_of({}, 0) is None


def test_bounds_of_one_tier_add_up() -> None:
    """An SLO in two options is one: the second does not wipe out the first."""
    assert slos(["ttft=500", "tpot=50", "1:e2el=9"]) == {None: Slo(ttft=500, tpot=50), 1: Slo(e2el=9)}


def test_slo_bounds() -> None:
    """All bounds must hold, and only for requests that ended well; one token has no time per token."""
    good = record(times=(0.1, 0.2, 0.3))
    assert Slo(ttft=100.1, tpot=100.1, e2el=300.1).met(good)
    assert not Slo(ttft=99).met(good)
    assert not Slo(tpot=99).met(good)
    assert not Slo(e2el=299).met(good)
    assert Slo(tpot=1).met(record(times=(5.0,)))
    assert not Slo().met(replace(good, error="cut"))
    assert Slo().met(good)


@pytest.mark.parametrize("text", ["", "ttft", "ttft=x", "ttft=-1", "ttft=nan", "a:ttft=1", "wait=1", "0:1:ttft=1"])
def test_wrong_slos_are_refused(text: str) -> None:
    """What is no bound is named."""
    with pytest.raises(ValueError, match="slo: "):
        slos([text])


def test_hooks_are_read() -> None:
    """Seconds, milliseconds, minutes; the command keeps its colons."""
    assert hook("20s:kill -9 1") == Hook(20.0, "kill -9 1")
    assert hook("1.5:echo a:b") == Hook(1.5, "echo a:b")
    assert hook("250ms: x") == Hook(0.25, "x")
    assert hook("2m:x").at == 120.0
    for text in ("kill", "20h:x", "-3s:x", "5s:"):
        with pytest.raises(ValueError, match="TIME:COMMAND"):
            hook(text)


@pytest.mark.parametrize(
    ("record", "reference", "kind"),
    [
        (record(), Reference("abc", (), True), "equal"),
        (record(), Reference("abd", (), True), "different"),
        (record(), Reference("abcd", (), True), "different"),
        (record(), Reference("abxd", (), False), "different"),
        (record(), Reference("ab", (), False), "prefix"),
        (record(), Reference("abcd", (), False), "prefix"),
        (record(error="cut"), Reference("abcdef", (), True), "prefix"),
        (record(error="cut"), Reference("abxdef", (), True), "different"),
        (record(token_ids=(1, 2)), Reference("abc", (1, 2), True), "equal"),
        (record(token_ids=(1, 2)), Reference("abc", (1, 3), True), "different"),
        (record(token_ids=(1, 2)), Reference("abc", (), True), "equal"),
        (record(times=()), Reference("abc", (), True), "unknown"),
        (record(), Reference("", (), False), "unknown"),
    ],
)
def test_comparison_of_answers(record: RequestRecord, reference: Reference, kind: str) -> None:
    """Whole answers must be equal, one that broke off must be a beginning; by token ids where both have them."""
    found = compare([(4, record)], {4: reference})
    assert found[kind] == 1
    assert found["equal"] + found["prefix"] + found["different"] + found["unknown"] == 1
    assert found["compared"] == 1 - found["unknown"]
    assert [f["request"] for f in found["first"]] == ([4] if kind == "different" else [])


def test_a_request_without_reference_is_unknown() -> None:
    """A request that the earlier run did not send is counted apart."""
    assert compare([(0, record())], {})["unknown"] == 1


PAGE = """# HELP vllm:num_preemptions_total x
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
vllm:num_preemptions_total{engine="1",model_name="m"} 3.0
vllm:num_preemptions_created{engine="0"} 1.7e+09
vllm:e2e_request_latency_seconds_bucket{le="0.3"} 5
ray_tidegate_migrations_total{reason="tier",outcome="done"} 4
ray_tidegate_pause_seconds_sum 3
process_cpu_seconds_total 9
broken line
"""


def test_counters_of_a_page() -> None:
    """Preemptions and the fleet's counters are summed over labels; all else is left out."""
    assert counters.parse(PAGE) == {"vllm:num_preemptions_total": 5.0, "ray_tidegate_migrations_total": 4.0}


def test_pages_of_counters(tmp_path: Path) -> None:
    """A URL is itself; Ray's list for Prometheus stands for the pages of its nodes, which are some seconds late."""
    listed = tmp_path / "targets.json"
    listed.write_text('[{"labels": {"job": "ray"}, "targets": ["10.0.0.1:99", "10.0.0.2:98"]}]')
    assert counters.pages(["http://h:1/metrics"]) == (["http://h:1/metrics"], 0.0)
    urls, late = counters.pages([str(listed), "https://h/m"])
    assert urls == ["http://10.0.0.1:99/metrics", "http://10.0.0.2:98/metrics", "https://h/m"]
    assert late > 10
    for bad in ("nothing.json", str(tmp_path), "h:1/metrics"):
        with pytest.raises(ValueError, match="metrics-url"):
            counters.pages([bad])


def test_differences_of_counters() -> None:
    """What was counted between; a counter that began anew counts as 0, and without two pages there is nothing."""
    assert counters.difference({"a": 2.0, "b": 5.0}, {"a": 4.0, "b": 1.0, "c": 3.0}) == {"a": 2.0, "b": 0.0, "c": 3.0}
    assert counters.difference(None, {"a": 1.0}) is None
    assert counters.difference({"a": 1.0}, None) is None


def test_figures_of_a_run_and_its_tiers() -> None:
    """Rates of a tier are over the whole run's seconds, waits are its own, lateness and burstiness are of all."""
    late = replace(record(2.0, (4.0, 5.0)), sent=2.5)
    found = figures(sent(record(), late, record(0.5, (), error="no", status=429), tiers=[0, 1, 1]), {})
    assert found["duration"] == 5.0
    assert found["request_throughput"] == pytest.approx(2 / 5)
    assert found["tiers"]["0"]["request_throughput"] == pytest.approx(1 / 5)
    assert found["tiers"]["1"]["outcomes"]["shed"] == 1
    assert found["tiers"]["1"]["mean_ttft_ms"] == pytest.approx(2000)
    assert found["mean_itl_ms"] == pytest.approx(1000)
    assert found["std_ttft_ms"] == pytest.approx(500)
    assert found["lag"]["max_s"] == 0.5
    assert found["lag"]["client_was_late"]
    assert found["arrivals"]["requests"] == 3
    assert found["request_goodput"] is None


def test_figures_of_no_request() -> None:
    """A run in which nothing was sent has figures, none of them a number that was not measured."""
    found = figures([], {None: Slo(ttft=1)})
    assert found["asked"] == 0
    assert found["request_goodput"] == 0.0
    assert found["within_slo"] is None
    assert math.isnan(found["mean_ttft_ms"])


def test_peaks() -> None:
    """Most pieces in a second and most requests open in one, of those that ended well."""
    a, b = record(0.0, (0.5, 0.6, 2.5)), record(0.9, (1.1, 1.2, 1.3))
    assert peaks([a, b, record(1.0, (1.5,), error="cut")]) == (3.0, 2)
    assert peaks([]) == (0.0, 0)


records = st.builds(
    RequestRecord,
    due=st.floats(0, 1e4).map(lambda t: round(t, 3)),
    sent=st.floats(0, 1e4).map(lambda t: round(t, 3)),
    prompt_len=st.integers(0, 99),
    output_len=st.integers(0, 99),
    ttft=st.just(0.0),
    latency=st.just(0.0),
    error=st.sampled_from(["", "status 500", "cut"]),
    status=st.sampled_from([0, 200, 429, 500]),
    reason=st.sampled_from(["", "queue_full"]),
    times=st.lists(st.floats(0, 1e4).map(lambda t: round(t, 3)), max_size=4).map(lambda t: tuple(sorted(t))),
    text=st.text(max_size=9),
    token_ids=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    left=st.sampled_from(["", "cancelled", "unfinished"]),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(records, max_size=5))
def test_answers_survive_the_disk(tmp_path_factory: pytest.TempPathFactory, made: list[RequestRecord]) -> None:
    """What is written is read back, with the waits that follow from its times, and is its own equal as a reference."""
    made = [
        replace(r, ttft=r.times[0] - r.due if r.times else 0.0, latency=r.times[-1] - r.due if r.times else 0.0)
        for r in made
    ]
    folder = tmp_path_factory.mktemp("r")
    results.write_answers(folder, "digest", sent(*made))
    head, lines = results.read_answers(folder)
    assert head.requests == len(made)
    assert [line.record() for line in lines] == made
    assert [line.outcome for line in lines] == [r.outcome for r in made]
    compared = compare(list(enumerate(made)), results.read_reference(folder, "digest"))
    assert compared["different"] == 0


@pytest.mark.parametrize("change", [lambda b: b"", lambda b: b[:-20], lambda b: b.replace(b'"run":1', b'"run":2')])
def test_broken_answer_files_are_named(change: object, tmp_path: Path) -> None:
    """An empty, cut or foreign file is an error with its path."""
    results.write_answers(tmp_path, "digest", sent(record(), record()))
    path = tmp_path / results.ANSWERS
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(ValueError, match=results.ANSWERS):
        results.read_answers(tmp_path)
