"""`autoscaling_config`: Serve's own keys, our policy and its parameters, and a fleet that may be empty."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.serve.config import AutoscalingConfig

from app.config import ConfigError, load_config
from app.ingress import Ingress
from app.main import router_settings
from deployments.autoscaling import POLICY


def options(section: dict[str, Any]) -> dict[str, Any]:
    """Serve's options of the engine replicas."""
    return load_config({"deployment_config": section}, "cpu").deployment_options()


@pytest.mark.parametrize(
    "section",
    [
        {"autoscaling_config": {"max_replicas": 4}},
        {"num_replicas": "auto"},
        {"num_replicas": "auto", "autoscaling_config": {"max_replicas": 4}},
        {"autoscaling_config": {"max_replicas": 4, "policy": {"policy_kwargs": {"scale_up_steps": 100}}}},
        {
            "autoscaling_config": {
                "max_replicas": 4,
                "target_ongoing_requests": 9,
                "policy": {"policy_function": POLICY},
            }
        },
    ],
)
def test_an_autoscaled_fleet_scales_on_freeness(section: dict[str, Any]) -> None:
    """Serve gets our policy and windows that suit it, and takes them."""
    deployment = serve.deployment(Ingress, name="EngineReplica").options(**options(section))
    scaling = deployment._deployment_config.autoscaling_config
    assert scaling.policy.policy_function == POLICY
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s, scaling.metrics_interval_s) == (5.0, 120.0, 1.0)


def test_the_users_own_values_win() -> None:
    """Windows and parameters that the file gives reach Serve as they are."""
    mine = {"max_replicas": 4, "downscale_delay_s": 7.0, "policy": {"policy_kwargs": {"queue_wait_s": 1.5}}}
    scaling = AutoscalingConfig(**options({"autoscaling_config": mine})["autoscaling_config"])
    assert scaling.downscale_delay_s == 7.0
    assert scaling.policy.policy_kwargs == {"queue_wait_s": 1.5}


@pytest.mark.parametrize(
    "given",
    [
        {"max_replicas": 4, "target_ongoing_requests": 20},
        {"max_replicas": 4, "policy": {"policy_function": "ray.serve.autoscaling_policy:default_autoscaling_policy"}},
    ],
)
def test_another_policy_is_left_alone(given: dict[str, Any]) -> None:
    """A file of Serve LLM with target_ongoing_requests, or one that names a policy, means what it means to Serve."""
    assert options({"autoscaling_config": given})["autoscaling_config"] == given


@pytest.mark.parametrize(
    ("policy", "path", "hint"),
    [
        ({"policy_kwargs": {"scale_up": 5}}, "policy.policy_kwargs.scale_up", "did you mean scale_up_steps"),
        ({"policy_kwargs": {"late_share": 3}}, "policy.policy_kwargs.late_share", "<= 1"),
        ({"policy_kwargs": {"scale_up_steps": 2000}}, "policy.policy_kwargs.scale_down_steps", "> scale_up_steps"),
        ({"policy_function": "no_such_module:policy"}, "policy.policy_function", "module:name"),
    ],
)
def test_a_wrong_policy_is_refused_before_anything_starts(policy: dict[str, Any], path: str, hint: str) -> None:
    """The message names the parameter and what is allowed."""
    with pytest.raises(ConfigError) as refused:
        options({"autoscaling_config": {"max_replicas": 4, "policy": policy}})
    (problem,) = refused.value.problems
    assert problem.path == f"deployment_config.autoscaling_config.{path}"
    assert hint in str(problem)


@pytest.mark.parametrize(("least", "empty"), [(0, True), (1, False)])
def test_requests_wait_for_a_fleet_that_may_be_empty(least: int, empty: bool) -> None:
    """With min_replicas 0 the ingress lets requests in without a replica and the router waits for one to start."""
    section = {"autoscaling_config": {"min_replicas": least, "max_replicas": 2}}
    config = load_config({"deployment_config": section, "ingress": {"cold_start_s": 77.0}}, "cpu")
    assert router_settings(config).get("wait_for_replica_s") == (77.0 if empty else None)
    ingress: Any = SimpleNamespace(_config=config, _router=lambda: None)
    assert Ingress._has_replica(ingress) is empty
