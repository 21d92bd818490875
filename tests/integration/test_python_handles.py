"""Python handles give what HTTP gives: same answers, same refusals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .answers import ask, differences, gather_choices, masked
from .probe import CallFailed, Probe
from .servers import Server
from .shapes import CHAT, COMPLETIONS, STREAM, chat, complete

pytestmark = pytest.mark.integration

PROMPT = [504, 1194, 4260]


@pytest.fixture(scope="module")
def handle(fleet: Server) -> Iterator[Probe]:
    """The application's handle."""
    made = Probe(fleet)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        pytest.param("chat", CHAT, chat(), id="chat"),
        pytest.param("chat", CHAT, chat(logprobs=True, top_logprobs=2, max_tokens=4), id="chat-logprobs"),
        pytest.param("complete", COMPLETIONS, complete(), id="complete"),
        pytest.param("complete", COMPLETIONS, complete(prompt=PROMPT, stop=["."]), id="complete-ids-stop"),
    ],
)
def test_handle_answers_as_http(fleet: Server, handle: Probe, method: str, path: str, body: dict) -> None:
    """Whole answers and joined streams are those of HTTP."""
    whole = ask(fleet.url, path, body).body
    assert list(differences(masked(whole), masked(handle.call(method, body)))) == []
    streamed = [data for _, data in ask(fleet.url, path, {**body, **STREAM}).events if data != "[DONE]"]
    pieces = handle.call(f"{method}_stream", {**body, **STREAM})
    over_http, by_handle = (gather_choices([(None, data) for data in events]) for events in (streamed, pieces))
    assert list(differences(over_http, by_handle)) == []


def test_tokens_in_tokens_out(fleet: Server, handle: Probe) -> None:
    """Token generation gives the ids and the text that completions give for the same ids."""
    body = complete(prompt=PROMPT, max_tokens=8, return_token_ids=True)
    expected = ask(fleet.url, COMPLETIONS, body).body["choices"][0]
    got = handle.call("generate_tokens", PROMPT, max_tokens=8, temperature=0)
    assert got["token_ids"] == expected["token_ids"]
    assert got["text"] == expected["text"]
    assert got["finish_reason"] == expected["finish_reason"]
    pieces = handle.call("generate_tokens_stream", PROMPT, max_tokens=8, temperature=0)
    assert [token for piece in pieces for token in piece["token_ids"]] == expected["token_ids"]
    assert "".join(piece["text"] for piece in pieces) == expected["text"]
    assert pieces[-1]["finish_reason"] == expected["finish_reason"]


@pytest.mark.parametrize(
    ("method", "arguments", "named", "field"),
    [
        pytest.param("chat", [chat(temperature=-1)], {}, "temperature", id="temperature"),
        pytest.param("chat", [chat(max_tokens="many")], {}, "max_tokens", id="type"),
        pytest.param("chat", [chat(model="nope")], {}, "nope", id="model"),
        pytest.param("chat_stream", [chat(temperature=-1)], {}, "temperature", id="stream"),
        pytest.param("complete", [complete(max_tokens=-1)], {}, "max_tokens", id="complete"),
        pytest.param("generate_tokens", [PROMPT], {"temperature": -1}, "temperature", id="tokens"),
        pytest.param("generate_tokens", [[10**9]], {}, "1000000000", id="unknown-token"),
        pytest.param("generate_tokens", [PROMPT * 1000], {}, "2048", id="overlong"),
        pytest.param("generate_tokens_stream", [PROMPT], {"nonsense": 1}, "nonsense", id="unknown-parameter"),
    ],
)
def test_handle_refuses(handle: Probe, method: str, arguments: list[Any], named: dict, field: str) -> None:
    """A bad call raises RequestRefused with HTTP's message, streams included."""
    with pytest.raises(CallFailed, match=field) as caught:
        handle.call(method, *arguments, **named)
    assert caught.value.kind == "RequestRefused"
