"""What moves cost in virtual time, and what the coordinator of a simulated fleet is set to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from deployments.settings import MigrationSettings
from policies.migration.events import Limits
from policies.migration.pairing import Pairing
from policies.migration.victims import Victims
from policies.registry import number


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a move costs beyond the steps that it waits for.

    bandwidth: bytes/s of KV that a replica (all its devices together) sends, and as many that it takes in at the same
    time; transfers of a replica wait for each other. message_s: seconds of a message one way. handover_s: seconds in
    the pause beyond message, copy and steps. slowdown: share by which steps of both replicas take longer meanwhile.

    Defaults: 64 Gb/s, the network of Llumnix's A10 hosts (Sun et al., OSDI 2024, section 6.1; it measured pauses of 20
    to 30 ms and <= 1 % slowdown). Message and hand-over together: the 4 to 8 ms that two vLLM 0.32 engines on CPU
    took between the last token of one and the step of the other. A slowdown of 0.035 is what 8 requests had there
    while stages of 16 blocks were copied.
    """

    bandwidth: float = 8e9
    message_s: float = 1e-3
    handover_s: float = 4e-3
    slowdown: float = 0.0

    def __post_init__(self) -> None:
        if self.bandwidth != math.inf:
            number("bandwidth", self.bandwidth, "Bytes/s; 8e9 is the default.", above=0)
        for name in ("message_s", "handover_s", "slowdown"):
            number(name, getattr(self, name), "Leave it out for the default.", low=0)


@dataclass(frozen=True, slots=True)
class Migration:
    """Requests move as in production: `settings` are the product's; `enabled` False leaves drains."""

    settings: MigrationSettings = field(default_factory=MigrationSettings)
    transfer: Transfer = field(default_factory=Transfer)


def migration(settings: dict[str, Any]) -> Migration:
    """The Migration of flat settings: keys of Transfer, MigrationSettings, Pairing, Limits and Victims.

    `request_cooldown_s` is the cool-down of a request (Victims), `cooldown_s` that of a replica (Pairing), as in
    docs/configuration.md. ValueError names what is wrong.
    """
    left = dict(settings)

    def take(kind: type, **names: str) -> dict[str, Any]:
        known = {names.get(field.name, field.name): field.name for field in fields(kind)}
        return {known[key]: left.pop(key) for key in list(left) if key in known}

    victims = Victims(**take(Victims, cooldown_s="request_cooldown_s"))
    pairing, limits, transfer = Pairing(**take(Pairing)), Limits(**take(Limits)), Transfer(**take(Transfer))
    plain = take(MigrationSettings)
    if left:
        raise ValueError(f"migration has no setting {', '.join(left)}: see docs/simulator.md for those that there are")
    plain |= {"victims": victims, "pairing": pairing, "limits": limits}
    return Migration(MigrationSettings(**plain), transfer)
