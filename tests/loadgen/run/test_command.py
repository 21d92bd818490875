"""`python -m loadgen run` from the command line to the files that it writes."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadgen.cli import main
from loadgen.metrics import OUTCOMES
from loadgen.run import results
from loadgen.workloads.make import make
from tests.loadgen.run.fake_server import TEMPLATE, FakeServer

SMALL = ["--requests", "12", "--arrivals", "poisson:rate=60", "--lengths", "fixed:prompt=20,answer=4"]
# What `vllm bench serve` 0.32 writes for a text generation benchmark.
BENCH_SERVE = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "max_concurrent_requests", "rtfx"),
    *(f"{s}_{m}_ms" for s in ("mean", "median", "std", "p99") for m in ("ttft", "tpot", "itl", "e2el")),
}
DETAIL = {
    *("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "generated_texts"),
    "errors",
}


@pytest.fixture
def server() -> FakeServer:
    """A server that answers well."""
    return FakeServer()


def run(server: FakeServer, out: Path, *options: str, model: list[str] | None = None) -> tuple[int, dict[str, Any]]:
    """Exit status and run.json of a run against the server."""
    with server.in_thread() as url:
        status = main(["run", url, *(SMALL if model is None else model), "--out", str(out), *options])
    found = out / results.RUN
    return status, json.loads(found.read_text()) if found.exists() else {}


def test_a_run_writes_its_figures_and_its_conditions(server: FakeServer, tmp_path: Path) -> None:
    """run.json has bench serve's keys, outcomes, burstiness of what was sent, workload, machine and arguments."""
    status, found = run(server, tmp_path, "--save-detailed", "--slo", "ttft=60000,tpot=60000")
    assert status == 0
    assert found.keys() >= BENCH_SERVE | DETAIL
    assert (found["completed"], found["failed"], found["num_prompts"], found["model_id"]) == (12, 0, 12, "fake")
    assert found["outcomes"] == {**dict.fromkeys(OUTCOMES, 0), "ok": 12}
    assert found["arrivals"]["requests"] == 12
    assert found["within_slo"] == 1.0
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert found["total_output_tokens"] == 48
    assert found["workload"]["about"]["made"]["seed"] == 0
    assert found["machine"]["cores"] >= 1
    assert found["server_counters"]["vllm:num_preemptions_total"] == 3
    assert all(len(found[name]) == 12 for name in DETAIL)
    assert not found["interrupted"]


def test_prompts_have_the_asked_length_at_the_server(server: FakeServer, tmp_path: Path) -> None:
    """What the server adds to a prompt is found out first and left out: it counts as many tokens as were asked for."""
    _, found = run(server, tmp_path)
    assert found["template_tokens"] == TEMPLATE
    assert found["total_input_tokens"] == 12 * 20
    assert len(server.asked) == 13
    _, body, _ = server.asked[1]
    assert body["max_tokens"] == 4
    assert body["stream"]
    assert body["ignore_eos"]


def test_requests_carry_tier_session_key_and_fields(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tier, session, id and the key's secret are in headers, the command's fields in the body; no file has a secret."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-environment")
    workload = make(2, lengths_model="fixed:prompt=9,answer=2", arrivals="poisson:rate=50", tier_mix="1", tier_count=1)
    path = tmp_path / "w.jsonl"
    workload.save(path)
    lines = path.read_text().splitlines()
    lines[1] = json.dumps({**json.loads(lines[1]), "key": "acme", "session": "s1", "body": {"top_p": 0.5}})
    path.write_text("\n".join(lines) + "\n")
    keys = tmp_path / "keys.json"
    keys.write_text('{"acme": "sk-acme"}')
    out = tmp_path / "out"
    options = ["--workload", str(path), "--keys", str(keys), "--body", '{"seed": 7}', "--api", "completions"]
    status, _ = run(server, out, *options, "--template-tokens", "0", model=[])
    assert status == 0
    (where, body, first), (_, _, second) = server.asked
    assert where == "/v1/completions"
    assert (body["seed"], body["top_p"], len(body["prompt"].split())) == (7, 0.5, 9)
    assert (first["x-vllm-priority"], first["x-session-id"], first["authorization"]) == ("0", "s1", "Bearer sk-acme")
    assert second["authorization"] == "Bearer sk-environment"
    assert first["x-request-id"] != second["x-request-id"]
    assert not any(b"sk-" in file.read_bytes() for file in out.iterdir())


def test_figures_by_tier(tmp_path: Path) -> None:
    """Each tier has its own outcomes, waits and goodput; the tables have a row for each tier and each request."""
    server = FakeServer(lambda body, headers: {"status": 429} if headers.get("X-Vllm-Priority") == "1" else None)
    status, found = run(server, tmp_path, "--tiers", "1,1", "--slo", "0:ttft=60000", "--slo", "1:ttft=0.001")
    assert status == 0
    assert found["tiers"]["0"]["outcomes"]["ok"] + found["tiers"]["1"]["outcomes"]["shed"] == 12
    assert found["tiers"]["0"]["within_slo"] == 1.0
    assert found["tiers"]["1"]["within_slo"] == 0.0
    assert found["tiers"]["1"]["p50_ttft_ms"] is None
    assert found["tiers"]["1"]["shed_by_reason"] == {"status 429": found["tiers"]["1"]["asked"]}
    rows = list(csv.DictReader((tmp_path / results.TIERS).open()))
    assert [row["tier"] for row in rows] == ["0", "1", "all"]
    requests = list(csv.DictReader((tmp_path / results.REQUESTS).open()))
    assert len(requests) == 12
    assert {row["outcome"] for row in requests} == {"ok", "shed"}


def test_answers_are_checked_against_a_reference(server: FakeServer, tmp_path: Path) -> None:
    """The same answers are equal; another answer is found, told with its place, and is the exit status."""
    options = ["--token-ids"]
    assert run(server, tmp_path / "a", *options)[0] == 0
    status, found = run(server, tmp_path / "b", *options, "--reference", str(tmp_path / "a"))
    assert status == 0
    assert (found["exact"]["equal"], found["exact"]["different"]) == (12, 0)
    once: Iterator[dict[str, Any]] = iter([*[{}] * 5, {"words": ["other"]}, {"cut": 2}, *[{}] * 10])
    server.rule = lambda body, headers: next(once)
    status, found = run(server, tmp_path / "c", *options, "--reference", str(tmp_path / "a"))
    assert status == 1
    assert (found["exact"]["equal"], found["exact"]["different"], found["exact"]["prefix"]) == (10, 1, 1)
    assert found["exact"]["first"][0]["unit"] == "token"


def test_a_reference_of_another_workload_is_refused(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers to other prompts are not compared: the run is not made."""
    run(server, tmp_path / "a")
    asked = len(server.asked)
    status, _ = run(server, tmp_path / "b", "--reference", str(tmp_path / "a"), "--tiers", "uniform")
    assert status == 1
    assert "cannot be compared" in " ".join(capsys.readouterr().out.split())
    assert len(server.asked) == asked


def test_hooks_run_at_their_times(server: FakeServer, tmp_path: Path) -> None:
    """A command runs at its time and is recorded with its output; one that does not end is ended with the run."""
    server.rule = lambda body, headers: {"pause": 0.75}  # so that the run lasts longer than the first command
    mark = tmp_path / "pid"
    hooks = ["--at", "50ms:echo drained; exit 3", "--at", f"0s:echo $$ > {mark}; sleep 60", "--at", "9m:echo late"]
    _, found = run(server, tmp_path / "out", *hooks)
    ended, kept, never = sorted(found["hooks"], key=lambda h: str(h["status"]))
    assert (never["began"], never["status"]) == (None, "the run ended before")
    assert (ended["status"], ended["output"]) == (3, "drained\n")
    assert 0.045 <= ended["began"] <= ended["ended"]  # the event loop rounds its timers to milliseconds
    assert kept["status"] == "ended with the run"
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_ctrl_c_writes_what_there_is(tmp_path: Path) -> None:
    """An interrupted run writes its results and says that it was interrupted, and what was not sent."""

    def rule(body: dict[str, Any], headers: Any) -> dict[str, Any]:
        if len(fake.asked) == 5:  # the run is under way: its first, short question was one of them
            os.kill(os.getpid(), signal.SIGINT)
        return {"pause": 0.0 if len(fake.asked) < 5 else 60.0}

    fake = FakeServer(rule)
    model = ["--requests", "20", "--arrivals", "step:rate=50,to=0.01,at=0.2", "--lengths", "fixed:prompt=5,answer=2"]
    status, found = run(fake, tmp_path, model=model)
    assert status == 0
    assert found["interrupted"]
    assert found["not_sent"] > 0
    assert found["outcomes"]["unfinished"] >= 1
    assert found["not_sent"] + found["outcomes"]["ok"] + found["outcomes"]["unfinished"] == 20


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--slo", "wait=3"], "'wait=3' is none of ttft=MS"),
        (["--workload", "nothing.jsonl"], "No such file"),
        (["--arrivals", "never"], "no model 'never'"),
        (["--tiers", "odd"], "'odd'"),
        (["--keys", str(Path(__file__))], "not a JSON object with a secret"),
    ],
)
def test_wrong_options_are_named(
    options: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be run ends with status 1 and a line that names it; nothing is written."""
    assert main(["run", "http://127.0.0.1:9", *options, "--out", str(tmp_path / "out")]) == 1
    assert complaint in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "out").exists()


def test_a_server_that_does_not_answer_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No server, and one that refuses the first question, end the run before it begins."""
    assert main(["run", "http://127.0.0.1:9", *SMALL, "--out", str(tmp_path)]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().out
    status, _ = run(FakeServer(lambda body, headers: {"status": 401}), tmp_path / "out")
    assert status == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(r"first, short request failed: status 401", printed)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "nonsense", "", "ftp://x", "http://", "http://h:port"])
def test_what_is_no_address_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An address without its scheme or host is named as what it is, with how to write one."""
    with pytest.raises(SystemExit):
        main(["run", url])
    assert "write http://HOST:PORT, or handle:NAME" in " ".join(capsys.readouterr().err.split())


def test_options_without_an_effect_are_told(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An SLO for a tier that no request has, and pages of metrics that cannot be read, do not pass in silence."""
    status, found = run(server, tmp_path, "--slo", "7:ttft=5", "--metrics-url", "http://127.0.0.1:9/metrics")
    printed = " ".join(capsys.readouterr().out.split())
    assert (status, found["server_counters"]) == (0, None)
    assert "no request is of tier 7" in printed
    assert "metrics-url: none of the pages could be read" in printed


def test_an_interrupt_before_the_first_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ctrl-C while the server is asked the first question ends with status 130 and a line."""

    def rule(body: dict[str, Any], headers: Any) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGINT)
        return {"pause": 60.0}

    status, found = run(FakeServer(rule), tmp_path / "out")
    assert (status, found) == (130, {})
    assert "interrupted" in capsys.readouterr().out
