"""Names the parameter to blame in vLLM's error answers, as OpenAI's clients expect it.

vLLM gives pydantic's location ("body.messages.0.ChatCompletionUserMessageParam.role"), or nothing although its message
begins with the field ("top_k must be ..."), or the field's name inside vLLM instead of the one in the request.
"""

from __future__ import annotations

import re
from typing import Any

#: Name inside vLLM -> name in the request of that path.
_ALIASES = {
    "/v1/responses": {"max_tokens": "max_output_tokens"},
    "/v1/chat/completions": {"logprobs": "top_logprobs"},
}
#: How vLLM begins the messages that name no field, and the field of each path it is about (first that the path has).
_MESSAGES = [
    (re.compile(r"^Cannot apply chat template|is not a multimodal model"), "messages"),
    (re.compile(r"^You must pass at least one prompt|^Token id \d+ is out of vocabulary"), "prompt"),
]
_FIELD = re.compile(r"^([a-z_]+) (?:must|cannot|should|is|contains|needs)\b")
_PART = re.compile(r"^[a-z_]+$|^\d+$")


def blame(path: str, error: dict[str, Any]) -> dict[str, Any]:
    """The error object with `param` set to the request's own field, or None where no field is to blame."""
    param = error.get("param")
    message = error.get("message") or ""
    if isinstance(param, str) and (param == "body" or param.startswith("body.")):
        # a union's alternatives appear as type names inside the location: cut there
        parts: list[str] = []
        for part in param.split(".")[1:]:
            if not _PART.match(part):
                break
            parts.append(part)
        return {**error, "param": ".".join(parts) if parts and not parts[0].isdigit() else None}
    if param is None:
        if found := _FIELD.match(message):
            param = found[1]
        else:
            param = next((field for pattern, field in _MESSAGES if pattern.search(message)), None)
    return {**error, "param": _ALIASES.get(path, {}).get(str(param), param)}
