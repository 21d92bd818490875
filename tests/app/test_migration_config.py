"""The section `migration`, the stall bound, and what the deployments get of them."""

from __future__ import annotations

from typing import Any

import pytest
from ray import serve

from app.config import ConfigError, load_config
from deployments.settings import MigrationSettings
from policies.migration.events import Limits
from policies.migration.pairing import Pairing
from policies.migration.victims import Victims


class Stub:
    """Stands for a deployment's class, to let Serve check options without a cluster."""


def test_the_defaults_are_the_policies() -> None:
    """An empty section means what the policies mean by default: no default is written twice."""
    assert load_config({}, "cpu").migration.settings() == MigrationSettings()


def test_each_key_reaches_its_policy() -> None:
    """Every key of the section arrives where it acts, in the policy's unit."""
    section = {
        "enabled": False,
        "tick_s": 0.5,
        "tier_grace_s": 2.0,
        "threshold": 0.3,
        "per_replica": 2,
        "drain_out": 8,
        "share": 0.5,
        "cooldown_s": 0.0,
        "request_cooldown_s": 1.0,
        "min_remaining": 0,
        "max_mib_per_s": 2.0,
        "stage_blocks": 32,
        "last_stage_blocks": 0,
        "commit_s": 3.0,
        "lease_s": 20.0,
    }
    config = load_config({"migration": section}, "cpu")
    assert set(section) == set(type(config.migration).model_fields), "a key is not tested"
    assert config.migration.settings() == MigrationSettings(
        enabled=False,
        tick_s=0.5,
        tier_grace_s=2.0,
        max_bytes_per_s=2.0 * 2**20,
        pairing=Pairing(0.3, 2, 8, 0.5, 0.0),
        victims=Victims(1.0, 0),
        limits=Limits(stage_blocks=32, last_stage_blocks=0, commit_s=3.0, lease_s=20.0, keep_s=92.0),
    )


def test_any_times_that_are_accepted_fit_together() -> None:
    """The longest lease and the longest commit still leave a destination that remembers its moves long enough."""
    config = load_config({"migration": {"commit_s": 600.0, "lease_s": 3600.0}}, "cpu")
    limits = config.migration.settings().limits
    assert limits.keep_s > limits.lease_s + limits.pause_s


@pytest.mark.parametrize(
    ("section", "path", "allowed", "remedy"),
    [
        ({"lease_s": 3.0}, "migration.lease_s", "a number > 7", "outlast the longest silence"),
        ({"commit_s": 8.0}, "migration.lease_s", "a number > 13", "outlast the longest silence"),
        ({"tick_s": 0}, "migration.tick_s", ">= 0.01", "default 0.25"),
        ({"share": 1.5}, "migration.share", "<= 1", "default 0.3"),
        ({"per_replica": 0}, "migration.per_replica", ">= 1", "default 1"),
        ({"enabled": "yes"}, "migration.enabled", "true or false", "default True"),
        ({"max_mib_per_s": 0}, "migration.max_mib_per_s", "> 0", "default null"),
        ({"cool_down_s": 1}, "migration.cool_down_s", "cooldown_s", "did you mean cooldown_s"),
    ],
)
def test_what_cannot_be_is_refused(section: dict[str, Any], path: str, allowed: str, remedy: str) -> None:
    """The refusal names field, range and remedy; times that do not fit together name the one to change."""
    with pytest.raises(ConfigError) as refused:
        load_config({"migration": section}, "cpu")
    (problem,) = refused.value.problems
    assert problem.path == path
    assert allowed in problem.allowed
    assert remedy in problem.remedy


def test_stall_bound_may_be_null() -> None:
    """`failover.stall_s` is a minute by default, null is never, below a second is refused."""
    assert load_config({}, "cpu").failover.stall_s == 60.0
    assert load_config({"failover": {"stall_s": None}}, "cpu").failover.stall_s is None
    with pytest.raises(ConfigError, match=r"failover\.stall_s"):
        load_config({"failover": {"stall_s": 0.2}}, "cpu")


def test_the_coordinator_is_one_and_small() -> None:
    """One replica that Serve accepts; with it the default fleet fits two cores; it gets the runtime environment."""
    config = load_config({"runtime_env": {"env_vars": {"A": "1"}}}, "cpu")
    replicas, ingress, options = config.deployment_options(), config.ingress_options(), config.coordinator_options()
    made = serve.deployment(Stub, name="Coordinator").options(**options)
    assert made.num_replicas == 1
    assert options["ray_actor_options"]["runtime_env"] == {"env_vars": {"A": "1"}}
    cpus = replicas["num_replicas"] * replicas["ray_actor_options"]["num_cpus"]
    cpus += ingress["ray_actor_options"]["num_cpus"] + options["ray_actor_options"]["num_cpus"]
    assert cpus <= 2
