"""The section `tiers`: one table for admission, routing, the engines' order and the limits."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.config import JsonDict

from app.config.errors import Problem, Refused, suggestion
from policies.tiers import MAX_TIERS, Tiers, decaying_headroom

_SECONDS: JsonDict = {"unit": "s"}
_Seconds = Annotated[float, Field(ge=0.001, le=86_400, strict=True, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1, strict=True, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1, strict=True)]
_STANDARD = "standard"


class HeadroomConfig(BaseModel):
    """KV cache kept free for each tier: h_max * exp(-lambda * p) of it for tier p, the sum scaled down to `cap`."""

    model_config = ConfigDict(extra="forbid", populate_by_name=False)

    h_max: _Share = Field(
        default=0.20, description="Of the highest tier.", json_schema_extra={"unit": "share of the KV cache"}
    )
    decay: Annotated[float, Field(ge=0, le=100, strict=True, allow_inf_nan=False)] | Literal["auto"] = Field(
        default=1.0,
        alias="lambda",
        description="How fast it decays from tier to tier; `auto`: 2.5 / (tiers - 1).",
    )
    cap: _Share = Field(
        default=0.35, description="Of all tiers together.", json_schema_extra={"unit": "share of the KV cache"}
    )


class TierLevel(BaseModel):
    """One tier; the first of the list is the highest."""

    model_config = ConfigDict(extra="forbid")
    MOVED: ClassVar[dict[str, str]] = {"priority": "remove it: the place in the list is the priority, 0 the first"}

    name: str = Field(
        pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,31}$", description="How clients, keys, metrics and headers call it."
    )
    headroom: _Share | None = Field(
        default=None,
        description="KV cache that lower tiers leave free for it. Null: by `tiers.headroom`.",
        json_schema_extra={"unit": "share of the KV cache"},
    )
    aging_s: _Seconds | None = Field(
        default=30.0,
        description="Wait that lifts a request of this tier by one tier. Null: never.",
        json_schema_extra=_SECONDS,
    )
    ttft_slo_s: _Seconds | None = Field(
        default=None, description="Promised time to the first token.", json_schema_extra=_SECONDS
    )
    tpot_slo_s: _Seconds | None = Field(
        default=None, description="Promised time for each further token.", json_schema_extra=_SECONDS
    )
    max_queued: _Count | None = Field(
        default=None,
        description="Requests of this tier in one ingress process that wait for their first token; one more is "
        "answered 429. Null: bounded by `ingress.max_queued_requests` only.",
        json_schema_extra={"unit": "requests"},
    )
    requests_per_minute: _Count | None = Field(
        default=None,
        description="Of the whole tier in the fleet; each ingress process lets its share through.",
        json_schema_extra={"unit": "requests/min"},
    )
    tokens_per_minute: _Count | None = Field(
        default=None,
        description="Prompt and generated tokens, of the whole tier in the fleet.",
        json_schema_extra={"unit": "tokens/min"},
    )
    service_tiers: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description="Values of OpenAI's `service_tier` that mean this tier."
    )


def _default_levels() -> list[TierLevel]:
    table: tuple[dict[str, Any], ...] = (
        {"name": "critical", "service_tiers": ["priority"]},
        {"name": _STANDARD, "service_tiers": ["default"]},
        {"name": "relaxed"},
        {"name": "background", "service_tiers": ["flex", "batch"]},
    )
    return [TierLevel(**row) for row in table]


class TiersConfig(BaseModel):
    """Priority tiers; fixed while the fleet runs."""

    model_config = ConfigDict(extra="forbid")

    levels: list[TierLevel] = Field(
        default_factory=_default_levels, description=f"The tiers, the highest first; 1 to {MAX_TIERS}."
    )
    default: str | None = Field(
        default=None,
        description=f"Tier of requests that ask for none, or for an unknown one. Null: `{_STANDARD}`, or the only one.",
    )
    headroom: HeadroomConfig = Field(
        default_factory=lambda: HeadroomConfig.model_validate({}),
        description="Share of the KV cache kept free for the tiers that give no `headroom` of their own.",
    )

    @field_validator("levels")
    @classmethod
    def _a_table(cls, levels: list[TierLevel]) -> list[TierLevel]:
        allowed = f"1 to {MAX_TIERS} tiers"
        if not 1 <= len(levels) <= MAX_TIERS:
            raise Refused(Problem("", "wrong number of tiers", len(levels), allowed, "add, remove or merge some"))
        return levels

    @model_validator(mode="after")
    def _fits_together(self) -> TiersConfig:
        names, levels = self.names, list(enumerate(self.levels))
        problems = _taken_twice([(f"levels[{i}].name", level.name) for i, level in levels], "tier")
        problems += _taken_twice(
            [(f"levels[{i}].service_tiers[{j}]", v) for i, level in levels for j, v in enumerate(level.service_tiers)],
            "service_tier",
        )
        if self.default is None and _STANDARD not in names and len(names) > 1:
            what = f"there is no tier `{_STANDARD}` to be the default"
            problems.append(Problem("default", what, None, ", ".join(names), "name the default tier"))
        elif self.default is not None and self.default not in names:
            remedy = suggestion(self.default, names) + "name one of `tiers.levels`"
            problems.append(Problem("default", "no such tier", self.default, ", ".join(names), remedy))
        elif (total := sum(self.headroom_shares)) >= 1:
            what = f"the tiers' headroom adds up to {total:g}: nothing is left to run in"
            problems.append(Problem("levels", what, self.headroom_shares, "less than 1 together", "lower some"))
        if problems:
            raise Refused(*problems)
        return self

    @property
    def names(self) -> list[str]:
        """Names of the tiers, the highest first."""
        return [level.name for level in self.levels]

    @property
    def default_tier(self) -> int:
        """Index of the default tier."""
        if len(self.levels) == 1:
            return 0
        return self.names.index(self.default or _STANDARD)

    @property
    def headroom_shares(self) -> list[float]:
        """Share of the KV cache kept free for each tier; one tier alone needs none."""
        count, formula = len(self.levels), self.headroom
        shares = decaying_headroom(count, formula.h_max, formula.decay, formula.cap) if count > 1 else (0.0,)
        return [
            share if level.headroom is None else level.headroom
            for level, share in zip(self.levels, shares, strict=True)
        ]

    def tiers(self) -> Tiers:
        """The tiers as policies know them."""
        aging = (math.inf if level.aging_s is None else level.aging_s for level in self.levels)
        return Tiers(tuple(self.headroom_shares), tuple(aging))

    def spec(self) -> dict[str, list[Any]]:
        """The tiers as they travel to replicas and routers: one entry per tier, seconds and shares, None: none."""
        return {
            "names": [*self.names],
            "headroom": [*self.headroom_shares],
            **{
                name: [getattr(level, name) for level in self.levels]
                for name in ("aging_s", "ttft_slo_s", "tpot_slo_s")
            },
        }


def _taken_twice(places: list[tuple[str, str]], what: str) -> list[Problem]:
    seen: set[str] = set()
    problems = []
    for path, value in places:
        if value in seen:
            problems.append(Problem(path, f"{what} is taken already", value, "each once", "rename or remove one"))
        seen.add(value)
    return problems
