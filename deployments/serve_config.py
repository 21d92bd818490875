"""An application's configuration as Serve runs it: read, and changed as `serve deploy` of an edited file would.

Private names (contract-tested): `ray.serve.context._get_global_client`, its `get_serve_details` and `deploy_apps`.
All functions wait for Serve's controller: call them in a thread.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema


class NotDeclaredError(ValueError):
    """The application was not deployed from a Serve file, so that there is nothing to change."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """What Serve says of an application.

    `status` is Serve's word, `deployments` has the replicas of each by state (`RUNNING`, `STARTING`, ...), `targets`
    how many each should have. `user_config` is that of the engine deployment in the file, None if there is no file.
    """

    status: str = "UNKNOWN"
    message: str = ""
    deployments: dict[str, dict[str, int]] = field(default_factory=dict)
    targets: dict[str, int] = field(default_factory=dict)
    user_config: dict[str, Any] | None = None


def deployed(application: str, deployment: str = "EngineReplica") -> Deployed:
    """Look at an application, and at the `user_config` of one of its deployments."""
    details = _get_global_client().get_serve_details()
    found = details["applications"].get(application)
    if found is None:
        return Deployed()
    file = found.get("deployed_app_config")
    entries = [entry for entry in (file or {}).get("deployments") or [] if entry["name"] == deployment]
    return Deployed(
        _word(found["status"]),
        found.get("message") or "",
        {name: dict(Counter(_word(r["state"]) for r in d["replicas"])) for name, d in found["deployments"].items()},
        {name: int(d.get("target_num_replicas") or 0) for name, d in found["deployments"].items()},
        None if file is None else (entries[0].get("user_config") or {} if entries else {}),
    )


def _word(state: Any) -> str:
    """Serve gives its states as members of an enumeration, or as their values where they came as JSON."""
    return str(getattr(state, "value", state))


def change_user_config(application: str, change: dict[str, Any], deployment: str = "EngineReplica") -> None:
    """Put `change` over the deployment's `user_config`, key by key; running replicas take it up, none restarts.

    Raises NotDeclaredError. The other applications of the cluster are deployed as they are.
    """
    client = _get_global_client()
    details = client.get_serve_details()
    files = {name: app.get("deployed_app_config") for name, app in details["applications"].items()}
    file = files.get(application)
    if file is None:
        raise NotDeclaredError(f"{application!r} was not deployed from a Serve file: `serve deploy` it from one first")
    entries = file["deployments"] = list(file.get("deployments") or [])
    entry = next((entry for entry in entries if entry["name"] == deployment), None)
    if entry is None:
        entries.append(entry := {"name": deployment})
    entry["user_config"] = {**(entry.get("user_config") or {}), **change}
    content: dict[str, Any] = {"applications": [file for file in files.values() if file is not None]}
    if details.get("target_capacity") is not None:
        content["target_capacity"] = details["target_capacity"]
    client.deploy_apps(ServeDeploySchema.model_validate(content))
