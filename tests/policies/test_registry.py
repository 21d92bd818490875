"""Names and parameters of policies, and what a user is told who gets one wrong."""

from __future__ import annotations

from typing import Any

import pytest

from policies.balancing import BALANCING
from policies.registry import PolicyError, Registry
from policies.scheduling import SCHEDULING

EVERY = [(registry, name) for registry in (SCHEDULING, BALANCING) for name in registry.names()]


@pytest.mark.parametrize(("registry", "name"), EVERY)
def test_defaults_work_and_names_agree(registry: Registry[Any], name: str) -> None:
    """Each registered policy can be made without parameters, or with its own defaults, and knows its name."""
    assert registry.make(name).name == name
    assert registry.make(name, **registry.parameters(name)).name == name


def test_the_documented_policies_exist() -> None:
    """The names that configurations use are registered."""
    ordered = ["fcfs", "guarded_larry", "larry", "larry_preemptive", "ltr", "mlfq", "slo_budget", "srpt"]
    batched = ["no_preempt", "pia", "prefill_first", "s3", "sarathi"]
    assert SCHEDULING.names() == sorted(ordered + batched)
    general, tokens = ["least_requests", "p2c", "random", "round_robin"], ["sal", "tiered_sal"]
    assert BALANCING.names() == sorted([*general, *tokens, "infaas_cost", "infaas_pp", "llumnix"])


@pytest.mark.parametrize(
    ("registry", "name", "parameters", "field", "told"),
    [
        (SCHEDULING, "lary", {}, "name", "fcfs, guarded_larry, larry"),
        (SCHEDULING, ["larry"], {}, "name", "fcfs, guarded_larry, larry"),
        (SCHEDULING, "larry", {"aplha": 1}, "aplha", "alpha, memory_unit"),
        (SCHEDULING, "fcfs", {"alpha": 1}, "alpha", "takes none"),
        (SCHEDULING, "larry", {"alpha": 0}, "alpha", "> 0"),
        (SCHEDULING, "larry", {"alpha": float("nan")}, "alpha", "> 0"),
        (SCHEDULING, "larry", {"alpha": float("inf")}, "alpha", "> 0"),
        (SCHEDULING, "larry", {"alpha": "1"}, "alpha", "> 0"),
        (SCHEDULING, "larry", {"alpha": True}, "alpha", "> 0"),
        (SCHEDULING, "larry", {"memory_unit": "gb"}, "memory_unit", "blocks, tokens, mib, fraction"),
        (SCHEDULING, "larry", {"memory_unit": "mib"}, "kv_bytes_per_token", "must be set"),
        (SCHEDULING, "larry", {"memory_unit": "mib", "kv_bytes_per_token": 0}, "kv_bytes_per_token", "> 0"),
        (SCHEDULING, "larry", {"kv_bytes_per_token": 1024}, "kv_bytes_per_token", "set memory_unit to `mib`"),
        (SCHEDULING, "larry", {"preempted_first": "false"}, "preempted_first", "true or false"),
        (SCHEDULING, "guarded_larry", {"guard_s": -1}, "guard_s", ">= 0"),
        (SCHEDULING, "guarded_larry", {"adaptive": 1}, "adaptive", "true or false"),
        (SCHEDULING, "guarded_larry", {"busy_queue": 0}, "busy_queue", ">= 1"),
        (SCHEDULING, "guarded_larry", {"busy_queue": 2.5}, "busy_queue", ">= 1"),
        (BALANCING, "sal", {"beta": 0}, "beta", "> 0"),
        (BALANCING, "sal", {"prior_beta": 0.5}, "prior_beta", ">= 1"),
        (BALANCING, "sal", {"half_life": 0}, "half_life", "> 0"),
        (BALANCING, "sal", {"half_life": 1e18}, "half_life", "<= 1e+06"),
    ],
)
def test_error_names_field_range_and_culprit(
    registry: Registry[Any], name: Any, parameters: dict[str, Any], field: str, told: str
) -> None:
    """A refused name or parameter is named, with what is allowed and what was given; it is a ValueError."""
    with pytest.raises(PolicyError) as refusal:
        registry.make(name, **parameters)
    message = str(refusal.value)
    assert isinstance(refusal.value, ValueError)
    assert refusal.value.field == field
    assert field == "name" or field in message
    assert told in message
    assert str(name) in message


def test_a_name_is_taken_once() -> None:
    """Two policies cannot share a name: the second would silently replace the first."""
    registry: Registry[dict[str, int]] = Registry("test policy")

    @registry.register("one")
    def make(*, depth: int = 1) -> dict[str, int]:
        return {"depth": depth}

    assert registry.make("one", depth=3) == {"depth": 3}
    assert registry.parameters("one") == {"depth": 1}
    with pytest.raises(RuntimeError, match="already registered"):
        registry.register("one")
