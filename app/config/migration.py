"""The section `migration`: which requests move from replica to replica while they run, and how."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from app.config.errors import Problem, Refused
from deployments.settings import MigrationSettings
from policies.migration.events import Limits
from policies.migration.pairing import Pairing
from policies.migration.victims import Victims
from policies.registry import PolicyError

_SECONDS: JsonDict = {"unit": "s"}
_BLOCKS: JsonDict = {"unit": "KV blocks"}
_MOVES: JsonDict = {"unit": "moves"}
_PAIRING, _VICTIMS, _LIMITS = Pairing(), Victims(), Limits()


class MigrationConfig(BaseModel):
    """Live migration; the policies behind it are in policies/migration/."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = Field(
        default=True,
        strict=True,
        description="Move requests to even out load, gather free KV cache and make way for higher tiers. Without it "
        "they still move off replicas that drain, and by hand.",
    )
    tick_s: float = Field(
        default=0.25,
        ge=0.01,
        le=60,
        strict=True,
        description="How often the coordinator looks for moves.",
        json_schema_extra=_SECONDS,
    )
    tier_grace_s: float = Field(
        default=0.5,
        ge=0,
        le=60,
        strict=True,
        description="Where a request of a higher tier finds a replica full of lower tiers and there is room elsewhere, "
        "how long it waits for runners to be moved away before they are sent back to the queue; 0: not at all.",
        json_schema_extra=_SECONDS,
    )
    threshold: float = Field(
        default=_PAIRING.threshold,
        gt=0,
        le=1000,
        strict=True,
        description="Least gap in normalised freeness between two replicas to even out.",
    )
    per_replica: int = Field(
        default=_PAIRING.per_replica,
        ge=1,
        le=64,
        strict=True,
        description="Into a replica, and out of it, at a time.",
        json_schema_extra=_MOVES,
    )
    drain_out: int = Field(
        default=_PAIRING.drain_out,
        ge=1,
        le=64,
        strict=True,
        description="Out of a replica that drains, at a time.",
        json_schema_extra=_MOVES,
    )
    share: float = Field(
        default=_PAIRING.share,
        gt=0,
        le=1,
        strict=True,
        description="Of a destination's free KV cache, what moves may take at a time.",
    )
    cooldown_s: float = Field(
        default=_PAIRING.cooldown_s,
        ge=0,
        le=3600,
        strict=True,
        description="A replica that took a request gives none to even out load for so long, and the reverse.",
        json_schema_extra=_SECONDS,
    )
    request_cooldown_s: float = Field(
        default=_VICTIMS.cooldown_s,
        ge=0,
        le=3600,
        strict=True,
        description="A request that moved stays for so long, unless its replica drains.",
        json_schema_extra=_SECONDS,
    )
    min_remaining: int = Field(
        default=_VICTIMS.min_remaining,
        ge=0,
        strict=True,
        description="A running request that may generate fewer than this stays, unless its replica drains.",
        json_schema_extra={"unit": "tokens"},
    )
    max_mib_per_s: Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)] | None = Field(
        default=None,
        description="KV cache copied in the whole fleet, drains not counted. Null: no cap.",
        json_schema_extra={"unit": "MiB/s"},
    )
    stage_blocks: int = Field(
        default=_LIMITS.stage_blocks,
        ge=1,
        le=4096,
        strict=True,
        description="Copied at a time while the request decodes; more is faster and slows the other requests.",
        json_schema_extra=_BLOCKS,
    )
    last_stage_blocks: int = Field(
        default=_LIMITS.last_stage_blocks,
        ge=0,
        le=4096,
        strict=True,
        description="Full blocks that may be left for the pause, in which the request decodes nowhere.",
        json_schema_extra=_BLOCKS,
    )
    commit_s: float = Field(
        default=_LIMITS.commit_s,
        gt=0,
        le=600,
        strict=True,
        description="Patience for the destination's first token before the source asks what became of the request.",
        json_schema_extra=_SECONDS,
    )
    lease_s: float = Field(
        default=_LIMITS.lease_s,
        gt=0,
        le=3600,
        strict=True,
        description="What a destination keeps for a move is free again when the source has been silent for so long.",
        json_schema_extra=_SECONDS,
    )

    @model_validator(mode="after")
    def _fits_together(self) -> MigrationConfig:
        try:
            self.settings()
        except PolicyError as error:
            message, _, remedy = str(error).partition(f", got {getattr(self, error.field, None)!r}. ")
            allowed = message.removeprefix(f"{error.field} must be ")
            what = "does not fit the other times of this section"
            got = getattr(self, error.field, None)
            raise Refused(Problem(error.field, what, got, allowed, remedy or "raise it")) from error
        return self

    def settings(self) -> MigrationSettings:
        """The section as replicas and coordinator take it; PolicyError for times that do not fit together."""
        longest = max(_LIMITS.keep_s, 4 * (self.lease_s + self.commit_s))  # a move is remembered for longer than both
        return MigrationSettings(
            enabled=self.enabled,
            tick_s=self.tick_s,
            tier_grace_s=self.tier_grace_s,
            max_bytes_per_s=None if self.max_mib_per_s is None else self.max_mib_per_s * 2**20,
            pairing=Pairing(self.threshold, self.per_replica, self.drain_out, self.share, self.cooldown_s),
            victims=Victims(self.request_cooldown_s, self.min_remaining),
            limits=Limits(
                stage_blocks=self.stage_blocks,
                last_stage_blocks=self.last_stage_blocks,
                commit_s=self.commit_s,
                lease_s=self.lease_s,
                keep_s=longest,
            ),
        )
