"""Requests that are the client's mistake: (name, method, path, body, headers) -> status and the parameter to blame."""

from __future__ import annotations

from typing import Any, NamedTuple

from .servers import MAX_BODY_BYTES, MODEL
from .shapes import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    NAMED,
    QUESTION,
    RESPONSES,
    STREAM,
    TOOLS,
    chat,
    complete,
    message,
    respond,
)

JSON = {"content-type": "application/json"}
OVERLONG = "word " * 3000
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
COUNT_TOKENS = "/v1/messages/count_tokens"


class Bad(NamedTuple):
    """One bad request; `param` None: no single parameter is to blame."""

    name: str
    path: str
    body: Any
    status: int = 400
    param: str | None = None
    method: str = "POST"
    headers: dict[str, str] | None = None


def _chats(param: str | None, **rows: dict[str, Any]) -> list[Bad]:
    """Each row as a whole answer and as a stream: a stream that cannot start has a real status too."""
    made = []
    for name, more in rows.items():
        name = name.replace("_", "-")
        made.append(Bad(f"chat-{name}", CHAT, chat(**more), param=param))
        made.append(Bad(f"chat-{name}-stream", CHAT, chat(**more, **STREAM), param=param))
    return made


def _completions(param: str | None, **rows: dict[str, Any]) -> list[Bad]:
    return [Bad(f"completions-{n}".replace("_", "-"), COMPLETIONS, complete(**m), param=param) for n, m in rows.items()]


def _structured(**constraint: Any) -> dict[str, Any]:
    return {"structured_outputs": constraint}


def _schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


SAMPLING = [
    *_chats("max_tokens", max_tokens_0={"max_tokens": 0}, max_tokens_negative={"max_tokens": -1}),
    *_chats("max_tokens", max_tokens_huge={"max_tokens": 10**12}, max_tokens_text={"max_tokens": "many"}),
    *_chats("n", n_0={"n": 0}, n_negative={"n": -2}, n_huge={"n": 10**6}, n_text={"n": "two"}),
    *_chats("n", n_greedy={"n": 2}),
    *_chats("temperature", temperature_negative={"temperature": -1}, temperature_text={"temperature": "hot"}),
    *_chats("top_p", top_p_2={"top_p": 2}, top_p_0={"top_p": 0}),
    *_chats("top_k", top_k_negative={"top_k": -7}),
    *_chats("min_p", min_p_2={"min_p": 2}),
    *_chats("presence_penalty", presence_9={"presence_penalty": 9}),
    *_chats("frequency_penalty", frequency_9={"frequency_penalty": -9}),
    *_chats("repetition_penalty", repetition_0={"repetition_penalty": 0}),
    *_chats("seed", seed_text={"seed": "x"}, seed_huge={"seed": 2**70}),
    *_chats("min_tokens", min_over_max={"min_tokens": 50, "max_tokens": 5}, min_negative={"min_tokens": -1}),
    *_chats("top_logprobs", logprobs_50={"logprobs": True, "top_logprobs": 50}, logprobs_text={"top_logprobs": "x"}),
    *_chats("top_logprobs", logprobs_off={"top_logprobs": 2}),
    *_chats("logit_bias", bias_bad_key={"logit_bias": {"x": 1}}, bias_unknown_id={"logit_bias": {"999999": 1}}),
    *_chats("stop", stop_empty={"stop": [""]}, stop_number={"stop": 3}),
    *_chats("stop_token_ids", stop_ids_unknown={"stop_token_ids": [10**9]}, stop_ids_text={"stop_token_ids": ["x"]}),
    *_chats("allowed_token_ids", allow_unknown={"allowed_token_ids": [10**9]}, allow_none={"allowed_token_ids": []}),
    *_chats("bad_words", bad_words_text={"bad_words": 3}),
]
STRUCTURED = [
    *_chats(None, bad_regex=_structured(regex="(["), bad_grammar=_structured(grammar="root ::= nope nope2")),
    *_chats(None, empty_choice=_structured(choice=[]), two_constraints=_structured(regex="a", choice=["b"])),
    *_chats(None, bad_schema=_schema({"type": "nonsense"})),
    *_chats("response_format", schema_missing={"response_format": {"type": "json_schema"}}),
    *_chats("response_format", format_unknown={"response_format": {"type": "poem"}}),
    *_chats("tool_choice", choice_without_tools={"tool_choice": "required"}),
    *_chats("tool_choice", choice_unknown={"tools": TOOLS, "tool_choice": "sometimes"}),
    *_chats(
        "tool_choice",
        choice_not_offered={"tools": TOOLS, "tool_choice": {**NAMED, "function": {"name": "other"}}},
    ),
    *_chats("tools", tools_empty={"tools": []}),
    *_chats("tools", tools_broken={"tools": [{"type": "function"}]}),
]
PROMPTS = [
    *_chats("messages", messages_empty={"messages": []}, messages_text={"messages": "hello"}),
    *_chats("messages", messages_no_role={"messages": [{"content": "x"}]}),
    *_chats("messages", messages_image={"messages": [{"role": "user", "content": [IMAGE]}]}),
    *_chats("input_tokens", overlong={"messages": [{"role": "user", "content": OVERLONG}]}),
    Bad("chat-stream-options-number", CHAT, chat(stream=True, stream_options=3), param="stream_options"),
    Bad("chat-no-messages", CHAT, {"model": MODEL}, param="messages"),
    Bad("chat-options-without-stream", CHAT, chat(stream_options={"include_usage": True}), param="stream_options"),
    *_completions("prompt", prompt_missing={"prompt": None}, prompt_empty={"prompt": []}, prompt_object={"prompt": {}}),
    *_completions("prompt", prompt_ids_unknown={"prompt": [10**9]}, prompt_ids_negative={"prompt": [-1]}),
    *_completions("input_tokens", overlong={"prompt": OVERLONG}),
    *_completions("logprobs", logprobs_50={"logprobs": 50}, logprobs_negative={"logprobs": -2}),
    *_completions("suffix", suffix={"suffix": " the end"}),
    *_completions("echo", echo_text={"echo": "x"}),
    *_completions("max_tokens", max_tokens_negative={"max_tokens": -1}),
    Bad("completions-logprobs-50-stream", COMPLETIONS, complete(logprobs=50, **STREAM), param="logprobs"),
    Bad("responses-max-tokens-0", RESPONSES, respond(max_output_tokens=0), param="max_output_tokens"),
    Bad("responses-no-input", RESPONSES, {"model": MODEL}, param="input"),
    Bad("responses-overlong", RESPONSES, respond(input=OVERLONG), param="input_tokens"),
    Bad("responses-temperature", RESPONSES, respond(temperature=-1, stream=True), param="temperature"),
    Bad("responses-unknown-previous", RESPONSES, respond(previous_response_id="resp_none"), 404, "response_id"),
    Bad("tokenize-nothing", "/tokenize", {"model": MODEL}, param="prompt"),
    Bad("detokenize-text", "/detokenize", {"model": MODEL, "tokens": "abc"}, param="tokens"),
]
MODELS = [
    Bad("chat-unknown-model", CHAT, chat(model="nope"), 404, "model"),
    Bad("chat-unknown-model-stream", CHAT, chat(model="nope", **STREAM), 404, "model"),
    Bad("completions-unknown-model", COMPLETIONS, complete(model="nope"), 404, "model"),
    Bad("responses-unknown-model", RESPONSES, respond(model="nope"), 404, "model"),
    Bad("tokenize-unknown-model", "/tokenize", {"model": "nope", "prompt": "x"}, 404, "model"),
    Bad("detokenize-unknown-model", "/detokenize", {"model": "nope", "tokens": [1]}, 404, "model"),
    Bad("chat-model-number", CHAT, chat(model=3), 400, "model"),
    Bad("messages-unknown-model", MESSAGES, message(model="nope"), 404),
    Bad("messages-no-max-tokens", MESSAGES, {"model": MODEL, "messages": QUESTION}),
    Bad("messages-empty", MESSAGES, message(messages=[])),
    Bad("messages-bad-role", MESSAGES, message(messages=[{"role": "zzz", "content": "x"}])),
    Bad("messages-max-tokens-0", MESSAGES, message(max_tokens=0)),
    Bad("messages-overlong-stream", MESSAGES, message(messages=[{"role": "user", "content": OVERLONG}], stream=True)),
    Bad("count-tokens-unknown-model", COUNT_TOKENS, {"model": "nope", "messages": QUESTION}, 404),
    Bad("count-tokens-nothing", COUNT_TOKENS, {"model": MODEL}),
]
WIRE = [
    Bad("path-unknown", "/v1/nothing", {}, 404),
    Bad("path-root", "/", None, 404, method="GET"),
    Bad("path-double-slash", "//v1/models", None, 404, method="GET"),
    Bad("path-trailing-slash", CHAT + "/", chat(), 404),
    Bad("path-response-unknown", RESPONSES + "/resp_none", None, 404, "response_id", "GET"),
    Bad("method-get-chat", CHAT, None, 405, method="GET"),
    Bad("method-delete-chat", CHAT, None, 405, method="DELETE"),
    Bad("method-post-models", "/v1/models", {}, 405),
    Bad("method-put-health", "/health", None, 405, method="PUT"),
    Bad("body-malformed", CHAT, b'{"model": ', headers=JSON),
    Bad("body-empty", CHAT, b"", headers=JSON),
    Bad("body-null", CHAT, b"null", headers=JSON),
    Bad("body-list", CHAT, [chat()]),
    Bad("body-text", CHAT, b"hello", headers=JSON),
    Bad("body-not-utf8", CHAT, b'{"model": "\xff\xfe"}', headers=JSON),
    Bad("body-nan", CHAT, b'{"model": "%s", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}'
        % MODEL.encode(), headers=JSON, param="temperature"),
    Bad("body-surrogate", CHAT, b'{"model": "%s", "messages": [{"role": "user", "content": "\\ud800"}]}'
        % MODEL.encode(), headers=JSON),
    Bad("body-deep", CHAT, b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", headers=JSON),
    Bad("body-too-large", CHAT, b'{"x": "' + b"x" * MAX_BODY_BYTES + b'"}', 413, headers=JSON),
    Bad("content-type-text", CHAT, b"hello", headers={"content-type": "text/plain"}),
    Bad("content-type-form", CHAT, b"a=b", headers={"content-type": "application/x-www-form-urlencoded"}),
]  # fmt: skip

BAD_INPUTS = [*SAMPLING, *STRUCTURED, *PROMPTS, *MODELS, *WIRE]
