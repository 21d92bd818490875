"""The request shapes that plain vLLM and the fleet must answer alike: (name, path, body)."""

from __future__ import annotations

from typing import Any

from .servers import MODEL

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
CONTINUOUS = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
QUESTION: Any = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
EMOJI: Any = [{"role": "user", "content": "Repeat exactly: I like 🍕🦄👩‍👩‍👧 and 日本語のテスト and ไทย."}]
WEATHER: Any = [{"role": "user", "content": "Weather in Paris? Use the tool."}]
TURNS: Any = [
    {"role": "system", "content": "You are a terse geographer."},
    {"role": "user", "content": "Capital of Italy?"},
    {"role": "assistant", "content": "Rome."},
    {"role": "user", "content": "And of Spain?"},
]
TOOL: Any = {
    "name": "weather",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 6}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOLS: Any = [{"type": "function", "function": TOOL}]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
PERSON: Any = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
GRAMMAR = 'root ::= "north" | "south" " pole"'
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 11}
COUNTING = "1, 2, 3, 4, 5,"
LONG = " ".join(f"Item {i} costs {i * 7 % 97} coins." for i in range(110))  # longer than one prefill step (512)


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": QUESTION, "max_tokens": 12, "temperature": 0, **more}


def complete(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "The three primary colours are", "max_tokens": 10, "temperature": 0, **more}


def respond(**more: Any) -> dict[str, Any]:
    question = "What is the capital of France?"
    return {"model": MODEL, "input": question, "max_output_tokens": 10, "temperature": 0, **more}


def message(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": QUESTION, "max_tokens": 10, "temperature": 0, **more}


# Each of these is sent twice: as it stands and with STREAM.
CHAT_BOTH: dict[str, dict] = {
    "plain": {},
    "emoji": {"messages": EMOJI, "max_tokens": 40},
    "emoji-logprobs": {"messages": EMOJI, "max_tokens": 24, "logprobs": True, "top_logprobs": 2},
    "system-and-turns": {"messages": TURNS},
    "content-parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]},
    "logprobs-0": {"logprobs": True, "top_logprobs": 0},
    "logprobs-3": {"logprobs": True, "top_logprobs": 3},
    "n2-seeded": {"n": 2, **SAMPLED},
    "seeded": dict(SAMPLED),
    "stop": {"stop": [" France"], "max_tokens": 30},
    "stop-string": {"stop": "Paris", "max_tokens": 30},
    "stop-included": {"stop": [" France"], "include_stop_str_in_output": True, "max_tokens": 30},
    "stop-logprobs": {"stop": ["is Par"], "logprobs": True, "top_logprobs": 1, "max_tokens": 30},
    "stop-min-tokens": {"stop": ["."], "min_tokens": 15, "max_tokens": 40},
    "stop-token-ids": {"stop_token_ids": [30], "max_tokens": 40},
    "json-schema": {"response_format": SCHEMA, "max_tokens": 40},
    "json-object": {"response_format": {"type": "json_object"}, "max_tokens": 24},
    "regex": {"structured_outputs": {"regex": "(yes|no), [0-9]{3}"}, "max_tokens": 24},
    "choice": {"structured_outputs": {"choice": ["alpha", "beta"]}},
    "tools-auto": {"tools": TOOLS, "messages": WEATHER, "max_tokens": 24},
    "tools-named": {"tools": TOOLS, "messages": WEATHER, "tool_choice": NAMED, "max_tokens": 60},
    "tools-required": {"tools": TOOLS, "messages": WEATHER, "tool_choice": "required", "max_tokens": 60},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "max_tokens": 24},
    "return-token-ids": {"return_token_ids": True},
    "max-completion-tokens": {"max_tokens": None, "max_completion_tokens": 3},
    "long-prompt": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 6},
}
CHAT_ONCE: dict[str, dict] = {
    "continuous-usage": dict(CONTINUOUS),
    "stream-no-usage": {"stream": True},
    "tools-none": {"tools": TOOLS, "tool_choice": "none"},
    "grammar": {"structured_outputs": {"grammar": GRAMMAR}},
    "logit-bias": {"logit_bias": {"504": -100, "30": 5}},
    "bad-words": {"bad_words": ["Paris"]},
    "allowed-token-ids": {"allowed_token_ids": [504, 3575, 282, 30], "max_tokens": 5},
    "min-p": {"min_p": 0.2, **SAMPLED},
    "ignore-eos": {"ignore_eos": True, "max_tokens": 24},
    "echo": {
        "echo": True,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "messages": [*QUESTION, {"role": "assistant", "content": "The capital"}],
    },
    "no-max-tokens": {"max_tokens": None, "stop": ["."]},
    "max-fills-context": {"max_tokens": 2000, "stop": ["."]},
    "beam": {"use_beam_search": True, "n": 2, "max_tokens": 4},
    "prompt-logprobs": {"prompt_logprobs": 1, "max_tokens": 2},
    "tokens-as-ids": {"return_tokens_as_token_ids": True, "logprobs": True, "top_logprobs": 1, "max_tokens": 3},
    "truncated-prompt": {"truncate_prompt_tokens": 8, "max_tokens": 4},
    "template-kwargs": {"chat_template_kwargs": {"enable_thinking": False}, "max_tokens": 4},
    "user-and-metadata": {"user": "someone", "max_tokens": 3},
    "cache-salt": {"cache_salt": "pepper", "max_tokens": 4},
    "n1-greedy": {"n": 1, "top_p": 1, "top_k": -1, "max_tokens": 3},
}
COMPLETE_BOTH: dict[str, dict] = {
    "plain": {},
    "token-ids": {"prompt": [504, 1194, 4260]},
    "logprobs-2": {"logprobs": 2},
    "logprobs-0": {"logprobs": 0, "max_tokens": 4},
    "many-prompts": {"prompt": ["Hello", "The sky is", COUNTING], "max_tokens": 6},
    "many-token-prompts": {"prompt": [[504, 1194], [338, 253, 1194]], "max_tokens": 6},
    "many-prompts-n2": {"prompt": ["Hello", "The sky is"], "n": 2, "max_tokens": 5, **SAMPLED},
    "stop-spanning": {"prompt": COUNTING, "stop": ["8, 9"], "max_tokens": 30},
    "stop-many": {"prompt": COUNTING, "stop": ["99", "11", " 7"], "max_tokens": 30},
    "echo": {"echo": True, "max_tokens": 4},
    "unicode": {"prompt": "日本の首都は", "max_tokens": 12},
    "return-token-ids": {"return_token_ids": True, "max_tokens": 4},
}
COMPLETE_ONCE: dict[str, dict] = {
    "echo-logprobs": {"echo": True, "logprobs": 2, "max_tokens": 3},
    "echo-only": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "default-max-tokens": {"max_tokens": None, "stop": ["."]},
    "prompt-logprobs": {"prompt_logprobs": 2, "max_tokens": 2},
    "beam": {"use_beam_search": True, "n": 2, "max_tokens": 4},
    "cache-salt": {"cache_salt": "pepper"},
    "priority": {"priority": 3},
    "special-tokens-kept": {"skip_special_tokens": False, "spaces_between_special_tokens": False, "max_tokens": 20},
    "json-schema": {"response_format": SCHEMA, "max_tokens": 40},
    "continuous-usage": dict(CONTINUOUS),
    "stream-interval": {"stream_interval": 4, **STREAM},
    "no-special-tokens-added": {"add_special_tokens": False},
    "logit-bias-allowed": {"allowed_token_ids": [253, 338, 1194], "max_tokens": 4},
}
RESPOND_BOTH: dict[str, dict] = {
    "plain": {},
    "instructions": {"instructions": "Answer in capitals."},
    "turns": {"input": TURNS},
    "json-schema": {"text": {"format": {"type": "json_schema", "name": "person", "schema": PERSON}},
                    "max_output_tokens": 40},
}  # fmt: skip
RESPOND_ONCE: dict[str, dict] = {
    "metadata": {"metadata": {"trace": "7"}, "store": False},
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 4},
}
MESSAGE_BOTH: dict[str, dict] = {
    "plain": {},
    "system": {"system": "You are a terse geographer."},
    "stop": {"stop_sequences": [" France"], "max_tokens": 24},
    "tools": {
        "messages": WEATHER,
        "tools": [{"name": TOOL["name"], "strict": True, "input_schema": TOOL["parameters"]}],
        "tool_choice": {"type": "any"},
        "max_tokens": 60,
    },
}
OTHERS: list[tuple[str, str, str, Any]] = [
    ("tokenize-prompt", "POST", "/tokenize", {"model": MODEL, "prompt": "hello 🍕"}),
    ("tokenize-strings", "POST", "/tokenize", {"model": MODEL, "prompt": "hello", "return_token_strs": True}),
    ("tokenize-chat", "POST", "/tokenize", {"model": MODEL, "messages": TURNS}),
    ("tokenize-tools", "POST", "/tokenize", {"model": MODEL, "messages": QUESTION, "tools": TOOLS}),
    ("detokenize", "POST", "/detokenize", {"model": MODEL, "tokens": [504, 1194, 4260]}),
    ("count-tokens", "POST", "/v1/messages/count_tokens", {"model": MODEL, "messages": QUESTION}),
    ("models", "GET", "/v1/models", None),
    ("version", "GET", "/version", None),
]


def _table() -> list[tuple[str, str, str, Any]]:
    rows: list[tuple[str, str, str, Any]] = []
    for prefix, path, make, both, once, stream in (
        ("chat", CHAT, chat, CHAT_BOTH, CHAT_ONCE, STREAM),
        ("completions", COMPLETIONS, complete, COMPLETE_BOTH, COMPLETE_ONCE, STREAM),
        ("responses", RESPONSES, respond, RESPOND_BOTH, RESPOND_ONCE, {"stream": True}),
        ("messages", MESSAGES, message, MESSAGE_BOTH, {}, {"stream": True}),
    ):
        for name, more in both.items():
            rows.append((f"{prefix}-{name}", "POST", path, make(**more)))
            rows.append((f"{prefix}-{name}-stream", "POST", path, make(**more, **stream)))
        rows += [(f"{prefix}-{name}", "POST", path, make(**more)) for name, more in once.items()]
    return rows + OTHERS


SHAPES = _table()
