"""Requests and tokens per minute, by API key and by tier, and the `x-ratelimit-*` headers that tell them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from app.errors import RateLimited
from policies.limits import Bucket, duration

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Limits:
    """Requests and tokens per minute in the whole fleet; None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


@dataclass(slots=True)
class _Pair:
    """The two buckets of one key or tier; `of` names it in messages."""

    of: str
    requests: Bucket | None
    tokens: Bucket | None


class RateLimits:
    """The buckets of this ingress: of `n` ingress processes each lets through one n-th of every limit.

    A request is let in when each bucket that it is under holds a request, and no token bucket is in debt; its tokens
    are charged as they come.
    """

    def __init__(self, tiers: dict[str, Limits], ingress_replicas: int, clock: Clock = time.monotonic) -> None:
        self._share = 1 / ingress_replicas
        self._clock = clock
        self._tiers = [self._pair(f"tier {name}", limits) for name, limits in tiers.items()]
        self._keys: dict[str, _Pair] = {}

    def _pair(self, of: str, limits: Limits) -> _Pair:
        now = self._clock()
        requests, tokens = (
            None if limit is None else Bucket(limit * self._share, now)
            for limit in (limits.requests_per_minute, limits.tokens_per_minute)
        )
        return _Pair(of, requests, tokens)

    def take(self, tier: int, key: str | None = None, limits: Limits | None = None) -> Charge:
        """Charge one request of this tier and, with its limits, of the key of this name; raises RateLimited.

        A request that is refused costs nothing.
        """
        pairs = [self._tiers[tier]]
        if key is not None and limits is not None:
            if key not in self._keys:
                self._keys[key] = self._pair("this API key", limits)
            pairs.insert(0, self._keys[key])
        charge = Charge(pairs, self._clock)
        charge.admit()
        return charge


class Charge:
    """What one request is charged to."""

    def __init__(self, pairs: list[_Pair], clock: Clock) -> None:
        self._requests = [(pair.of, pair.requests) for pair in pairs if pair.requests is not None]
        self._tokens = [(pair.of, pair.tokens) for pair in pairs if pair.tokens is not None]
        self._clock = clock

    def admit(self) -> None:
        """Take one request of each bucket, or none and raise RateLimited with the longest wait."""
        now = self._clock()
        waits = [
            (bucket.wait(amount, now), what, of, bucket)
            for what, amount, buckets in (("requests", 1.0, self._requests), ("tokens", 0.0, self._tokens))
            for of, bucket in buckets
        ]
        wait, what, of, bucket = max(waits, key=lambda found: found[0], default=(0.0, "", "", None))
        if wait > 0 and bucket is not None:
            seconds = math.ceil(wait)
            limit = math.floor(bucket.capacity)
            raise RateLimited(
                f"{of} is limited to {limit} {what} per minute here; try again in {seconds} s",
                retry_after=seconds,
                reason=f"rate_limit_{what}",
                headers=self.headers(),
            )
        for _, requests in self._requests:
            requests.take(1, now)

    def tokens(self, count: int) -> None:
        """Charge tokens of a prompt or of an answer; this may put the buckets into debt."""
        if not self._tokens:
            return  # called for each step of each sequence
        now = self._clock()
        for _, bucket in self._tokens:
            bucket.take(count, now)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's headers, of the key or the tier, whichever has less left; empty without a limit."""
        now, headers = self._clock(), []
        for what, buckets in (("requests", self._requests), ("tokens", self._tokens)):
            if not buckets:
                continue
            bucket = min((bucket for _, bucket in buckets), key=lambda bucket: bucket.level(now))
            told = {
                "limit": str(math.floor(bucket.capacity)),
                "remaining": str(bucket.remaining(now)),
                "reset": duration(bucket.reset(now)),
            }
            headers += [(f"x-ratelimit-{name}-{what}".encode(), value.encode()) for name, value in told.items()]
        return headers
