"""What `/status.json` says: its schema, and how it is made from the coordinator's state and Serve's.

`python -m app status --json` prints the same. Times `t` are wall-clock seconds, ages seconds, KV in blocks.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from app.config.policy import BalancingConfig
from app.config.schema import TidegateConfig
from deployments.serve_config import Deployed
from policies.balancing import BALANCING
from policies.registry import Registry
from policies.scheduling import SCHEDULING


@dataclass(frozen=True, slots=True)
class About:
    """What the page knows without asking: the model's name, the tiers, and the settings it was started with.

    `tiers` are (name, share of the KV cache kept free), `settings` the sections `scheduling` and `balancing` of `args`.
    """

    model: str
    tiers: tuple[tuple[str, float], ...]
    settings: dict[str, dict[str, Any]]


def about(config: TidegateConfig) -> About:
    """What follows from the configuration."""
    return About(
        model=config.model_id,
        tiers=tuple(zip(config.tiers.names, config.tiers.headroom_shares, strict=True)),
        settings=config.user_config(),
    )


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Tier(_Part):
    """A priority tier; the first of the list is the highest."""

    name: str
    headroom: float = Field(description="Share of the KV cache that is kept free while the tier is present.")


class TierLoad(_Part):
    """Requests and KV blocks of one tier on one replica."""

    running: int
    waiting: int
    blocks: int = Field(description="Of its running requests; half a second old, shared blocks once for each.")


class Replica(_Part):
    """One replica by its last load report."""

    id: str
    state: str = Field(description="serving, draining or dead.")
    running: int
    waiting: int
    max_num_seqs: int = Field(description="Requests that can run at once.")
    queued_tokens: int = Field(description="Prompt tokens that are not computed yet.")
    total_blocks: int
    used_blocks: int
    headroom_blocks: float = Field(description="Kept free for the tiers that are present.")
    head_blocks: int = Field(description="Wanted by the head of the queue, 0 if none waits.")
    block_size: int = Field(description="Tokens in a block.")
    tiers: list[TierLoad] = Field(description="One for each tier of the fleet.")
    phi: float | None = Field(description="Normalised freeness (docs/policies.md); null while it drains.")
    blocked: bool = Field(description="Whether the head of the queue waits for KV blocks or a place.")
    preemptions: int
    report_age_s: float


class Moving(_Part):
    """Requests that are being moved from one replica to another now."""

    source: str
    destination: str
    count: int


class Event(_Part):
    """Something that happened; the newest comes first."""

    number: int
    t: float
    kind: str = Field(description="serving, draining, dead, gone, empty, move, order or settings.")
    text: str
    replica: str | None
    destination: str | None
    reason: str | None
    count: int


class Settings(_Part):
    """The live settings in force; `changeable` is null, or why this page cannot change them."""

    scheduling: dict[str, Any]
    balancing: dict[str, Any]
    choices: dict[str, dict[str, dict[str, Any]]] = Field(
        description="Section -> policy -> its parameters with their defaults."
    )
    changeable: str | None


class Migration(_Part):
    """Moves by policy, and how many ended how since the coordinator started: reason -> outcome -> moves."""

    enabled: bool
    paused: bool
    moves: dict[str, dict[str, int]]


class Totals(_Part):
    """Sums over the replicas; blocks of those that serve."""

    replicas: int
    serving: int
    running: int
    waiting: int
    total_blocks: int
    used_blocks: int


class Source(_Part):
    """Whether one of the two that were asked answered; `since` is when the facts from it are from."""

    answers: bool
    since: float | None
    problem: str | None


class Status(_Part):
    """The whole fleet at one moment."""

    t: float
    application: str
    model: str
    node: str = Field(description="Address of the Ray node that this page runs on, the cluster's head.")
    serve_status: str = Field(description="Serve's word for the application: RUNNING, DEPLOYING, UNHEALTHY, ...")
    serve_message: str
    deployments: dict[str, dict[str, int]] = Field(description="Deployment -> state in Serve -> replicas.")
    targets: dict[str, int] = Field(description="Deployment -> replicas that it should have.")
    coordinator: Source
    serve: Source
    actions: bool = Field(description="Whether a token is set, so that actions are possible.")
    tiers: list[Tier]
    totals: Totals
    replicas: list[Replica]
    moving: list[Moving]
    migration: Migration
    settings: Settings
    events: list[Event]


def make_status(
    about: About,
    state: dict[str, Any] | None,
    deployed: Deployed | None,
    *,
    application: str,
    t: float,
    node: str,
    actions: bool,
    coordinator: Source,
    serve: Source,
) -> Status:
    """`state` is the coordinator's, `deployed` Serve's; None: not heard of yet."""
    state = state or {"replicas": {}, "moves": {}, "events": [], "enabled": False, "paused": False, "balancing": None}
    deployed = deployed or Deployed()
    replicas = [_replica(name, row, len(about.tiers)) for name, row in sorted(state["replicas"].items())]
    serving = [replica for replica in replicas if replica.state == "serving"]
    pairs = Counter((name, to) for name, row in sorted(state["replicas"].items()) for to in row["moving"])
    live = deployed.user_config or {}
    return Status(
        t=t,
        application=application,
        model=about.model,
        node=node,
        serve_status=deployed.status,
        serve_message=deployed.message,
        deployments=deployed.deployments,
        targets=deployed.targets,
        coordinator=coordinator,
        serve=serve,
        actions=actions,
        tiers=[Tier(name=name, headroom=share) for name, share in about.tiers],
        totals=Totals(
            replicas=len(replicas),
            serving=len(serving),
            running=sum(replica.running for replica in replicas),
            waiting=sum(replica.waiting for replica in replicas),
            total_blocks=sum(replica.total_blocks for replica in serving),
            used_blocks=sum(replica.used_blocks for replica in serving),
        ),
        replicas=replicas,
        moving=[Moving(source=source, destination=to, count=count) for (source, to), count in pairs.items()],
        migration=Migration(enabled=state["enabled"], paused=state["paused"], moves=state["moves"]),
        settings=Settings(
            scheduling=live.get("scheduling") or about.settings["scheduling"],
            balancing=state["balancing"] or live.get("balancing") or about.settings["balancing"],
            choices=_choices(),
            changeable=None
            if deployed.user_config is not None
            else "Serve did not answer, or the application was not deployed from a Serve file",
        ),
        events=[Event(**event) for event in state["events"]],
    )


@cache
def _choices() -> dict[str, dict[str, dict[str, Any]]]:
    sections: dict[str, Registry[Any]] = {"scheduling": SCHEDULING, "balancing": BALANCING}
    more = {"balancing": {"stale_s": BalancingConfig.model_fields["stale_s"].default}}
    return {
        section: {name: {**registry.parameters(name), **more.get(section, {})} for name in registry.names()}
        for section, registry in sections.items()
    }


def _replica(name: str, row: dict[str, Any], tiers: int) -> Replica:
    phi = row["phi"]
    same = ("state", "running", "waiting", "max_num_seqs", "queued_tokens", "total_blocks", "head_blocks")
    return Replica(
        id=name,
        **{key: row[key] for key in (*same, "block_size", "blocked", "preemptions", "report_age_s")},
        used_blocks=row["total_blocks"] - row["free_blocks"],
        headroom_blocks=row["headroom_blocks"],
        tiers=[
            TierLoad(
                running=_of(row["running_by_tier"], tier),
                waiting=_of(row["waiting_by_tier"], tier),
                blocks=_of(row["blocks_by_tier"], tier),
            )
            for tier in range(tiers)
        ],
        phi=phi if phi is not None and math.isfinite(phi) else None,
    )


def _of(by_tier: list[int], tier: int) -> int:
    return by_tier[tier] if tier < len(by_tier) else 0
