"""Rate limits of keys and tiers: what is charged, what is refused, what the headers say."""

from __future__ import annotations

import pytest

from app.errors import RateLimited
from app.rate_limits import Charge, Limits, RateLimits


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def told(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers without their common beginning."""
    return {name.decode().removeprefix("x-ratelimit-"): value.decode() for name, value in headers}


def refused(limits: RateLimits, *request: object) -> RateLimited:
    """The refusal of a request."""
    with pytest.raises(RateLimited) as error:
        limits.take(*request)  # type: ignore[arg-type]
    return error.value


def test_requests_per_minute() -> None:
    """A key's requests go through until they are used up; the refusal says when the next one may come, and costs
    nothing.
    """
    clock = Clock()
    limits = RateLimits({"standard": Limits()}, 1, clock)
    mine = Limits(requests_per_minute=3)
    charges = [limits.take(0, "k", mine) for _ in range(3)]
    assert told(charges[-1].headers()) == {"limit-requests": "3", "remaining-requests": "0", "reset-requests": "1m0s"}
    error = refused(limits, 0, "k", mine)
    assert (error.retry_after, error.reason, error.code) == (20, "rate_limit_requests", "rate_limit_exceeded")
    assert told(error.headers)["remaining-requests"] == "0"
    limits.take(0, "other", mine)
    clock.now += 20
    limits.take(0, "k", mine)
    assert refused(limits, 0, "k", mine).retry_after == 20


def test_tokens_per_minute_go_into_debt() -> None:
    """Tokens are charged as they come; what a long answer overdraws the next request waits for."""
    clock = Clock()
    limits = RateLimits({"standard": Limits(tokens_per_minute=600)}, 1, clock)
    charge = limits.take(0)
    charge.tokens(500)
    limits.take(0)
    for _ in range(400):
        charge.tokens(1)
    assert told(charge.headers()) == {"limit-tokens": "600", "remaining-tokens": "0", "reset-tokens": "1m30s"}
    error = refused(limits, 0)
    assert (error.retry_after, error.reason) == (30, "rate_limit_tokens")
    clock.now += 31
    limits.take(0)


def test_key_and_tier_both_hold() -> None:
    """A request must pass its key's limits and its tier's; the headers tell of the one with less left."""
    clock = Clock()
    limits = RateLimits({"a": Limits(requests_per_minute=2), "b": Limits()}, 1, clock)
    mine = Limits(requests_per_minute=10)
    assert told(limits.take(0, "k", mine).headers())["limit-requests"] == "2"
    limits.take(0, "k", mine)
    assert "tier a" in str(refused(limits, 0, "k", mine))
    charge = limits.take(1, "k", mine)  # the refused request took nothing from the key
    assert told(charge.headers()) == {"limit-requests": "10", "remaining-requests": "7", "reset-requests": "18s"}


def test_each_ingress_has_its_share() -> None:
    """Of four ingress processes each lets a fourth through, and at least one request."""
    limits = RateLimits({"a": Limits(requests_per_minute=8, tokens_per_minute=400)}, 4, Clock())
    charge: Charge = limits.take(0)
    limits.take(0)
    assert (told(charge.headers())["limit-requests"], told(charge.headers())["limit-tokens"]) == ("2", "100")
    assert refused(limits, 0).retry_after == 30
    slow = RateLimits({"a": Limits(requests_per_minute=1)}, 4, Clock())
    slow.take(0)
    assert refused(slow, 0).retry_after == 240


def test_without_limits_there_are_no_headers() -> None:
    """A request under no limit is charged nothing and told nothing."""
    limits = RateLimits({"a": Limits()}, 1, Clock())
    charge = limits.take(0, "k", None)
    charge.tokens(10**9)
    assert charge.headers() == []
    limits.take(0, "k", None)
