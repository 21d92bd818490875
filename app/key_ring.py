"""The API keys that are valid, and the check of a request's key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from app.config.keys import KeyEntry
from app.errors import Unauthorized
from app.rate_limits import Limits
from app.tier_choice import KeyTiers


@dataclass(frozen=True, slots=True)
class Key:
    """What a valid key stands for; `name` is its hash, `limits` None when it has none."""

    name: str
    tenant: str
    tiers: KeyTiers
    limits: Limits | None


class KeyRing:
    """The keys that are valid; without any every request is let in and `check` gives None.

    `tiers` are the names of the tiers, the highest first.
    """

    def __init__(self, entries: Iterable[KeyEntry], tiers: list[str]) -> None:
        self._keys = [(bytes.fromhex(entry.hash), _key(entry, tiers)) for entry in entries]

    def __len__(self) -> int:
        return len(self._keys)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> Key | None:
        """The key of a request, from `Authorization: Bearer` or `x-api-key`; raises Unauthorized."""
        if not self._keys:
            return None
        given = _given(headers)
        if given is None:
            raise _unauthorized("an API key is needed: send `Authorization: Bearer KEY` or `x-api-key: KEY`")
        digest, found = hashlib.sha256(given).digest(), None
        for valid, key in self._keys:  # all of them, so that the time taken does not tell which one it was
            if hmac.compare_digest(valid, digest):
                found = key
        if found is None:
            raise _unauthorized("this API key is not valid")
        return found


def _unauthorized(message: str) -> Unauthorized:
    return Unauthorized(message, headers=[(b"www-authenticate", b'Bearer realm="tidegate"')])


def _given(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    found = {name.lower(): value for name, value in headers}
    scheme, _, token = found.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer" and token.strip():
        return token.strip()
    return found.get(b"x-api-key", b"").strip() or None


def _key(entry: KeyEntry, tiers: list[str]) -> Key:
    allowed = None if entry.tiers is None else frozenset(map(tiers.index, entry.tiers))
    default = None if entry.default_tier is None else tiers.index(entry.default_tier)
    limited = entry.requests_per_minute is not None or entry.tokens_per_minute is not None
    limits = Limits(entry.requests_per_minute, entry.tokens_per_minute) if limited else None
    return Key(entry.hash, entry.tenant, KeyTiers(allowed, default), limits)
