"""Settings of replicas and routers: which cores, which policies, and what a live change may contain."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.cpu_binding import bound_cores
from deployments.settings import live_settings, make_policy, policy_spec
from policies.balancing import BALANCING
from policies.registry import PolicyError
from policies.scheduling import SCHEDULING


@given(st.integers(1, 8), st.integers(1, 64), st.integers(0, 200))
def test_replica_gets_as_many_cores_as_threads(threads: int, cores: int, rank: int) -> None:
    """Every thread has a core of the machine, and the replicas of one node fill it before sharing a core."""
    bound = bound_cores(rank, threads, cores).split(",")
    assert len(bound) == threads
    assert {int(core) for core in bound} <= set(range(cores))
    fitting = [core for r in range(cores // threads) for core in bound_cores(r, threads, cores).split(",")]
    assert len(fitting) == len(set(fitting)) == cores // threads * threads


def test_policy_of_a_section() -> None:
    """A section names its policy and gives the parameters beside it; the router's own `stale_s` is not one."""
    section = {"policy": "sal", "beta": 4.0, "stale_s": 2.0}
    assert policy_spec(section) == {"name": "sal", "beta": 4.0}
    assert make_policy(BALANCING, section).beta == 4.0  # type: ignore[attr-defined]
    assert make_policy(SCHEDULING, {"policy": "larry", "alpha": 2.0}).name == "larry"
    assert section == {"policy": "sal", "beta": 4.0, "stale_s": 2.0}


@pytest.mark.parametrize("section", [{"policy": "sla"}, {"policy": "sal", "beta": -1}, {"policy": "sal", "gamma": 1}])
def test_bad_section_is_refused(section: dict[str, Any]) -> None:
    """An unknown policy, an unknown parameter and a bad value raise PolicyError."""
    with pytest.raises(PolicyError):
        make_policy(BALANCING, section)


def test_live_settings_are_handed_on() -> None:
    """The two sections come back as given; one that is missing or null is None."""
    scheduling, balancing = {"policy": "larry", "alpha": 3.0}, {"policy": "p2c", "stale_s": 1.0}
    assert live_settings({"scheduling": scheduling, "balancing": balancing}) == (scheduling, balancing)
    assert live_settings({"scheduling": None, "balancing": balancing}) == (None, balancing)
    assert live_settings({}) == (None, None)


@pytest.mark.parametrize(
    ("user_config", "field"),
    [
        ({"schedulling": {"policy": "fcfs"}}, "schedulling"),
        ({"scheduling": {"alpha": 2.0}}, "scheduling"),
        ({"scheduling": "larry"}, "scheduling"),
        ({"balancing": ["sal"]}, "balancing"),
        ({"scheduling": {"policy": "larry"}, "balancing": {"policy": "sal", "beta": 0}}, "beta"),
        ({"scheduling": {"policy": "lary"}}, "name"),
        ({"tiers": {"levels": []}}, "tiers"),
    ],
)
def test_bad_live_settings_name_the_key(user_config: dict[str, Any], field: str) -> None:
    """A live change that cannot be used is refused as a whole by a PolicyError that names the key."""
    with pytest.raises(PolicyError) as refused:
        live_settings(user_config)
    assert refused.value.field == field
