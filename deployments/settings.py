"""What replicas, routers and coordinator are set to; policies as users write them: {"policy": name, parameters...}."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from policies.balancing import BALANCING
from policies.migration.events import Limits
from policies.migration.pairing import Pairing
from policies.migration.victims import Victims
from policies.registry import PolicyError, Registry
from policies.scheduling import SCHEDULING

P = TypeVar("P")

_NOT_PARAMETERS = ("policy", "stale_s")


@dataclass(frozen=True, slots=True)
class MigrationSettings:
    """Which moves are made, which request makes one, and how; `enabled` False: only those by hand and drains.

    `tick_s`: the coordinator pairs replicas so often. `max_bytes_per_s` of KV in its moves and those by hand, None: as
    many as there are. `tier_grace_s`: how long a higher tier waits for runners of lower ones to be moved away.
    """

    enabled: bool = True
    tick_s: float = 0.25
    tier_grace_s: float = 0.5
    max_bytes_per_s: float | None = None
    pairing: Pairing = field(default_factory=Pairing)
    victims: Victims = field(default_factory=Victims)
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """Where spans go and how many: `endpoint` is a URL (None: the SDK's), `sample_ratio` the share of new traces."""

    exporter: Literal["console", "otlp"]
    endpoint: str | None = None
    sample_ratio: float = 1.0
    service_name: str = "tidegate"


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """What one engine replica is started with.

    `engine_args` are AsyncEngineArgs keywords; `tiers` has the lists `headroom`, `aging_s`, `ttft_slo_s`, `tpot_slo_s`
    with one entry per tier, None where a tier has none. `threads` are engine threads on CPU, each bound to a core:
    replica i of a node takes cores i*threads, ... modulo the node's cores (vLLM's own choice puts every replica on the
    first ones). None leaves binding alone (GPU). After `graceful_shutdown_timeout_s` seconds Serve kills a replica that
    it stops. An engine with work that makes no step for `stall_s` seconds is dead; None: it may take any time.
    `tracing` None: no spans.
    """

    engine_args: dict[str, Any]
    scheduling: dict[str, Any]
    balancing: dict[str, Any]
    tiers: dict[str, Any]
    threads: int | None = None
    migration: MigrationSettings = field(default_factory=MigrationSettings)
    graceful_shutdown_timeout_s: float = 600.0
    stall_s: float | None = 60.0
    tracing: TracingSettings | None = None


def policy_spec(settings: dict[str, Any]) -> dict[str, Any]:
    """`{"name": policy, **parameters}` of a `scheduling` or `balancing` section."""
    return {"name": settings["policy"], **{k: v for k, v in settings.items() if k not in _NOT_PARAMETERS}}


def make_policy(registry: Registry[P], settings: dict[str, Any]) -> P:
    """The policy of a section; PolicyError (a ValueError) names what is wrong with it."""
    spec = policy_spec(settings)
    return registry.make(spec.pop("name"), **spec)


def live_settings(user_config: dict[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The `scheduling` and `balancing` sections of a user_config, None where it has none.

    Raises PolicyError, which names the key, if any part of it cannot be used: all of it changes, or nothing.
    """
    registries: dict[str, Registry[Any]] = {"scheduling": SCHEDULING, "balancing": BALANCING}
    for key, section in user_config.items():
        if key == "tiers":
            raise PolicyError("tiers are fixed while the fleet runs: write them below `args`, not in user_config.", key)
        if key not in registries:
            raise PolicyError(f"user_config has no key {key!r}: it takes {', '.join(registries)}.", key)
        if section is None:
            continue
        if not isinstance(section, dict) or "policy" not in section:
            raise PolicyError(f"user_config.{key} must be a mapping with the key `policy`, got {section!r}.", key)
        make_policy(registries[key], section)
    return user_config.get("scheduling"), user_config.get("balancing")
