"""The Serve files and the reference page that ship with Tidegate."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from app.config import ConfigError, check_file, load_config
from app.config.docs import reference
from app.config.files import IMPORT_PATH
from app.config.keys import parse_keys
from app.errors import NoReplicaAvailable, Shed
from policies.admission import Reason

ROOT = Path(__file__).parents[2]
FILES = sorted([*ROOT.glob("*.yaml"), *(ROOT / "examples").rglob("*.yaml")])


def _device(file: Path) -> Any:
    return "gpu" if ".gpu" in file.name else "cpu"


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(ROOT)) for file in FILES])
def test_every_serve_file_is_valid(file: Path) -> None:
    """Serve's schema, our args and the live settings all accept the file, on the device that its name says."""
    check_file(file, _device(file))
    (application,) = yaml.safe_load(file.read_text())["applications"]
    assert application["import_path"] == IMPORT_PATH
    assert load_config(application["args"], _device(file)).deployment_config.fleet_size >= 2


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


@pytest.mark.parametrize(
    ("old", "new", "path", "remedy"),
    [
        (
            "num_replicas: 2",
            "num_replicas: 0",
            "applications[0].args.deployment_config.num_replicas",
            "remove the line",
        ),
        ("alpha: 1.0", "alfa: 1.0", "applications[0].deployments[0].user_config.scheduling.alfa", "did you mean alpha"),
        (
            "policy: tiered_sal",
            "policy: best",
            "applications[0].deployments[0].user_config.balancing.policy",
            "choose one",
        ),
        ("name: EngineReplica", "name: Engine", "applications[0].deployments[0].name", "did you mean EngineReplica"),
        ("port: 8000", "port: web", "http_options.port", "allowed value"),
        ("import_path:", "import_paht:", "applications[0].import_path", "add it"),
        ("applications:", "applications: [", "{file}", "the place named"),
        ("http_options:", "http_options: []\nno:", "http_options", "its keys below it"),
        ("app.main:build", "app.main:buidl", "applications", "import_path: app.main:build"),
    ],
)
def test_a_mistake_anywhere_in_the_file_is_found(tmp_path: Path, old: str, new: str, path: str, remedy: str) -> None:
    """Serve's keys, args and live settings are all checked, each problem under its full path in the file."""
    text = (ROOT / "serve_config.yaml").read_text()
    assert old in text
    file = tmp_path / "serve.yaml"
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        check_file(file, "cpu")
    problem = caught.value.problems[0]
    assert problem.path == path.format(file=file)
    assert remedy in problem.remedy


def test_a_remedy_names_no_default_of_rays_making(tmp_path: Path) -> None:
    """Ray's schema has a marker object for keys that are not given: it tells a user nothing."""
    file = tmp_path / "serve.yaml"
    deployment = "deployments: [{name: EngineReplica, user_config: [1]}]"
    file.write_text(f"applications: [{{import_path: 'app.main:build', {deployment}}}]")
    with pytest.raises(ConfigError) as caught:
        check_file(file, "cpu")
    (problem,) = caught.value.problems
    assert problem.path == "applications[0].deployments[0].user_config"
    assert problem.remedy == "set an allowed value or remove the line"


@pytest.mark.parametrize("content", [b"", b"- a", b"text", b"{applications: [], x: \xff}"])
def test_what_is_no_serve_file_is_named(tmp_path: Path, content: bytes) -> None:
    """A file that holds something else altogether is named in the problem, whatever it holds."""
    file = tmp_path / "serve.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        check_file(file, "cpu")
    assert [problem.path for problem in caught.value.problems] == [str(file)]


def test_args_of_the_wrong_type_are_a_problem(tmp_path: Path) -> None:
    """Serve's schema says `Dict` without saying of what; that is explained as well."""
    file = tmp_path / "serve.yaml"
    file.write_text("applications: [{import_path: 'app.main:build', args: [1]}]")
    with pytest.raises(ConfigError) as caught:
        check_file(file, "cpu")
    (problem,) = caught.value.problems
    assert (problem.path, problem.what) == ("applications[0].args", "wrong type")
    assert "mapping" in problem.allowed


def test_the_command_checks_a_file_and_says_so(tmp_path: Path) -> None:
    """`python -m app.config FILE` answers 0 for a valid file, 1 and the problems for another."""
    command = [sys.executable, "-m", "app.config"]
    good = subprocess.run([*command, "serve_config.yaml"], cwd=ROOT, capture_output=True, text=True)
    assert (good.returncode, good.stdout) == (0, "serve_config.yaml is valid\n")
    bad = subprocess.run([*command, str(tmp_path / "none.yaml")], cwd=ROOT, capture_output=True, text=True)
    assert bad.returncode == 1
    assert "No such file" in bad.stderr


def test_the_page_on_tiers_and_keys_is_true() -> None:
    """Each YAML block of docs/tiers.md is a valid section or list of keys, and its reasons are those of the errors."""
    page = (ROOT / "docs/tiers.md").read_text()
    table, keys, section = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    config = load_config({**table, **section}, "cpu")
    assert config.api_keys.on
    assert parse_keys(yaml.safe_dump(keys), config.tiers.names, "page")[0].tenant == "acme"
    told = set(re.findall(r"`([a-z_]+)`", "".join(re.findall(r"^\| `.*?\|", page, re.MULTILINE))))
    assert told == {
        *get_args(Reason),
        Shed.reason,
        NoReplicaAvailable.reason,
        "rate_limit_requests",
        "rate_limit_tokens",
    }
