"""The application's configuration in Serve: what is read from its details, and what a change deploys."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from ray.serve._private.common import ReplicaState
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from deployments import serve_config

FILE: dict[str, Any] = {
    "name": "tidegate",
    "route_prefix": "/",
    "import_path": "app.main:build",
    "args": {"tiers": {"default": "standard"}},
    "deployments": [{"name": "EngineReplica", "user_config": {"scheduling": {"policy": "larry", "alpha": 1.0}}}],
}
OTHER = {"name": "other", "route_prefix": "/other", "import_path": "a:b"}


class Client:
    """Serve's client over fixed details."""

    def __init__(self, file: dict[str, Any] | None, **more: Any) -> None:
        state = {"state": ReplicaState.RUNNING}
        application = {
            "status": ApplicationStatus.RUNNING,
            "message": "",
            "deployed_app_config": file,
            "deployments": {
                "EngineReplica": {"target_num_replicas": 3, "replicas": [state, state, {"state": "STARTING"}]}
            },
        }
        loose: dict[str, Any] = {"deployed_app_config": None, "status": "RUNNING", "message": "", "deployments": {}}
        other = {**application, "deployed_app_config": OTHER}
        self.details = {"applications": {"tidegate": application, "other": other, "loose": loose}, **more}
        self.deployed: list[ServeDeploySchema] = []

    def get_serve_details(self) -> dict[str, Any]:
        """A copy, as what comes from an actor is."""
        return copy.deepcopy(self.details)

    def deploy_apps(self, config: ServeDeploySchema) -> None:
        """Remember it."""
        self.deployed.append(config)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    def put(client: Client) -> Client:
        monkeypatch.setattr(serve_config, "_get_global_client", lambda: client)
        return client

    return put


def test_what_serve_says(use: Any) -> None:
    """Status, replicas by state, targets and the live settings of the file; an unknown application is UNKNOWN."""
    use(Client(FILE))
    found = serve_config.deployed("tidegate")
    assert (found.status, found.deployments["EngineReplica"]) == ("RUNNING", {"RUNNING": 2, "STARTING": 1})
    assert found.targets == {"EngineReplica": 3}
    assert found.user_config == {"scheduling": {"policy": "larry", "alpha": 1.0}}
    assert serve_config.deployed("nobody").status == "UNKNOWN"
    assert serve_config.deployed("loose").user_config is None


def test_a_change_is_the_file_with_one_section_changed(use: Any) -> None:
    """Everything else of this application, the other declared ones and the capacity are deployed as they are."""
    client = use(Client(FILE, target_capacity=50.0))
    serve_config.change_user_config("tidegate", {"balancing": {"policy": "p2c"}})
    (config,) = client.deployed
    ours, other = config.applications
    changed = ours.model_dump(exclude_unset=True)
    (entry,) = changed.pop("deployments")
    assert entry["user_config"] == {"scheduling": {"policy": "larry", "alpha": 1.0}, "balancing": {"policy": "p2c"}}
    assert changed == {key: value for key, value in FILE.items() if key != "deployments"}
    assert other.model_dump(exclude_unset=True) == OTHER
    assert config.target_capacity == 50.0


def test_a_file_without_live_settings(use: Any) -> None:
    """They are added where there were none."""
    client = use(Client({key: value for key, value in FILE.items() if key != "deployments"}))
    serve_config.change_user_config("tidegate", {"scheduling": {"policy": "fcfs"}})
    (entry,) = client.deployed[0].applications[0].model_dump(exclude_unset=True)["deployments"]
    assert entry == {"name": "EngineReplica", "user_config": {"scheduling": {"policy": "fcfs"}}}


def test_no_file_no_change(use: Any) -> None:
    """An application that was started from Python is refused with the remedy."""
    client = use(Client(None))
    with pytest.raises(serve_config.NotDeclaredError, match="serve deploy"):
        serve_config.change_user_config("tidegate", {"scheduling": {"policy": "fcfs"}})
    assert client.deployed == []
