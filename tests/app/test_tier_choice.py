"""The tier of a request: precedence, garbage, clamping, and the body that vLLM gets."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.config import load_config
from app.tier_choice import FIELDS, SERVICE_TIERS, KeyTiers, TierChoice, tier_fields, without_garbage

CHOICE = TierChoice(load_config({}, "cpu").tiers)
CRITICAL, STANDARD, RELAXED, BACKGROUND = range(4)
GARBAGE = ["urgent", "", "1.5", "0x1", True, False, 1.0, 2.5, [], [1], {}, {"a": 1}, "99999999999999999999999999"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize(
    ("body", "header", "key", "tier"),
    [
        ({}, None, None, STANDARD),
        ({"priority": 0}, "3", KeyTiers(default=RELAXED), CRITICAL),
        ({"priority": "background", "service_tier": "priority"}, "0", None, BACKGROUND),
        ({"service_tier": "priority"}, "relaxed", None, RELAXED),
        ({"service_tier": "flex"}, None, KeyTiers(default=CRITICAL), BACKGROUND),
        ({"service_tier": "batch"}, None, None, BACKGROUND),
        ({"service_tier": "auto"}, None, KeyTiers(default=RELAXED), RELAXED),
        ({"service_tier": "default"}, None, KeyTiers(default=RELAXED), STANDARD),
        ({}, None, KeyTiers(default=BACKGROUND), BACKGROUND),
        ({"priority": None, "service_tier": None}, None, None, STANDARD),
        ({"priority": "2"}, None, None, RELAXED),
        ({"priority": 99}, None, None, BACKGROUND),
        ({"priority": -5}, None, None, CRITICAL),
        ({"priority": 10**40}, None, None, BACKGROUND),
        ({}, " critical ", None, CRITICAL),
        ({}, "-1", None, CRITICAL),
    ],
)
def test_precedence(body: dict[str, Any], header: str | None, key: KeyTiers | None, tier: int) -> None:
    """Body `priority`, then the header, then `service_tier`, then the key's default, then the config's."""
    assert CHOICE.choose(body, header, key) == tier


@pytest.mark.parametrize("garbage", GARBAGE, ids=repr)
def test_garbage_means_the_default(garbage: Any) -> None:
    """What nobody understands means the default tier, of the key where it has one, not the next source."""
    for body, header in (({"priority": garbage}, "0"), ({"service_tier": garbage}, None)):
        assert CHOICE.choose(body, header) == STANDARD
        assert CHOICE.choose(body, header, KeyTiers(default=RELAXED)) == RELAXED
    if isinstance(garbage, str):
        assert CHOICE.choose({"service_tier": "priority"}, garbage) == STANDARD


@pytest.mark.parametrize(
    ("allowed", "asked", "got"),
    [
        ({STANDARD, BACKGROUND}, CRITICAL, STANDARD),
        ({STANDARD, BACKGROUND}, RELAXED, BACKGROUND),
        ({CRITICAL, STANDARD}, BACKGROUND, CRITICAL),
        ({STANDARD}, STANDARD, STANDARD),
    ],
)
def test_a_key_clamps(allowed: set[int], asked: int, got: int) -> None:
    """A tier that the key does not allow becomes the nearest lower one, else the best that it allows."""
    assert CHOICE.choose({"priority": asked}, None, KeyTiers(frozenset(allowed))) == got


@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS, JSON)),
    st.none() | st.text(),
    st.frozensets(st.integers(0, 3), min_size=1),
)
def test_never_an_error_never_more_than_allowed(body: Any, header: str | None, allowed: frozenset[int]) -> None:
    """Whatever a request says, it gets a tier that its key allows."""
    assert CHOICE.choose(body, header, KeyTiers(allowed)) in allowed


@given(st.dictionaries(st.sampled_from([*FIELDS, "model", "x"]), JSON))
def test_vllm_gets_only_what_it_knows(body: dict[str, Any]) -> None:
    """The body loses tier fields that vLLM would refuse and nothing else; without any it stays byte for byte."""
    data = json.dumps(body, indent=1).encode()
    found, cleaned = tier_fields(data)
    assert repr(found) == repr({name: body[name] for name in FIELDS if name in body})
    left = json.loads(cleaned)
    assert repr(left) == repr(without_garbage(json.loads(data)))
    assert repr({k: v for k, v in left.items() if k not in FIELDS}) == repr(
        {k: v for k, v in json.loads(data).items() if k not in FIELDS}
    )
    if len(left) == len(body):
        assert cleaned == data
    assert left.get("service_tier", "auto") in SERVICE_TIERS
    priority = left.get("priority", 0)
    assert type(priority) is int
    assert -(2**63) <= priority < 2**63


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"priority": ', b'["priority"]', b'"priority"', b'{"priority": ' + b"[" * 100_000, b'\xff"priority"'],
)
def test_what_is_no_object_is_left_to_vllm(body: bytes) -> None:
    """A body that is not a JSON object is passed on as it is."""
    assert tier_fields(body) == ({}, body)


def test_service_tiers_are_vllms() -> None:
    """Contract with vLLM: the values of `service_tier` that its request and response classes take."""
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse

    for kind in (ResponsesRequest, ResponsesResponse):
        assert set(get_args(kind.model_fields["service_tier"].annotation)) == SERVICE_TIERS
