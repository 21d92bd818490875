"""Error answers name the request's own field."""

from __future__ import annotations

import pytest

from app.blame import blame

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


@pytest.mark.parametrize(
    ("path", "param", "message", "blamed"),
    [
        (CHAT, "body.max_tokens", "1 validation error", "max_tokens"),
        (CHAT, "body.messages.0.ChatCompletionUserMessageParam.role", "1 validation error", "messages.0"),
        (CHAT, "body.logprobs", "1 validation error", "logprobs"),
        (CHAT, "body", "1 validation error", None),
        (CHAT, "body.10", "JSON decode error", None),
        (CHAT, None, "top_k must be 0 (disable), -1, or at least 1, got -5.", "top_k"),
        (CHAT, None, "Cannot apply chat template to an empty conversation", "messages"),
        ("/v1/completions", None, "Token id 99999999 is out of vocabulary", "prompt"),
        (CHAT, "logprobs", "Requested sample logprobs of 50", "top_logprobs"),
        (RESPONSES, "max_tokens", "max_tokens must be at least 1, got 0.", "max_output_tokens"),
        (RESPONSES, None, "max_tokens must be at least 1, got 0.", "max_output_tokens"),
        (CHAT, None, "The engine is busy", None),
    ],
)
def test_the_field_at_fault_is_named(path: str, param: str | None, message: str, blamed: str | None) -> None:
    """Pydantic's locations, vLLM's wording and vLLM's inner names all lead to the field that the client sent."""
    error = {"message": message, "type": "BadRequestError", "param": param, "code": 400}
    assert blame(path, error) == {**error, "param": blamed}
