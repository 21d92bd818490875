"""The sections `scheduling` and `balancing`: a policy's name, and its parameters beside it."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.config.errors import Problem, Refused, suggestion
from policies.balancing import BALANCING
from policies.registry import PolicyError, Registry
from policies.scheduling import SCHEDULING


class PolicyConfig(BaseModel):
    """A policy of a registry; every key that is not a field is one of its parameters."""

    model_config = ConfigDict(extra="allow")
    REGISTRY: ClassVar[Registry]

    policy: str

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameters given for the policy."""
        return dict(self.__pydantic_extra__ or {})

    @model_validator(mode="after")
    def _can_be_made(self) -> PolicyConfig:
        names = self.REGISTRY.names()
        if self.policy not in names:
            remedy = suggestion(self.policy, names) + "choose one of the names"
            raise Refused(Problem("policy", "unknown policy", self.policy, ", ".join(names), remedy))
        known = self.REGISTRY.parameters(self.policy)
        allowed = ", ".join(known) or "no parameters"
        if unknown := [
            Problem(
                key, f"not a parameter of {self.policy}", value, allowed, suggestion(key, known) + "rename or remove it"
            )
            for key, value in self.parameters.items()
            if key not in known
        ]:
            raise Refused(*unknown)
        try:
            self.REGISTRY.make(self.policy, **self.parameters)
        except PolicyError as error:
            raise Refused(_problem(error, self.policy, self.parameters, known)) from error
        return self


class SchedulingConfig(PolicyConfig):
    """Order of the requests inside a replica."""

    REGISTRY = SCHEDULING

    policy: str = Field(default="larry", description="Name of the policy; its parameters stand beside it.")


class BalancingConfig(PolicyConfig):
    """Which replica gets a new request."""

    REGISTRY = BALANCING

    policy: str = Field(default="tiered_sal", description="Name of the policy; its parameters stand beside it.")
    stale_s: float = Field(
        default=1.0,
        ge=0.05,
        le=600,
        strict=True,
        description="A load report older than this is used only as last known state; when all are older, requests are "
        "spread by the router's own in-flight counts.",
        json_schema_extra={"unit": "s"},
    )


def _problem(error: PolicyError, policy: str, given: dict[str, Any], defaults: dict[str, object]) -> Problem:
    """The policy's own message, cut into range and remedy where it has that form."""
    got = given.get(error.field)
    message = str(error).partition(f"{policy!r}: ")[2] or str(error)
    allowed, cut, remedy = message.partition(f", got {got!r}. ")
    if not cut:
        return Problem(error.field, f"refused by {policy}", got, "see the remedy", message)
    default = f" (default {'null' if defaults[error.field] is None else defaults[error.field]})"
    allowed = allowed.removeprefix(f"{error.field} must be ")
    return Problem(error.field, f"refused by {policy}", got, allowed, f"{remedy.rstrip('.')}{default}")
