"""`deployment_config.autoscaling_config`: Serve's own keys, with our policy and windows that suit it as defaults."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pydantic import ValidationError
from ray.serve.config import AutoscalingConfig

from app.config.errors import Problem, Refused, problems_of, suggestion
from deployments.autoscaling import POLICY
from policies.autoscaling.freeness import FreenessScaling
from policies.registry import PolicyError

#: Serve's keys where the fleet scales on freeness and the user gives none: a replica is asked for its load each second.
_DEFAULTS = {
    "upscale_delay_s": 5.0,
    "downscale_delay_s": 120.0,
    "metrics_interval_s": 1.0,
    "look_back_period_s": 5.0,
}


def scaling(given: dict[str, Any]) -> dict[str, Any]:
    """AutoscalingConfig for Serve: with our policy and its defaults, or as given where it scales by another policy."""
    if not _on_freeness(given):
        return given
    policy = {"policy_kwargs": {}, **(given.get("policy") or {}), "policy_function": POLICY}
    return {**_DEFAULTS, **given, "policy": policy}


def check_autoscaling(given: dict[str, Any]) -> None:
    """Refuse what Serve, or our policy, would refuse only when the application starts."""
    known = AutoscalingConfig.model_fields
    if unknown := [_unknown(key, got, list(known)) for key, got in given.items() if key not in known]:
        raise Refused(*unknown)
    try:
        AutoscalingConfig.model_validate(given)
    except ValidationError as error:
        raise Refused(*problems_of(error, AutoscalingConfig, given)) from error
    except (ImportError, AttributeError, ValueError) as error:  # Serve imports the policy when it reads its name
        path, name = "policy.policy_function", (given.get("policy") or {}).get("policy_function")
        raise Refused(Problem(path, str(error), name, f"`module:name`, {POLICY} by default", "correct it")) from error
    if _on_freeness(given):
        _check_parameters((given.get("policy") or {}).get("policy_kwargs") or {})


def _on_freeness(given: dict[str, Any]) -> bool:
    policy = given.get("policy")
    return bool(policy.get("policy_function", POLICY) == POLICY if policy else "target_ongoing_requests" not in given)


def _check_parameters(given: dict[str, Any]) -> None:
    known, path = [field.name for field in fields(FreenessScaling)], "policy.policy_kwargs"
    if unknown := [_unknown(f"{path}.{key}", got, known) for key, got in given.items() if key not in known]:
        raise Refused(*unknown)
    try:
        FreenessScaling(**given)
    except PolicyError as error:
        allowed, _, rest = str(error).removeprefix(f"{error.field} must be ").partition(", got ")
        remedy = rest.partition(". ")[2] or "set an allowed value or remove the line"
        got = given.get(error.field)
        raise Refused(Problem(f"{path}.{error.field}", "out of range", got, allowed, remedy)) from error


def _unknown(path: str, got: object, known: list[str]) -> Problem:
    remedy = suggestion(path.rpartition(".")[2], known) + "rename or remove it"
    return Problem(path, "unknown key", got, ", ".join(known), remedy)
