"""The status page of a real fleet in a real browser: what it shows, a drain while a stream runs, deaths around it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.browser import Watched, opened, shoot

from .conftest import _run
from .moves import Reading, Request
from .servers import LOGS, ROOT, Server, free_port, start_fleet, until
from .shapes import CHAT, STREAM, chat

pytestmark = [pytest.mark.integration, pytest.mark.slow]

TOKEN = "the-token-of-this-test"
LONG = Request("long", CHAT, {**chat(max_tokens=600, **STREAM), "ignore_eos": True})


@dataclass
class Fleet:
    """A fleet and its page."""

    server: Server
    page_url: str

    def status(self) -> dict[str, Any]:
        """What /status.json says."""
        return httpx.get(f"{self.page_url}/status.json", timeout=10).raise_for_status().json()

    def tidegate(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command line, told where the page is."""
        env = {**os.environ, "TIDEGATE_ADMIN_URL": self.page_url, "COLUMNS": "160"}
        command = [sys.executable, "-m", "app", *arguments]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two small replicas and a page with a token."""
    file = tmp_path_factory.mktemp("admin") / "token"
    file.write_text(TOKEN)
    port = free_port()
    server = start_fleet(
        replicas=2,
        dtype="float32",
        engine_kwargs={"max_model_len": 1024, "kv_cache_memory_bytes": 128 << 20},
        admin={"port": port, "token_file": str(file)},
    )
    made = Fleet(server, f"http://127.0.0.1:{port}")
    for _ in _run(server, "/health/ready"):
        until(lambda: made.status()["totals"]["serving"] == 2, 120, "two replicas on the page", every=0.5)
        yield made


@pytest.fixture
def page(fleet: Fleet) -> Iterator[Watched]:
    with opened(fleet.page_url) as watched:
        yield watched


def test_table_and_page_agree(fleet: Fleet, page: Watched) -> None:
    """`status`, `/status.json` and the drawn page name the same replicas; the API's port knows nothing of the page."""
    names = sorted(replica["id"] for replica in fleet.status()["replicas"])
    done = fleet.tidegate("status")
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in names)
    assert sorted(r["id"] for r in json.loads(fleet.tidegate("status", "--json").stdout)["replicas"]) == names
    page.page.wait_for_function("document.querySelectorAll('#fleet [data-replica]').length === 2")
    drawn = [group.get_attribute("data-replica") for group in page.page.locator("#fleet [data-replica]").all()]
    assert sorted(map(str, drawn)) == names
    assert httpx.get(f"{fleet.server.url}/status", timeout=10).status_code == 404
    assert (page.said, page.foreign) == ([], [])


def test_drain_by_the_page_while_streams_run(fleet: Fleet, page: Watched, tmp_path: Path) -> None:
    """A click empties a replica: its streams end whole on the other one, and the page tells the story."""
    page.act(TOKEN)
    answers = [Reading() for _ in range(4)]
    with ThreadPoolExecutor(4) as clients:
        reading = [clients.submit(answer.read, fleet.server.url, LONG) for answer in answers]
        until(lambda: all(answer.pieces > 5 for answer in answers), 60, "tokens of each stream")
        until(lambda: fleet.status()["totals"]["running"] == 4, 30, "four running on the page")
        busy = max(fleet.status()["replicas"], key=lambda replica: replica["running"])
        assert sum(tier["blocks"] for tier in busy["tiers"]) > 0
        assert not answers[0].ended.is_set(), "the streams were over before the drain"
        page.page.click(f'button[data-drain="{busy["id"]}"]')
        page.page.wait_for_selector(f'#fleet [data-replica="{busy["id"]}"].draining')
        until(lambda: _replica(fleet, busy["id"])["running"] == 0, 60, "an empty replica")
        shoot(page, LOGS / "status-page-drained.png")
        for future in reading:
            future.result(timeout=120)
    for answer in answers:
        assert answer.status == 200
        assert answer.text.count('"finish_reason":"length"') == 1
        assert answer.text.rstrip().endswith("[DONE]")
        assert '"error"' not in answer.text
    kinds = [event["kind"] for event in fleet.status()["events"] if event["replica"] == busy["id"]]
    assert {"order", "draining", "empty"} <= set(kinds)
    page.page.click(f'button[data-drain="{busy["id"]}"]')
    until(lambda: _replica(fleet, busy["id"])["state"] == "serving", 30, "the replica back")
    assert (page.said, page.foreign) == ([], [])


def test_alpha_changes_in_place(fleet: Fleet) -> None:
    """An action changes the policy of running replicas: Serve has it in its file, and no process is replaced."""
    before = {process.pid for process in fleet.server.named("EngineReplica")}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    body = {"scheduling": {"policy": "larry", "alpha": 2.5}, "balancing": {"policy": "p2c"}}
    httpx.post(f"{fleet.page_url}/actions/settings", json=body, headers=headers, timeout=20).raise_for_status()
    until(lambda: fleet.status()["settings"]["scheduling"].get("alpha") == 2.5, 30, "alpha in force", every=0.3)
    until(lambda: fleet.status()["settings"]["balancing"]["policy"] == "p2c", 30, "p2c in every report", every=0.3)
    until(lambda: fleet.status()["serve_status"] == "RUNNING", 60, "a running application", every=0.5)
    until(lambda: fleet.status()["totals"]["serving"] == 2, 30, "both replicas", every=0.3)
    assert {process.pid for process in fleet.server.named("EngineReplica")} == before


def test_it_comes_back(fleet: Fleet, page: Watched) -> None:
    """Killed together with the coordinator it is back by Serve, and the browser goes on by itself."""
    fleet.server.named("ServeReplica:tidegate:Coordinator")[0].kill()
    fleet.server.named("ServeReplica:tidegate:Admin")[0].kill()
    page.page.wait_for_selector("#live.bad", timeout=30_000)
    page.page.wait_for_selector("#live.good", timeout=120_000)
    until(lambda: fleet.status()["totals"]["serving"] == 2, 120, "both replicas again", every=0.5)


def _replica(fleet: Fleet, name: str) -> dict[str, Any]:
    return next(replica for replica in fleet.status()["replicas"] if replica["id"] == name)
