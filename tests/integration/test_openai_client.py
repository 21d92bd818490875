"""The published clients of OpenAI and Anthropic work against the fleet, unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from .servers import MODEL, Server
from .shapes import NAMED, QUESTION, SCHEMA, TOOLS, WEATHER

pytestmark = pytest.mark.integration


class Person(BaseModel):
    """What the model is asked to produce."""

    name: str
    age: int


@pytest.fixture(scope="module")
def client(fleet: Server) -> Iterator[openai.OpenAI]:
    """An OpenAI client without retries."""
    with openai.OpenAI(base_url=fleet.url + "/v1", api_key="unused", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def claude(fleet: Server) -> Iterator[anthropic.Anthropic]:
    """An Anthropic client without retries."""
    with anthropic.Anthropic(base_url=fleet.url, api_key="unused", max_retries=0, timeout=120) as made:
        yield made


def test_models_are_listed(client: openai.OpenAI) -> None:
    """The served model is the one in the list."""
    assert [model.id for model in client.models.list()] == [MODEL]


def test_chat_and_stream_agree(client: openai.OpenAI) -> None:
    """A stream's pieces join to the whole answer, its last chunk carries the same usage and no choices."""
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    finish = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert finish == [whole.choices[0].finish_reason]


def test_n_gives_n_choices(client: openai.OpenAI) -> None:
    """Three choices come back, numbered, and usage counts the tokens of all."""
    reply = client.chat.completions.create(model=MODEL, messages=QUESTION, n=3, max_tokens=6, temperature=0.8, seed=3)
    assert sorted(choice.index for choice in reply.choices) == [0, 1, 2]
    assert reply.usage is not None
    assert 6 < reply.usage.completion_tokens <= 18


def test_logprobs_name_the_sampled_token(client: openai.OpenAI) -> None:
    """Each position has the wanted number of candidates; greedy sampling took the best of them."""
    reply = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=5, temperature=0, logprobs=True, top_logprobs=2
    )  # fmt: skip
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    for position in logprobs.content:
        assert len(position.top_logprobs) == 2
        assert position.token == max(position.top_logprobs, key=lambda candidate: candidate.logprob).token


def test_stop_ends_before_the_stop_string(client: openai.OpenAI) -> None:
    """The stop string is cut off and the finish reason is stop."""
    reply = client.completions.create(model=MODEL, prompt="1, 2, 3, 4, 5,", max_tokens=40, temperature=0, stop=["8"])
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].text.strip().startswith("6, 7")
    assert "8" not in reply.choices[0].text


def test_completion_logprobs_align_with_text(client: openai.OpenAI) -> None:
    """Tokens join to the text and offsets count its characters."""
    reply = client.completions.create(model=MODEL, prompt="Water boils at", max_tokens=8, temperature=0, logprobs=1)
    choice = reply.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.text_offset is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.text_offset[1] - choice.logprobs.text_offset[0] == len(choice.logprobs.tokens[0])


def test_parse_gives_pydantic_object(client: openai.OpenAI) -> None:
    """`parse` returns an instance of the asked model, because the output follows its schema."""
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 60, "temperature": 0}
    reply = client.chat.completions.create(**asked, response_format=SCHEMA)
    assert Person.model_validate_json(reply.choices[0].message.content)

    class Verdict(BaseModel):
        yes: bool

    parsed = client.chat.completions.parse(**asked, response_format=Verdict)
    assert isinstance(parsed.choices[0].message.parsed, Verdict)


def test_stream_helper_accumulates(client: openai.OpenAI) -> None:
    """The client's stream helper ends with content.done and a complete final message."""
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, max_tokens=8, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert "content.done" in [event.type for event in events]
    pieces = "".join(event.delta for event in events if event.type == "content.delta")
    assert pieces == final.choices[0].message.content


def test_tools_are_called(client: openai.OpenAI) -> None:
    """A named tool comes back as a call, whole and streamed alike, its arguments piece by piece."""
    asked: dict[str, Any] = {"model": MODEL, "messages": WEATHER, "tools": TOOLS, "tool_choice": NAMED}
    asked |= {"max_tokens": 60, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    call = whole.choices[0].message.tool_calls[0]
    assert call.function.name == "weather"
    assert "city" in json.loads(call.function.arguments)
    streamed = ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or []:
            streamed += piece.function.arguments or ""
    assert json.loads(streamed) == json.loads(call.function.arguments)


def test_responses_and_events(client: openai.OpenAI) -> None:
    """A response has text, status and usage; its events run from created to completed and carry the same text."""
    asked: dict[str, Any] = {"model": MODEL, "input": "Capital of France?", "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.output_text
    assert whole.usage.output_tokens <= 8
    events = list(client.responses.create(**asked, stream=True))
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


@pytest.mark.parametrize(
    ("more", "error", "param"),
    [
        pytest.param({"model": "nope"}, openai.NotFoundError, "model", id="unknown-model"),
        pytest.param({"temperature": -1}, openai.BadRequestError, "temperature", id="temperature"),
        pytest.param({"temperature": -1, "stream": True}, openai.BadRequestError, "temperature", id="stream"),
        pytest.param({"max_tokens": 0}, openai.BadRequestError, "max_tokens", id="max-tokens"),
    ],
)
def test_errors_have_their_class(
    client: openai.OpenAI, more: dict, error: type[openai.APIStatusError], param: str
) -> None:
    """The client raises its own error classes, with the parameter to blame."""
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": QUESTION, **more})
    assert caught.value.param == param
    assert caught.value.request_id


def test_unknown_path_is_not_found(client: openai.OpenAI) -> None:
    """An API that is not served gives the client's NotFoundError."""
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="x")


def test_anthropic_messages(claude: anthropic.Anthropic) -> None:
    """Anthropic's client gets a message, and its stream the same text and stop reason."""
    asked: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 10, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**asked)
    assert whole.content[0].text
    assert whole.usage.output_tokens <= 10
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    counted = claude.messages.count_tokens(model=MODEL, messages=QUESTION)
    usage = whole.usage  # input_tokens leaves out what was read from the prefix cache or written to it
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert counted.input_tokens == usage.input_tokens + cached


def test_anthropic_errors(claude: anthropic.Anthropic) -> None:
    """Anthropic's client raises its own error class for an unknown model."""
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="nope", messages=QUESTION, max_tokens=3)
