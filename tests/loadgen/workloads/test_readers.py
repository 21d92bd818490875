"""Readers of traces: what they take from a row, and that no bad row is lost in silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.workloads import readers
from loadgen.workloads.arrival_models import arrival_model
from loadgen.workloads.rows import BadRow, BadTrace
from loadgen.workloads.workload import Request, describe

TRACES = Path(__file__).parents[4] / "shared" / "workloads"

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,API log
"""
MOONCAKE: list[dict[str, Any]] = [
    {"timestamp": 1000, "input_length": 1025, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 4000, "input_length": 1024, "output_length": 7, "hash_ids": [0, 1]},
]
SHAREGPT: list[dict[str, Any]] = [
    {"id": "a", "conversations": [{"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 80}]},
    {"id": "b", "conversations": [{"from": "user", "value": "hi"}, {"from": "assistant", "value": "ho"}]},
]
EVALSCOPE: list[dict[str, Any]] = [
    {
        "timestamp": "2026-01-01T00:00:01Z",
        "body": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
        "headers": {"X-Vllm-Priority": "2", "X-Session-ID": "s", "Authorization": "Bearer secret"},
        "request_id": "r1",
    },
    {"timestamp": 1767225603.5, "body": '{"prompt": "once", "priority": 0}', "completion_tokens": 4},
]


def lines(rows: list[dict[str, Any]]) -> str:
    """JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


FILES = {
    "azure": AZURE,
    "burstgpt": BURSTGPT,
    "mooncake": lines(MOONCAKE),
    "sharegpt": json.dumps(SHAREGPT),
    "evalscope": lines(EVALSCOPE),
}


@pytest.fixture
def trace(tmp_path: Path) -> Callable[[str | bytes], Path]:
    """A file with this content."""

    def write(content: str | bytes) -> Path:
        path = tmp_path / "trace"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def test_every_format_is_tried() -> None:
    """The examples of these tests cover all formats."""
    assert FILES.keys() == readers.FORMATS.keys()


@pytest.mark.parametrize("kind", FILES)
def test_a_format_is_found_by_its_content(kind: str, trace: Callable[[str | bytes], Path]) -> None:
    """Without a name the format is recognised; two good rows are two requests, the first at second 0."""
    path = trace(FILES[kind])
    assert readers.kind_of(path) == kind
    workload = readers.read(path)
    assert len(workload.requests) == 2
    assert workload.requests[0].due == 0
    assert workload.about["read"] == {
        "file": "trace",
        "format": kind,
        "rows": 2,
        "bad_rows": 0,
        "bad": [],
        "out_of_order": 0,
    }


def test_azure_rows(trace: Callable[[str | bytes], Path]) -> None:
    """Times to the microsecond, with or without a zone; lengths as recorded."""
    second = readers.read(trace(AZURE)).requests[1]
    assert (second.due, second.prompt_tokens, second.output_tokens) == (pytest.approx(4.314579), 396, 109)
    zoned = AZURE.replace("6805900", "6805900+00:00").replace("9951690", "9951690+00:00")
    assert readers.read(trace(zoned)).requests[1].due == pytest.approx(4.314579)


def test_burstgpt_rows(trace: Callable[[str | bytes], Path]) -> None:
    """Times, lengths and, in newer files, the session; failed requests are bad rows."""
    second = readers.read(trace(BURSTGPT)).requests[1]
    assert (second.due, second.prompt_tokens, second.output_tokens) == (40, 1087, 230)
    newer = "Timestamp,Session ID,Model,Request tokens,Response tokens,Total tokens,Log Type\n1,s1,G,5,6,11,API log\n"
    assert readers.read(trace(newer)).requests[0].session == "s1"
    with pytest.raises(BadTrace, match="line 2: Response tokens is 0: the request failed"):
        readers.read(trace(BURSTGPT.replace(",18,", ",0,")))


def test_mooncake_rows(trace: Callable[[str | bytes], Path]) -> None:
    """Milliseconds become seconds, hash ids blocks of 512 tokens; equal leading ids are a shared prefix."""
    workload = readers.read(trace(lines(MOONCAKE)))
    assert [r.due for r in workload.requests] == [0, 3]
    assert [r.blocks for r in workload.requests] == [(0, 1, 2), (0, 1)]
    assert workload.block_tokens == 512
    assert describe(workload)["block_hit_share"] == pytest.approx(2 / 5)
    small = workload.scaled(2048)
    assert [r.prompt_tokens for r in small.requests] == [16, 16]
    assert small.block_tokens == 8
    assert [r.blocks for r in small.requests] == [(0, 1), (0, 1)]


def test_sharegpt_rows(trace: Callable[[str | bytes], Path]) -> None:
    """First question and answer; lengths by the counter given, else a fourth of the characters; not scalable."""
    workload = readers.read(trace(json.dumps(SHAREGPT)))
    first = workload.requests[0]
    assert (first.text, first.prompt_tokens, first.output_tokens, first.due) == ("x" * 40, 10, 20, 0)
    counted = readers.read(trace(json.dumps(SHAREGPT)), count=len).requests[0]
    assert (counted.prompt_tokens, counted.output_tokens) == (40, 80)
    with pytest.raises(ValueError, match="window"):
        workload.scaled(100)


def test_evalscope_rows(trace: Callable[[str | bytes], Path]) -> None:
    """Body without model, headers without keys, tier, session and answer length; dates and seconds both."""
    first, second = readers.read(trace(lines(EVALSCOPE))).requests
    assert (first.tier, first.session, first.output_tokens) == (2, "s", 9)
    assert "model" not in first.body
    assert "Authorization" not in first.headers
    assert (second.due, second.tier, second.output_tokens) == (2.5, 0, 4)
    assert second.body["prompt"] == "once"


@pytest.mark.parametrize(
    ("kind", "content", "complaint"),
    [
        ("azure", AZURE.replace("374", "many"), "line 2: ContextTokens is 'many'"),
        ("azure", AZURE.replace("374", "-4"), "line 2: ContextTokens is -4"),
        ("azure", AZURE.replace("374", "1_000"), "line 2: ContextTokens is '1_000'"),
        ("azure", AZURE.replace("374,44", "374"), "line 2: 2 columns instead of 3"),
        ("azure", AZURE.replace("2023-11-16 18:15:50", "yesterday"), "line 3: TIMESTAMP is 'yesterday"),
        ("azure", AZURE + "\x00,1,2\n", "line 4"),
        ("burstgpt", BURSTGPT.replace("45,", "nan,"), "line 3: Timestamp is nan"),
        ("mooncake", FILES["mooncake"] + '{"timestamp": 1', "line 3: not JSON"),
        ("mooncake", FILES["mooncake"] + "[1]\n", "line 3: not a JSON object"),
        ("mooncake", FILES["mooncake"].replace("[0, 1]", "[0, -1]"), "line 2: hash_ids"),
        ("mooncake", FILES["mooncake"].replace("[0, 1]", "[0, 1, 7]"), "line 2: hash_ids: 3 for 1024 tokens"),
        ("mooncake", FILES["mooncake"].replace("1025", "true"), "line 1: input_length is True"),
        ("sharegpt", json.dumps([SHAREGPT[0], {"conversations": []}]), "conversation 2: no `conversations`"),
        (
            "sharegpt",
            json.dumps([SHAREGPT[0], {"conversations": SHAREGPT[0]["conversations"][::-1]}]),
            "conversation 2: begins",
        ),
        ("evalscope", FILES["evalscope"].replace('"prompt', '"promt').replace('\\"prompt', '\\"promt'), "line 2: body"),
        ("evalscope", FILES["evalscope"].replace("2026-01-01T00:00:01Z", "soon"), "line 1: timestamp is 'soon'"),
    ],
)
def test_bad_rows_are_named(kind: str, content: str, complaint: str, trace: Callable[[str | bytes], Path]) -> None:
    """A row that cannot be used is an error with its line; with `allowed` it is left out and reported instead."""
    path = trace(content)
    with pytest.raises(BadTrace) as raised:
        readers.read(path, kind)
    assert complaint in str(raised.value)
    lenient = readers.read(path, kind, allowed=1.0)
    assert lenient.about["read"]["bad_rows"] == 1
    assert complaint in lenient.about["read"]["bad"][0]
    assert len(lenient.requests) == lenient.about["read"]["rows"] - 1


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "there is nothing in it"),
        ("\n \n", "there is nothing in it"),
        ('{"body":' + "[" * 100_000 + "]" * 100_000 + "}\n", "looks like no trace"),
        ("[" * 100_000 + "]" * 100_000, "not JSON"),
        ("a,b\n1,2\n", "looks like no trace"),
        ("[1, 2", "not JSON"),
        ("[1, 2]", "2 of 2 rows cannot be used"),
        ("[]", "no request in it"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request in it"),
        (b"\xff\xfe\x00", "looks like no trace"),
    ],
)
def test_files_that_are_no_trace(content: str | bytes, complaint: str, trace: Callable[[str | bytes], Path]) -> None:
    """An empty, cut or foreign file is an error that says so, never an empty workload."""
    with pytest.raises(BadTrace, match=complaint):
        readers.read(trace(content), allowed=0.5)


def test_missing_columns_are_named(trace: Callable[[str | bytes], Path]) -> None:
    """A CSV without the format's columns is refused with their names."""
    with pytest.raises(ValueError, match="no column ContextTokens"):
        readers.read(trace(AZURE.replace("ContextTokens", "Tokens")), "azure")


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(["azure", "burstgpt", "mooncake", "evalscope"]),
    junk=st.lists(
        st.one_of(
            st.binary(max_size=30),
            st.text(max_size=30).map(str.encode),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
                max_leaves=5,
            ).map(lambda value: json.dumps(value).encode()),
            st.fixed_dictionaries(
                {},
                optional={
                    name: st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just([])
                    for name in ("timestamp", "input_length", "output_length", "hash_ids", "body", "headers")
                },
            ).map(lambda value: json.dumps(value).encode()),
        ).map(lambda line: line.replace(b"\n", b"").replace(b"\r", b"").replace(b'"', b"" if len(line) % 2 else b'"')),
        max_size=6,
    ),
)
def test_every_row_is_a_request_or_reported(
    kind: str, junk: list[bytes], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever stands between good rows, a reader yields a request or a bad row with its line; it never raises."""
    path = tmp_path_factory.mktemp("t") / "trace"
    head, _, body = FILES[kind].partition("\n") if kind in ("azure", "burstgpt") else ("", "", FILES[kind])
    first = body.splitlines()[0].encode()
    path.write_bytes(b"\n".join(filter(None, [head.encode(), first, *junk, first])) + b"\n")
    rows = list(readers.FORMATS[kind].read(path))
    assert all(isinstance(row, Request) or (isinstance(row, BadRow) and row.line > 0 and row.problem) for row in rows)
    assert isinstance(rows[0], Request)
    if not any(b'"' in line for line in junk) or kind in ("mooncake", "evalscope"):  # a quote may join CSV lines
        written = sum(bool(line.strip()) for line in (first, *junk, first)) if kind not in ("azure", "burstgpt") else 2
        assert len(rows) >= written
        assert isinstance(rows[-1], Request)


def test_out_of_order_rows_are_sorted_and_counted(trace: Callable[[str | bytes], Path]) -> None:
    """Rows whose time goes back are replayed in order of time, and counted."""
    workload = readers.read(trace(lines(MOONCAKE[::-1])))
    assert [r.due for r in workload.requests] == [0, 3]
    assert workload.about["read"]["out_of_order"] == 1


def test_time_is_compressed_not_reshaped(trace: Callable[[str | bytes], Path]) -> None:
    """A new mean rate keeps the gap CV; jitter keeps every request, sorted."""
    rows = [{**MOONCAKE[0], "timestamp": t} for t in (0, 0, 3000, 9000, 9000, 21000)]
    workload = readers.read(trace(lines(rows)))
    before, after = describe(workload)["arrivals"], describe(readers.at_rate(workload, 10.0))["arrivals"]
    assert after["rate"] == pytest.approx(10.0)
    assert after["gap_cv"] == pytest.approx(before["gap_cv"])
    jittered = readers.jittered(workload, 3.0, np.random.default_rng(0))
    assert len(jittered.requests) == 6
    assert len({r.due for r in jittered.requests}) == 6


def test_the_times_of_a_trace_with_other_lengths(trace: Callable[[str | bytes], Path]) -> None:
    """`trace:FILE` gives the trace's times, compressed to a rate if one is asked for; it has no more than its own."""
    path = trace(AZURE)
    model = arrival_model(f"trace:{path}")
    assert model.times(2, np.random.default_rng(0)) == pytest.approx([0.0, 4.314579])
    assert arrival_model(f"trace:{path},rate=2").times(2, np.random.default_rng(0)) == pytest.approx([0.0, 0.5])
    with pytest.raises(ValueError, match="has 2 requests, 3 are wanted"):
        model.times(3, np.random.default_rng(0))
    for wrong in ("fast", "0"):
        with pytest.raises(ValueError, match=r"arrivals: trace: .*; write trace:FILE"):
            arrival_model(f"trace:{path},rate={wrong}")


@pytest.mark.skipif(not TRACES.exists(), reason="the traces are not part of the repository")
@pytest.mark.parametrize(
    ("name", "rows", "means", "rate"),
    [
        ("AzureLLMInferenceTrace_conv.csv", 19_366, (1154.7, 211.1), 5.53),
        ("AzureLLMInferenceTrace_code.csv", 8_819, (2047.8, 27.9), 2.57),
        ("mooncake_conversation_trace.jsonl", 12_031, (12_035, 342.6), 3.40),
        ("mooncake_synthetic_trace.jsonl", 3_993, (15_325, 149.1), 3.91),
    ],
)
def test_real_traces(name: str, rows: int, means: tuple[float, float], rate: float) -> None:
    """The published traces are read whole, without a bad row, with the means and rates of their data sheet."""
    workload = readers.read(TRACES / name)
    assert workload.about["read"]["bad_rows"] == 0
    assert len(workload.requests) == rows
    found = describe(workload)
    assert found["prompt_tokens"]["mean"] == pytest.approx(means[0], rel=1e-3)
    assert found["output_tokens"]["mean"] == pytest.approx(means[1], rel=1e-3)
    assert found["arrivals"]["rate"] == pytest.approx(rate, rel=1e-2)
    if "conversation" in name:
        assert found["block_hit_share"] == pytest.approx(0.366, abs=0.002)


@pytest.mark.parametrize("kind", sorted(FILES))
def test_a_byte_order_mark_is_no_content(kind: str, trace: Callable[[str | bytes], Path]) -> None:
    """Files that an editor of Windows saved are read like any other."""
    path = trace(b"\xef\xbb\xbf" + FILES[kind].encode())
    assert readers.kind_of(path) == kind
    assert len(readers.read(path).requests) == 2


def test_a_tokenizer_that_is_none_is_named(tmp_path: Path) -> None:
    """A missing file and one that is no tokenizer are a ValueError with the path."""
    (tmp_path / "odd.json").write_text("{}")
    for name in ("missing.json", "odd.json"):
        with pytest.raises(ValueError, match=f"tokenizer: .*{name}"):
            readers.token_counter(tmp_path / name)


def test_one_stamp_far_away_costs_no_memory(trace: Callable[[str | bytes], Path]) -> None:
    """A trace with one request centuries after the others is described: empty seconds are counted, not listed."""
    path = trace(AZURE.replace("2023-11-16 18:15:50.9951690", "9023-11-16 18:15:50"))
    found = describe(readers.read(path))["arrivals"]
    assert found["seconds"] > 2e11
    assert found["peak_1s"] == pytest.approx(found["seconds"], rel=1e-6)
    assert found["iod_1s"] == pytest.approx(1.0)


@pytest.mark.parametrize("speed", [1e-300, 1e-320])
def test_time_is_not_stretched_beyond_all_dates(speed: float, trace: Callable[[str | bytes], Path]) -> None:
    """A factor that makes a time infinite, or as good as that, is refused: it could not be written either."""
    with pytest.raises(ValueError, match="the last request would be due"):
        readers.faster(readers.read(trace(AZURE)), speed)
