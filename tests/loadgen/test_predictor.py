"""Training of the length predictor: what is read, what is learnt, and that held-out figures are honest."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from aiohttp import web
from scipy import stats

from loadgen.cli import main
from loadgen.predictor import prompts
from loadgen.predictor.command import load, save
from loadgen.predictor.record import RecordingFailed, record
from loadgen.predictor.samples import BadInput, Samples, from_requests, read_log, read_trace
from loadgen.predictor.train import correlation, held_out, predict, train
from policies.predictors import LoggedRequest


def requests(count: int, seed: int = 0, told: bool = True) -> list[LoggedRequest]:
    """Prompts whose first token is one of 8 tasks; the task decides the length, or nothing does if not `told`."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        task = int(rng.integers(8))
        prompt = (1000 + task, *rng.integers(0, 40, rng.integers(5, 30)).tolist())
        length = 4 * 2 ** (task if told else int(rng.integers(8))) * rng.uniform(0.8, 1.2)
        made.append(LoggedRequest(prompt, 1024, max(1, int(length)), f"task {task}"))
    return made


def write(path: Path, logged: list[LoggedRequest]) -> Path:
    """The log of these requests."""
    path.write_bytes(b"".join(msgspec.json.encode(request) + b"\n" for request in logged))
    return path


def tau(samples: Samples, score: Any) -> float:
    """Kendall's tau with the true lengths."""
    return float(stats.kendalltau(samples.output_tokens, score).statistic)


def test_held_out_requests_are_ranked_by_what_the_tokens_tell() -> None:
    """Where a token decides the length the ranker finds it; where nothing does, it does not pretend to."""
    telling, silent = from_requests(requests(300)), from_requests(requests(300, told=False))
    assert tau(telling, held_out(telling, 0, by_kind=False)) > 0.6
    assert abs(tau(silent, held_out(silent, 0, by_kind=False))) < 0.2
    assert abs(tau(telling, telling.prompt_tokens)) < 0.2  # so the length of the prompt did not help


def test_new_kinds_are_held_out_whole() -> None:
    """A task that was never seen is not ranked by its token: the figure for new kinds shows what is left then."""
    samples = from_requests(requests(300))
    assert tau(samples, held_out(samples, 0, by_kind=True)) < 0.3


def test_training_and_serving_compute_the_same() -> None:
    """The arrays that the fleet loads predict what the training saw, prompt by prompt."""
    logged = requests(120)
    samples = from_requests(logged)
    ranker = train(samples, window=96)
    served = [ranker.predict(request.prompt_token_ids, request.max_tokens) for request in logged]
    assert served == pytest.approx(predict(ranker, samples).tolist(), rel=1e-9)


def test_a_ranker_survives_its_file(tmp_path: Path) -> None:
    """What was saved is loaded, and no partial file stays behind."""
    ranker = train(from_requests(requests(60)), window=96)
    save(ranker, tmp_path / "new" / "ranker.npz")
    again = load(tmp_path / "new" / "ranker.npz")
    assert again.predict([1003, 5], 1024) == ranker.predict([1003, 5], 1024)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["ranker.npz"]


def test_bad_lines_are_named(tmp_path: Path) -> None:
    """Each bad line is reported with its number and the reason; good and empty lines are not."""
    good = '{"prompt_token_ids": [1, 2], "max_tokens": 9, "output_tokens": 3}\n'
    lines = [
        good,
        '{"prompt_token_ids": [1, 2], "max_tok\n',
        "\n",
        '{"prompt_token_ids": [1, 2], "max_tokens": 9}\n',
        '{"prompt_token_ids": [1, 2], "max_tokens": 9, "output_tokens": 10}\n',
        '{"prompt_token_ids": [-1], "max_tokens": 9, "output_tokens": 1}\n',
        good,
    ]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(lines) + "{}\n" * 20)
    samples, complaints = read_log(path)
    assert samples.output_tokens.tolist() == [3, 3]
    assert [complaint.split(":")[0] for complaint in complaints[:4]] == ["line 2", "line 4", "line 5", "line 6"]
    assert complaints[-1] == "and 14 more lines like these"


def test_a_trace_gives_lengths(tmp_path: Path) -> None:
    """An Azure trace is read by its columns, bad rows are named, and another CSV is refused."""
    path = tmp_path / "trace.csv"
    rows = "".join(f"2023-11-16 18:15:46,{100 + i},{1000 if 40 <= i < 80 else 10}\n" for i in range(120))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows + "x,1,none\n")
    samples, complaints = read_trace(path)
    assert len(samples) == 120
    assert [complaint.split(":")[0] for complaint in complaints] == ["line 122"]
    assert tau(samples, held_out(samples, 0, by_kind=False)) > 0.6  # neither longer nor shorter prompts answer longer
    path.write_text("a,b\n1,2\n")
    with pytest.raises(BadInput, match="ContextTokens"):
        read_trace(path)


def test_too_few_requests_are_refused() -> None:
    """Below 50 requests nothing is trained, and the message says so."""
    with pytest.raises(BadInput, match="49 usable requests"):
        train(from_requests(requests(49)))


def test_intervals_hold_the_value_and_constants_rank_nothing() -> None:
    """The bootstrap interval surrounds the value; a score that is always the same has none."""
    rng = np.random.default_rng(0)
    truth = rng.permutation(200)
    found = correlation(truth, truth + rng.normal(0, 60, 200), rng)
    for value, low, high in (found.kendall, found.spearman):
        assert low < value < high
        assert high - low < 0.3
    assert np.isnan(correlation(truth, np.ones(200), rng).kendall[0])


def test_the_command_trains_and_evaluates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line from a log to a ranker's file and the table; a second judges that file on another log."""
    log, out = write(tmp_path / "log.jsonl", requests(300)), tmp_path / "ranker.npz"
    assert main(["train-predictor", "--log", str(log), "--out", str(out), "--evaluate"]) == 0
    printed = capsys.readouterr().out
    for text in ("new requests", "new kinds", "prompt length", "max_tokens", "Kendall", "Spearman", "300 requests"):
        assert text in printed
    newer = write(tmp_path / "newer.jsonl", requests(100, seed=1))
    samples, _ = read_log(newer)
    assert tau(samples, predict(load(out), samples)) > 0.5
    assert main(["train-predictor", "--log", str(newer), "--ranker", str(out)]) == 0
    assert "ranker.npz" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "status", "complaint"),
    [
        (["--log", "log.jsonl"], 2, "--evaluate"),
        (["--log", "log.jsonl", "--out", "r.npz", "--ranker", "r.npz"], 2, "--ranker"),
        (["--log", "missing.jsonl", "--evaluate"], 1, "missing.jsonl"),
        (["--log", "log.jsonl", "--evaluate"], 1, "too few"),
        (["--log", "log.jsonl", "--ranker", "log.jsonl"], 1, "train-predictor:"),
    ],
)
def test_the_command_says_what_is_wrong(
    options: list[str],
    status: int,
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Wrong combinations end with 2, unusable files with 1, both with a message."""
    monkeypatch.chdir(tmp_path)
    write(Path("log.jsonl"), requests(3))
    assert main(["train-predictor", *options]) == status
    assert complaint in capsys.readouterr().out


def test_prompts_differ_and_take_turns() -> None:
    """All drawn prompts are different, every kind is there as often, and one seed always draws the same."""
    drawn = prompts.draw(200, np.random.default_rng(3))
    assert len({text for _, text in drawn}) == 200
    counts = [sum(kind == k for kind, _ in drawn) for k in prompts.kinds()]
    assert min(counts) >= 5
    assert not any("{" in text for _, text in drawn)
    assert drawn == prompts.draw(200, np.random.default_rng(3))


def recorded(path: Path, answer: dict[str, Any], status: int = 200) -> int:
    """What record() returns with a server that gives every chat request this answer."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def chat(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["model"] == "tiny"
        assert body["return_token_ids"]
        return web.json_response(answer, status=status)

    async def play() -> int:
        server = web.Application()
        server.add_routes([web.get("/v1/models", models), web.post("/v1/chat/completions", chat)])
        runner = web.AppRunner(server)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        drawn = prompts.draw(10, np.random.default_rng(0))
        try:
            return await record(url, drawn, path, max_tokens=9, concurrency=3, done=lambda: None)
        finally:
            await runner.cleanup()

    return asyncio.run(play())


def test_recording_writes_a_log_that_can_be_read(tmp_path: Path) -> None:
    """One line per prompt, with the ids and the count that the server gave, and the prompt's kind."""
    path = tmp_path / "log.jsonl"
    assert recorded(path, {"prompt_token_ids": [1, 2, 3], "usage": {"completion_tokens": 7}}) == 10
    samples, complaints = read_log(path)
    assert complaints == []
    assert samples.output_tokens.tolist() == [7] * 10
    assert samples.prompt_tokens.tolist() == [3] * 10
    assert {json.loads(line)["kind"] for line in path.read_text().splitlines()} <= set(prompts.kinds())


def test_recording_says_what_the_server_did(tmp_path: Path) -> None:
    """An error answer, and a server that gives no token ids, end the recording with a message."""
    with pytest.raises(RecordingFailed, match="answered 503"):
        recorded(tmp_path / "log.jsonl", {"error": "busy"}, status=503)
    with pytest.raises(RecordingFailed, match="no prompt_token_ids"):
        recorded(tmp_path / "log.jsonl", {"usage": {"completion_tokens": 7}})
