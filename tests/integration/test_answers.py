"""The comparison that the parity test rests on sees what matters and nothing else."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from .answers import Answer, canonical, differences, parse_events


def piece(content: str, **more: Any) -> dict[str, Any]:
    """One chunk of a chat stream."""
    return {"id": "x", "choices": [{"index": 0, "delta": {"content": content}, **more}]}


def stream(*data: Any, name: str | None = None) -> Answer:
    """A 200 answer with these events."""
    lines = (f"event: {item['type']}\n" if name else "" for item in data)
    text = "".join(
        f"{head}data: {item if isinstance(item, str) else json.dumps(item)}\n\n"
        for head, item in zip(lines, data, strict=True)
    )
    return Answer(200, httpx.Headers({"content-type": "text/event-stream"}), events=parse_events(text))


def differ(left: Answer, right: Answer) -> list[str]:
    """The places where two answers differ."""
    return list(differences(canonical(left), canonical(right)))


BASE = [piece("Par"), piece("is", finish_reason="stop"), {"choices": [], "usage": {"total_tokens": 5}}, "[DONE]"]


def test_chunk_borders_and_ids_do_not_count() -> None:
    """Streams cut differently, with other ids, are equal."""
    other = [{**piece("Paris"), "id": "y"}, piece("", finish_reason="stop"), *BASE[2:]]
    assert differ(stream(*BASE), stream(*other)) == []


@pytest.mark.parametrize(
    "other",
    [
        pytest.param([piece("Rom"), *BASE[1:]], id="text"),
        pytest.param([BASE[0], piece("is", finish_reason="length"), *BASE[2:]], id="finish-reason"),
        pytest.param([*BASE[:2], {"choices": [], "usage": {"total_tokens": 6}}, "[DONE]"], id="usage"),
        pytest.param([*BASE[:2], "[DONE]"], id="no-usage"),
        pytest.param(BASE[:3], id="no-done"),
        pytest.param([BASE[2], *BASE[:2], "[DONE]"], id="order"),
        pytest.param([piece("Par", logprobs={"content": [{"logprob": -0.1}]}), *BASE[1:]], id="logprobs"),
        pytest.param([*BASE[:3], {"error": {"message": "x"}}, "[DONE]"], id="error"),
    ],
)
def test_what_counts_in_a_stream(other: list[Any]) -> None:
    """Another text, finish reason, usage, order or error is a difference."""
    assert differ(stream(*BASE), stream(*other))


def test_logprobs_have_a_tolerance() -> None:
    """Log-probabilities may differ by rounding, not by more."""
    assert list(differences({"logprob": -1.0}, {"logprob": -1.0005})) == []
    assert list(differences({"logprob": -1.0}, {"logprob": -1.002}))
    assert list(differences({"logprob": None}, {"logprob": -1.0}))


def test_named_events_are_joined_per_run() -> None:
    """Delta events in a row are one, their text counts, and so does the order of the others."""
    start, end = {"type": "response.created"}, {"type": "response.completed"}
    one, two = ({"type": "response.output_text.delta", "delta": text} for text in ("Par", "is"))
    both = {**one, "delta": "Paris"}
    assert differ(stream(start, one, two, end, name="type"), stream(start, both, end, name="type")) == []
    assert differ(stream(start, one, end, name="type"), stream(start, both, end, name="type"))
    assert differ(stream(start, both, end, name="type"), stream(both, start, end, name="type"))


def test_masked_fields_must_still_be_there() -> None:
    """An id may have any value but not be missing."""
    left, right = (Answer(200, httpx.Headers(), body=body) for body in ({"id": "a"}, {"id": "b"}))
    assert differ(left, right) == []
    assert differ(left, Answer(200, httpx.Headers(), body={}))
