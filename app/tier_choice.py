"""Which tier a request gets: from its body, its headers or its key, never more than the key allows, never an error."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from app.config.tiers import TiersConfig

#: Values of `service_tier` that vLLM's request classes accept (contract-tested); others are taken out of the body.
SERVICE_TIERS = frozenset({"auto", "default", "flex", "scale", "priority"})
_INT64 = range(-(2**63), 2**63)
#: Body fields that name a tier.
FIELDS = ("priority", "service_tier")


@dataclass(frozen=True, slots=True)
class KeyTiers:
    """What an API key says about tiers: those allowed (None: all) and the one of requests that ask for none."""

    allowed: frozenset[int] | None = None
    default: int | None = None


class TierChoice:
    """The config's tiers as a request names them; tier 0 is the highest."""

    def __init__(self, config: TiersConfig) -> None:
        self.names = config.names
        self.default = config.default_tier
        self._by_name = {name: tier for tier, name in enumerate(self.names)}
        self._by_service = {value: tier for tier, level in enumerate(config.levels) for value in level.service_tiers}

    def choose(self, body: dict[str, Any], header: str | None = None, key: KeyTiers | None = None) -> int:
        """The tier of a request with this JSON body and this X-Vllm-Priority header.

        The first of these that is given decides: `priority` of the body, the header, `service_tier` of the body, the
        key's default, the config's. What it says and nobody understands means the default.
        """
        key = key or KeyTiers()
        default = self.default if key.default is None else key.default
        if (priority := body.get("priority")) is not None:
            tier = self._named(priority)
        elif header is not None:
            tier = self._named(header)
        else:
            service = body.get("service_tier")
            tier = self._by_service.get(service) if isinstance(service, str) else None
        return self._clamp(default if tier is None else tier, key.allowed)

    def _named(self, value: Any) -> int | None:
        """Tier of a number (beyond the last: the last) or a name."""
        if isinstance(value, str):
            value = value.strip()
            if (tier := self._by_name.get(value)) is not None:
                return tier
            value = int(value) if value.removeprefix("-").isdecimal() and len(value) < 20 else None
        if not isinstance(value, int) or isinstance(value, bool):
            return None
        return min(max(value, 0), len(self.names) - 1)

    def _clamp(self, tier: int, allowed: frozenset[int] | None) -> int:
        """The nearest lower tier that is allowed, else the best of those allowed."""
        if allowed is None or tier in allowed:
            return tier
        return min((other for other in allowed if other > tier), default=min(allowed))


def tier_fields(body: bytes) -> tuple[dict[str, Any], bytes]:
    """The fields that name a tier in a JSON body, and the body without those of them that vLLM would refuse.

    A body that is no JSON object comes back as it is: vLLM says what is wrong with it.
    """
    if not any(f'"{name}"'.encode() in body for name in FIELDS):
        return {}, body
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return {}, body
    if not isinstance(content, dict):
        return {}, body
    found = {name: content[name] for name in FIELDS if name in content}
    kept = without_garbage(content)
    return found, body if len(kept) == len(content) else json.dumps(kept).encode()


def without_garbage(body: dict[str, Any]) -> dict[str, Any]:
    """The body without tier fields whose values vLLM's request classes do not know."""
    refused = set()
    priority = body.get("priority", 0)
    if not isinstance(priority, int) or isinstance(priority, bool) or priority not in _INT64:
        refused.add("priority")
    service = body.get("service_tier", "auto")
    if not isinstance(service, str) or service not in SERVICE_TIERS:
        refused.add("service_tier")
    return {name: value for name, value in body.items() if name not in refused}
