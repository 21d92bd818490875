"""The fleet answers every request shape as plain vLLM does (float32, one replica, greedy or seeded)."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from .answers import ask, canonical, differences
from .servers import Server
from .shapes import CHAT, COMPLETIONS, SHAPES, chat, complete

pytestmark = pytest.mark.integration


ROWS = [pytest.param(*row[1:], id=row[0]) for row in SHAPES]


@pytest.mark.parametrize(("method", "path", "body"), ROWS)
def test_same_answer_as_plain_vllm(plain: Server, fleet: Server, method: str, path: str, body: Any) -> None:
    """Status, body, stream text, token ids, log-probabilities, finish reason, usage and event order are equal."""
    with ThreadPoolExecutor() as both:
        expected, got = both.map(lambda server: ask(server.url, path, body, method), (plain, fleet))
    assert expected.status == 200, expected.body
    found = list(differences(canonical(expected), canonical(got)))
    assert not found, "\n".join(found[:20])


def test_cached_prompt_tokens_are_counted_alike(plain: Server, fleet: Server) -> None:
    """A new prompt has no cached tokens, the same prompt again has as many as in plain vLLM."""
    body = complete(prompt=f"{uuid.uuid4()} " * 12, max_tokens=2)
    counts = [[cached(server, body) for _ in range(2)] for server in (plain, fleet)]
    assert counts[0] == counts[1]
    assert counts[0][0] == 0 < counts[0][1]


def cached(server: Server, body: dict) -> int:
    """Prompt tokens that the server found in its prefix cache."""
    return ask(server.url, COMPLETIONS, body).body["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_tokens_arrive_one_by_one(fleet: Server) -> None:
    """A stream is not buffered: the first token comes well before the last."""
    body = chat(max_tokens=30, ignore_eos=True, stream=True)
    with httpx.stream("POST", fleet.url + CHAT, json=body, timeout=60) as reply:
        arrivals = [time.monotonic() for line in reply.iter_lines() if '"content"' in line]
    assert len({round(at, 2) for at in arrivals}) > 1  # a starved machine joins the tokens of many steps
    assert arrivals[-1] - arrivals[0] > 0.1
