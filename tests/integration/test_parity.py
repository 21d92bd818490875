"""The fleet answers every request shape as plain vLLM does (float32, one replica, greedy or seeded)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .answers import ask, canonical, differences
from .servers import MODEL, Server
from .shapes import CHAT, COMPLETIONS, SHAPES

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(("method", "path", "body"), [pytest.param(*row[1:], id=row[0]) for row in SHAPES])
def test_same_answer_as_plain_vllm(plain: Server, fleet: Server, method: str, path: str, body: Any) -> None:
    """Status, body, stream text, token ids, log-probabilities, finish reason, usage and event order are equal."""
    with ThreadPoolExecutor() as both:
        expected, got = both.map(lambda server: ask(server.url, path, body, method), (plain, fleet))
    assert expected.status == 200, expected.body
    found = list(differences(canonical(expected), canonical(got)))
    assert not found, "\n".join(found[:20])
