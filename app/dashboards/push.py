"""Puts the dashboards into a Grafana over its HTTP API; what is there already and equal is left alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

import requests
from grafana_api.grafana_api import GrafanaClientError, GrafanaException
from grafana_api.grafana_face import GrafanaFace

from app.dashboards.boards import BOARDS
from app.dashboards.model import Board, grafana

FOLDER_UID, FOLDER = "tidegate", "Tidegate"
#: What Grafana adds to a board.
_THEIRS = ("id", "version")


class PushError(Exception):
    """Grafana did not take the boards; the message says what to do."""


def push(url: str, token: str, boards: Iterable[Board] = BOARDS) -> dict[str, str]:
    """Make folder and boards what they are here; returns what became of each uid: `created`, `updated`, `unchanged`.

    `token` is that of a service account with the role Editor. Raises PushError.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise PushError(f"--url must be the address of a Grafana, such as http://localhost:3000, got {url!r}")
    prefix = parts.path.strip("/")
    api = GrafanaFace(
        auth=token,
        host=f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname,
        port=parts.port,
        protocol=parts.scheme,
        url_path_prefix=f"{prefix}/" if prefix else "",
        timeout=30.0,
    )
    try:
        if _found(api.folder.get_folder, FOLDER_UID) is None:
            api.folder.create_folder(FOLDER, FOLDER_UID)
        return {board.uid: _push(api, grafana(board)) for board in boards}
    except requests.RequestException as error:
        raise PushError(f"no Grafana answers at {url}: {error}") from error
    except GrafanaException as error:
        if error.status_code in (401, 403):
            raise PushError(
                f"Grafana refused the token ({error.message}): make one for a service account with the role Editor"
            ) from error
        raise PushError(f"Grafana at {url} answered: {error.message}") from error


def _push(api: Any, model: dict[str, Any]) -> str:
    found = _found(api.dashboard.get_dashboard, model["uid"])
    if found is not None:
        there = {key: value for key, value in found["dashboard"].items() if key not in _THEIRS}
        if there == model and found["meta"].get("folderUid") == FOLDER_UID:
            return "unchanged"
    api.dashboard.update_dashboard(
        {
            "dashboard": {**model, "id": None},
            "folderUid": FOLDER_UID,
            "overwrite": True,
            "message": "app.dashboards push",
        }
    )
    return "created" if found is None else "updated"


def _found(ask: Any, uid: str) -> dict[str, Any] | None:
    try:
        return ask(uid)
    except GrafanaClientError as error:
        if error.status_code == 404:
            return None
        raise
