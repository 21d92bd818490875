"""Puts the dashboards into a Grafana over its HTTP API; what is there already and equal is left alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import SplitResult, urlsplit

import requests
from grafana_api.grafana_api import GrafanaClientError, GrafanaException
from grafana_api.grafana_face import GrafanaFace

from app.dashboards.boards import BOARDS
from app.dashboards.model import Board, grafana

EXAMPLE = "http://localhost:3000"
FOLDER_UID, FOLDER = "tidegate", "Tidegate"
#: What Grafana adds to a board.
_THEIRS = ("id", "version")


class _NotGrafanaError(Exception):
    """An answer that no Grafana gives."""


class PushError(Exception):
    """Grafana did not take the boards; the message says what to do."""


def push(url: str, token: str, boards: Iterable[Board] = BOARDS) -> dict[str, str]:
    """Make folder and boards what they are here; returns what became of each uid: `created`, `updated`, `unchanged`.

    `token` is that of a service account with the role Editor. Raises PushError.
    """
    parts, host, port = _address(url)
    if not (token.isascii() and token.isprintable()):
        raise PushError("a token of Grafana has letters, digits and underscores: this one cannot be sent")
    prefix = parts.path.strip("/")
    api = GrafanaFace(
        auth=token,
        host=f"[{host}]" if ":" in host else host,
        port=port,
        protocol=parts.scheme,
        url_path_prefix=f"{prefix}/" if prefix else "",
        timeout=30.0,
    )
    try:
        if _found(api.folder.get_folder, FOLDER_UID, "uid") is None:
            api.folder.create_folder(FOLDER, FOLDER_UID)
        return {board.uid: _push(api, grafana(board)) for board in boards}
    except (_NotGrafanaError, requests.JSONDecodeError) as error:
        raise PushError(f"what answers at {url} is no Grafana: look at host, port and path of --url") from error
    except requests.RequestException as error:
        raise PushError(f"no Grafana answers at {url}: {error}") from error
    except GrafanaException as error:
        if error.status_code in (401, 403):
            raise PushError(
                f"Grafana refused the token ({error.message}): make one for a service account with the role Editor"
            ) from error
        raise PushError(f"Grafana at {url} answered: {error.message}") from error


def _address(url: str) -> tuple[SplitResult, str, int | None]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:  # brackets that do not match, a port that is none
        raise PushError(f"--url is no address, {error}: got {url!r}, allowed is such as {EXAMPLE}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise PushError(f"--url must be the address of a Grafana, such as {EXAMPLE}, got {url!r}")
    return parts, parts.hostname, port


def _push(api: Any, model: dict[str, Any]) -> str:
    found = _found(api.dashboard.get_dashboard, model["uid"], "dashboard", "meta")
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


def _found(ask: Any, uid: str, *keys: str) -> dict[str, Any] | None:
    """What is there under `uid`, which has `keys` if a Grafana said it; None if nothing is."""
    try:
        answer = ask(uid)
    except GrafanaClientError as error:
        if error.status_code == 404:
            return None
        raise
    if not isinstance(answer, dict) or any(key not in answer for key in keys):
        raise _NotGrafanaError
    return answer
