"""Pushing dashboards, against a small stand-in for Grafana's HTTP API (no Grafana can be installed where tests run).

The stand-in keeps what the documented API says: folders by uid, dashboards by uid with a version that each write
raises, 404 for what is not there, 401 without the token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from app.dashboards.boards import BOARDS
from app.dashboards.cli import TOKEN, main
from app.dashboards.push import FOLDER, FOLDER_UID, PushError, push

SECRET = "glsa_test"


class FakeGrafana:
    """Folders and dashboards behind HTTP; `writes` are the bodies of every POST."""

    def __init__(self) -> None:
        self.folders: dict[str, str] = {}
        self.dashboards: dict[str, dict[str, Any]] = {}
        self.writes: list[dict[str, Any]] = []
        self.role = "Editor"
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(*fake.get(self.path, self.headers["Authorization"]))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self.answer(*fake.post(self.path, self.headers["Authorization"], body))

            def answer(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def get(self, path: str, authorization: str | None) -> tuple[int, dict[str, Any]]:
        """A folder or a dashboard by its uid."""
        path = path.removeprefix("/grafana")
        if authorization != f"Bearer {SECRET}":
            return 401, {"message": "Invalid API key"}
        if (uid := path.removeprefix("/api/folders/")) != path:
            return (200, {"uid": uid}) if uid in self.folders else (404, {"message": "folder not found"})
        found = self.dashboards.get(path.removeprefix("/api/dashboards/uid/"))
        return (200, found) if found else (404, {"message": "Dashboard not found"})

    def post(self, path: str, authorization: str | None, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Make a folder, or write a dashboard."""
        path = path.removeprefix("/grafana")
        if authorization != f"Bearer {SECRET}":
            return 401, {"message": "Invalid API key"}
        if self.role != "Editor":
            return 403, {"message": "Permissions needed: dashboards:write"}
        self.writes.append(body)
        if path == "/api/folders":
            self.folders[body["uid"]] = body["title"]
            return 200, body
        assert path == "/api/dashboards/db"
        model = body["dashboard"]
        there = self.dashboards.get(model["uid"])
        if there is not None and not body["overwrite"] and model.get("version") != there["dashboard"]["version"]:
            return 412, {"message": "The dashboard has been changed by someone else"}
        version = there["dashboard"]["version"] + 1 if there else 1
        number = there["dashboard"]["id"] if there else len(self.dashboards) + 1
        stored = {**model, "id": number, "version": version}
        self.dashboards[model["uid"]] = {"dashboard": stored, "meta": {"folderUid": body["folderUid"]}}
        return 200, {"status": "success", "uid": model["uid"], "version": version}


@pytest.fixture
def grafana() -> Iterator[FakeGrafana]:
    """An empty Grafana."""
    fake = FakeGrafana()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


def test_a_second_push_changes_nothing(grafana: FakeGrafana) -> None:
    """The first push makes folder and boards, the second only looks: no write, no new version."""
    assert push(grafana.url, SECRET) == {board.uid: "created" for board in BOARDS}
    assert grafana.folders == {FOLDER_UID: FOLDER}
    assert {found["meta"]["folderUid"] for found in grafana.dashboards.values()} == {FOLDER_UID}
    writes = len(grafana.writes)
    assert push(grafana.url, SECRET) == {board.uid: "unchanged" for board in BOARDS}
    assert len(grafana.writes) == writes
    assert {found["dashboard"]["version"] for found in grafana.dashboards.values()} == {1}


def test_a_push_repairs(grafana: FakeGrafana) -> None:
    """A board that somebody edited, moved or deleted is what it should be again; the others are left alone."""
    push(grafana.url, SECRET)
    edited, moved, deleted, *rest = [board.uid for board in BOARDS]
    grafana.dashboards[edited]["dashboard"]["title"] = "mine"
    grafana.dashboards[moved]["meta"]["folderUid"] = "elsewhere"
    del grafana.dashboards[deleted]
    outcomes = {edited: "updated", moved: "updated", deleted: "created"}
    assert push(grafana.url, SECRET) == outcomes | dict.fromkeys(rest, "unchanged")
    assert push(grafana.url, SECRET) == {board.uid: "unchanged" for board in BOARDS}


def test_a_grafana_below_a_path(grafana: FakeGrafana) -> None:
    """A Grafana that is served from a sub-path, with or without a slash at the end, is reached there."""
    assert set(push(f"{grafana.url}/grafana/", SECRET).values()) == {"created"}
    assert set(push(f"{grafana.url}/grafana", SECRET).values()) == {"unchanged"}


@pytest.mark.parametrize(
    "url", ["localhost:3000", "ftp://localhost", "http://", "", "http://h:99999", "http://h:x", "http://[::1"]
)
def test_an_address_that_is_none(url: str) -> None:
    """What is no HTTP address is refused by name."""
    with pytest.raises(PushError, match=r"--url .* address.*" + re.escape(repr(url))):
        push(url, SECRET)


def test_refusals_name_the_remedy(grafana: FakeGrafana) -> None:
    """A wrong token, one with too few rights, and an address where nobody listens are told apart."""
    with pytest.raises(PushError, match="role Editor"):
        push(grafana.url, "wrong")
    grafana.role = "Viewer"
    with pytest.raises(PushError, match="role Editor"):
        push(grafana.url, SECRET)
    with pytest.raises(PushError, match=re.escape("no Grafana answers at http://127.0.0.1:1")):
        push("http://127.0.0.1:1", SECRET)


@pytest.mark.parametrize("answer", [{"x": 1}, [], None])
def test_something_else_that_answers(grafana: FakeGrafana, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """Another server's JSON at that address is told as such."""
    monkeypatch.setattr(grafana, "get", lambda path, authorization: (200, answer))
    with pytest.raises(PushError, match="is no Grafana: look at host, port and path"):
        push(grafana.url, SECRET)


@pytest.mark.parametrize("token", ["two\nlines", "ключ"])
def test_a_token_that_no_header_can_hold(token: str) -> None:
    """It is refused before anything is sent, and not repeated."""
    with pytest.raises(PushError, match="token") as refused:
        push("http://127.0.0.1:1", token)
    assert token not in str(refused.value)


def test_the_command(grafana: FakeGrafana, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The token comes from the option or the environment; exit code and words say what happened, never the token."""
    monkeypatch.delenv(TOKEN, raising=False)
    assert main(["push", "--url", grafana.url]) == 1
    assert TOKEN in capsys.readouterr().err
    monkeypatch.setenv(TOKEN, SECRET)
    assert main(["push", "--url", grafana.url]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{board.uid} created" for board in BOARDS]
    assert main(["push", "--url", grafana.url, "--token", "wrong"]) == 1
    output = capsys.readouterr()
    assert "role Editor" in output.err.replace("\n", " ")
    assert SECRET not in output.out + output.err


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    """`list` names every dashboard."""
    assert main(["list"]) == 0
    output = capsys.readouterr().out
    assert all(board.uid in output for board in BOARDS)
