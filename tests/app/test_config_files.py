"""The Serve files and the reference page that ship with Tidegate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from app.config import UserConfig, load_config
from app.config.docs import reference

ROOT = Path(__file__).parents[2]
FILES = sorted([*ROOT.glob("*.yaml"), *(ROOT / "examples").glob("*.yaml")])


def _device(file: Path) -> Any:
    return "gpu" if ".gpu" in file.name else "cpu"


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(ROOT)) for file in FILES])
def test_every_serve_file_is_valid(file: Path) -> None:
    """Serve's schema, our args and the live settings all accept the file, on the device that its name says."""
    content = yaml.safe_load(file.read_text())
    ServeDeploySchema.model_validate(content)
    (application,) = content["applications"]
    assert application["import_path"] == "app.main:build"
    config = load_config(application["args"], _device(file))
    for deployment in application["deployments"]:
        assert deployment.keys() == {"name", "user_config"}
        live = UserConfig.model_validate(deployment["user_config"])
        assert live.scheduling is not None
        assert live.balancing is not None
    assert config.deployment_config.fleet_size >= 2


def test_there_is_a_default_and_an_example_for_one_and_for_several_gpus() -> None:
    """The files that the documentation names exist."""
    assert {file.name for file in FILES} >= {"serve_config.yaml", "serve_config.gpu.yaml", "serve_config.gpu-tp.yaml"}


def test_the_tensor_parallel_example_fills_eight_gpus() -> None:
    """Its replicas take four GPUs each, as its comments say."""
    content = yaml.safe_load((ROOT / "examples/serve_config.gpu-tp.yaml").read_text())
    config = load_config(content["applications"][0]["args"], "gpu")
    bundles = config.replica_actor_options()["placement_group_bundles"]
    assert sum(bundle["GPU"] for bundle in bundles) * config.deployment_config.fleet_size == 8


def test_the_reference_page_is_current() -> None:
    """docs/configuration.md is what `python -m app.config` prints."""
    assert (ROOT / "docs/configuration.md").read_text() == reference(), (
        "run: python -m app.config > docs/configuration.md"
    )
