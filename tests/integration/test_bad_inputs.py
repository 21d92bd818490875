"""Every mistake of a client gets its own 4xx in OpenAI's error shape, and the server goes on."""

from __future__ import annotations

from typing import Any

import pytest

from .answers import Answer, ask
from .bad_inputs import BAD_INPUTS, Bad
from .servers import Server
from .shapes import CHAT, STREAM, chat

pytestmark = pytest.mark.integration

ANTHROPIC = "/v1/messages"  # these routes may answer in Anthropic's error shape


def error_of(answer: Answer) -> dict[str, Any]:
    """The error object of an answer; AssertionError unless it is JSON in OpenAI's shape."""
    assert answer.kind == "application/json", (answer.status, answer.kind, answer.body or answer.events[:2])
    error = answer.body.get("error")
    assert isinstance(error, dict), f"no error object in {answer.body!r:.300}"
    return error


@pytest.mark.parametrize("bad", BAD_INPUTS, ids=lambda bad: bad.name)
def test_bad_input_is_refused(fleet: Server, bad: Bad) -> None:
    """Status, shape and blamed parameter are right, streams included, and the message says something."""
    answer = ask(fleet.url, bad.path, bad.body, bad.method, bad.headers)
    error = error_of(answer)
    assert answer.status == bad.status, error
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    assert len(error["message"]) >= 5
    assert "Traceback" not in error["message"]
    if not bad.path.startswith(ANTHROPIC):
        assert error.keys() >= {"message", "type", "param", "code"}
        blamed = error["param"] and error["param"].partition(".")[0].partition("[")[0]
        assert blamed == bad.param, error


@pytest.mark.parametrize("stream", [{}, STREAM], ids=["full", "stream"])
def test_server_answers_after_all_bad_inputs(fleet: Server, stream: dict) -> None:
    """The whole table leaves the server in order: ready, and answering the next good request."""
    assert ask(fleet.url, "/health/ready", method="GET").status == 200
    assert ask(fleet.url, CHAT, chat(max_tokens=3, **stream)).status == 200


def test_method_not_allowed_names_the_methods(fleet: Server) -> None:
    """A 405 carries the Allow header that HTTP demands."""
    answer = ask(fleet.url, CHAT, method="GET")
    assert answer.status == 405
    assert "POST" in answer.headers["allow"]
