"""The log of finished requests: what it holds, and where it ends."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from app.config.model import DEFAULT_MODEL_ID
from app.request_log import RequestLog
from deployments.wire import Outcome

from .scripted_fleet import FleetMaker, Submission, silent

BODY = {"model": DEFAULT_MODEL_ID, "prompt": "Hi"}


def test_finished_requests_are_logged(run: Any, make_fleet: FleetMaker, tmp_path: Path) -> None:
    """With a request log each finished sequence leaves its prompt's ids, lengths and tier; one cut short does not."""

    async def scenario() -> None:
        async def two(call: Submission) -> Outcome:
            call.send(500)
            call.send(501, finish="length")
            return Outcome(2, "length")

        path = tmp_path / "requests.jsonl"
        log = RequestLog(str(path), 1 << 20)
        fleet = await make_fleet(two, log=log)
        await fleet.post("/v1/completions", {**BODY, "priority": 2, "max_tokens": 2})
        prompt = fleet.replicas.calls[0].submit.prompt
        fleet.replicas.scripts[:] = [silent]
        leave = asyncio.Event()
        cut = asyncio.create_task(fleet.post("/v1/completions", BODY, leave=leave))
        while len(fleet.replicas.calls) < 2:
            await asyncio.sleep(0.005)
        leave.set()
        await cut
        log.close()
        (line,) = map(json.loads, path.read_text().splitlines())
        assert line.pop("t") > 1e9
        assert line == {"prompt_token_ids": prompt, "max_tokens": 2, "output_tokens": 2, "tier": 2}
        assert path.stat().st_mode & 0o077 == 0

    run(scenario())


def test_request_log_stops_at_its_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log never grows beyond its bound, keeps whole lines, says once that it ends, and goes on in the same file."""
    path = tmp_path / "log"
    for _ in range(2):
        log = RequestLog(str(path), 1000)
        for tokens in range(100):
            log.note([1, 2, 3], None, tokens, 0)
        log.close()
        log.note([1], None, 1, 0)
        log.close()
    assert path.stat().st_size <= 1000
    assert [json.loads(line)["output_tokens"] for line in path.read_text().splitlines()][:5] == [0, 1, 2, 3, 4]
    assert caplog.text.count("request_log_mib") == 2
