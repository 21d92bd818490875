"""What happens to a request before vLLM's serving classes see it: key, tier, session, rate limits."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

from app.config import TidegateConfig
from app.config.keys import KeyEntry
from app.errors import RateLimited
from app.incoming import Incoming
from app.key_ring import Key, KeyRing
from app.rate_limits import Limits, RateLimits
from app.tier_choice import FIELDS, TierChoice, tier_fields, without_garbage
from deployments import metrics
from policies.admission import AdmissionQueue

Headers = Iterable[tuple[bytes, bytes]]


class Reception:
    """Keys, tiers and limits of one ingress. `keys` are the entries of the list that the config points to."""

    def __init__(self, config: TidegateConfig, keys: list[KeyEntry]) -> None:
        levels = config.tiers.levels
        self.tiers = TierChoice(config.tiers)
        self._keys = KeyRing(keys, self.tiers.names)
        self._limits = RateLimits(
            {level.name: Limits(level.requests_per_minute, level.tokens_per_minute) for level in levels},
            config.ingress.num_replicas,
        )
        self.queue: AdmissionQueue[Incoming] = AdmissionQueue(
            config.ingress.max_queued_requests, [level.max_queued for level in levels]
        )

    def authenticate(self, headers: Headers) -> Key | None:
        """The key of an HTTP request, None where none is needed; raises Unauthorized."""
        return self._keys.check(headers)

    def choose_tier(self, request: Incoming, headers: Headers, body: bytes, key: Key | None) -> bytes:
        """Set tier and session of an HTTP request; returns its body without tier fields that vLLM would refuse."""
        given = {name.lower(): value for name, value in headers}
        fields, body = tier_fields(body)
        header = given.get(b"x-vllm-priority")
        request.tier = self.tiers.choose(
            fields, None if header is None else header.decode("latin-1"), None if key is None else key.tiers
        )
        if session := given.get(b"x-session-id"):
            request.session = zlib.crc32(session)
        return body

    def limit(self, request: Incoming, key: Key | None) -> None:
        """Charge a request to the limits of its key and tier; raises RateLimited."""
        take = self._limits.take
        try:
            request.charge = take(request.tier) if key is None else take(request.tier, key.name, key.limits)
        except RateLimited as error:
            metrics.SHEDS.at(self.tiers.names[request.tier], error.reason or "").inc()
            raise

    def call(self, body: dict[str, Any]) -> tuple[Incoming, dict[str, Any]]:
        """A Python handle's request, which needs no key, and its body for vLLM; raises RateLimited."""
        request = Incoming(self.tiers.choose({name: body[name] for name in FIELDS if name in body}))
        self.limit(request, None)
        return request, without_garbage(body)
