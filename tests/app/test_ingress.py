"""The ingress deployment itself, without Serve: what it refuses at its start, and what it says of the fleet."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app import ingress
from app.config import ConfigError
from app.ingress import Ingress
from deployments.wire import ReplicaReport


def start(config: dict[str, Any]) -> None:
    """Run the constructor up to its first refusal."""
    asyncio.run(cast(Any, Ingress).__init__(SimpleNamespace(), config, "/model", None, None))


def test_open_host_without_keys_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by plain `serve run`: with Serve listening for other machines an ingress without keys does not start."""
    monkeypatch.setattr(ingress, "http_host", lambda: "0.0.0.0")
    with pytest.raises(ConfigError, match="open to other machines"):
        start({})


def test_keys_are_read_at_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A list of keys that is missing or wrong stops the ingress, and names the field."""
    monkeypatch.setattr(ingress, "http_host", lambda: "0.0.0.0")
    file = tmp_path / "keys.yaml"
    with pytest.raises(ConfigError, match=r"api_keys\.file: No such file"):
        start({"api_keys": {"file": str(file)}})
    file.write_text("- {tenant: acme}")
    with pytest.raises(ConfigError, match=r"key 1 \(line 1\)\.hash"):
        start({"api_keys": {"file": str(file)}})
    monkeypatch.delenv("TIDEGATE_KEYS", raising=False)
    with pytest.raises(ConfigError, match=r"api_keys\.env"):
        start({"api_keys": {"env": "TIDEGATE_KEYS"}})


def test_fleet_state() -> None:
    """Each replica's last report with its tiers and its freeness; nothing before there is a router."""
    report = ReplicaReport(
        "r1", 1, 0.0, "serving", 90, 100, 32, 3, 2, 700, 4, 512, 32, 1, [], [1, 2], [0, 2]
    )  # fmt: skip
    free = {"F": math.inf, "F_normal": 5.0, "phi": 1.6}
    router = SimpleNamespace(reports={"r1": report}, freeness=lambda: {"r1": free})

    def state(router: Any) -> Any:
        return asyncio.run(cast(Any, Ingress).fleet_state(SimpleNamespace(_router=lambda: router)))

    assert state(None) == {}
    told = state(router)["r1"]
    assert (told["state"], told["running"], told["waiting"]) == ("serving", 3, 2)
    assert (told["running_by_tier"], told["waiting_by_tier"], told["freeness"]) == ([1, 2], [0, 2], free)
    assert (told["free_blocks"], told["total_blocks"], told["queued_tokens"], told["preemptions"]) == (90, 100, 700, 1)


def test_migration_state_is_the_coordinators() -> None:
    """Who has a handle of the application learns the coordinator's state from it."""

    async def answer() -> dict[str, Any]:
        return {"moves": {}}

    coordinator = SimpleNamespace(state=SimpleNamespace(remote=answer))
    asked = cast(Any, Ingress).migration_state(SimpleNamespace(_coordinator=coordinator))
    assert asyncio.run(asked) == {"moves": {}}
