"""`bench client`: its server speaks as vLLM does, and its figures are those of whole answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen.bench.token_server import events
from loadgen.cli import main
from loadgen.client import Answer


def test_the_server_speaks_the_protocol() -> None:
    """Its chunks are an event stream with one text an event, a count and an end."""
    pieces, end = events(3)
    body = b"".join(pieces) + end
    answer = Answer()
    data = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        data, body = data + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    assert answer.take(data, 1.0) == ""
    assert (answer.pieces, answer.usage.completion_tokens, answer.finished) == ([" token"] * 3, 3, True)


def test_the_client_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every stream ends well with all its tokens, and the result has CPU time and lateness."""
    out = tmp_path / "client.json"
    assert main(["bench", "client", "--rates", "40", "--seconds", "0.5", "--tokens", "5", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["ok"], row["streams"]) == (20, 20)
    assert row["cpu_ms"] > 0
    assert row["streams_per_cpu_second"] == pytest.approx(1e3 / row["cpu_ms"], rel=1e-3)
    assert row["late_p99_ms"] >= row["late_p50_ms"] >= 0
    assert "(goal 500)" in " ".join(capsys.readouterr().out.split())
