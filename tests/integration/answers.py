"""Sends one request shape to a server and brings the answer into a form in which two servers can be compared."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

TOLERANCE = 1e-3  # of log-probabilities in float32; texts and ids must be equal
MASKED = {"id", "created", "created_at", "completed_at", "request_id", "item_id", "response_id", "call_id"}
MASKED |= {"system_fingerprint", "cached_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"}
MASKED |= {"created_cache_tokens", "cache_write_tokens"}  # depend on what each server was asked before
MASKED |= {"root"}  # of a model: plain vLLM shows a path on its disk
DROPPED = {"sequence_number"}  # follows the chunk borders, which may differ
MERGED = ("delta", "text", "thinking", "partial_json")


@dataclass
class Answer:
    """Status, headers and either a JSON body or the events of a stream as (name, data) pairs."""

    status: int
    headers: httpx.Headers
    body: Any = None
    events: list[tuple[str | None, Any]] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """Media type without its parameters."""
        return self.headers.get("content-type", "").partition(";")[0]


def parse_events(text: str) -> list[tuple[str | None, Any]]:
    """The events of a server-sent-event text; data is decoded JSON, or the raw string where it is none ([DONE])."""
    events = []
    for block in text.replace("\r\n", "\n").split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if not lines:
            continue
        name = next((line[6:].strip() for line in lines if line.startswith("event:")), None)
        data = "\n".join(line[5:].strip() for line in lines if line.startswith("data:"))
        events.append((name, data if data == "[DONE]" else json.loads(data)))
    return events


def ask(url: str, path: str, body: Any = None, method: str = "POST", headers: dict | None = None) -> Answer:
    """Send a request (`body` as JSON unless it is bytes) and read the whole answer."""
    content = {"content": body} if isinstance(body, bytes) else {"json": body} if body is not None else {}
    # verify=False: plain HTTP on loopback, and reading the CA bundle anew costs more than the request
    reply = httpx.request(method, url + path, headers=headers, timeout=180, verify=False, **content)
    answer = Answer(reply.status_code, reply.headers)
    if answer.kind == "text/event-stream":
        answer.events = parse_events(reply.text)
        return answer
    try:
        answer.body = reply.json()
    except json.JSONDecodeError:
        answer.body = reply.text
    return answer


def masked(value: Any) -> Any:
    """A copy in which what differs by nature (ids, times, cache hits) is replaced by its mere presence."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k not in DROPPED}
        return {k: "*" if k in MASKED and v is not None else masked(v) for k, v in kept.items()}
    if isinstance(value, list):
        return [masked(item) for item in value]
    return value


def _merge(into: dict, piece: dict) -> None:
    """Add a stream piece to what was gathered: text and lists grow, dicts merge, the rest is replaced."""
    for key, value in piece.items():
        old = into.get(key)
        if value is None:
            into.setdefault(key, None)
        elif isinstance(value, dict):
            into[key] = old if isinstance(old, dict) else {}
            _merge(into[key], value)
        elif key == "tool_calls":
            calls = into.setdefault(key, {})
            for call in value:
                _merge(calls.setdefault(call["index"], {}), call)
        elif isinstance(value, list):
            into[key] = (old or []) + value
        elif isinstance(value, str) and key in ("content", "text", "reasoning", "arguments"):
            into[key] = (old or "") + value
        else:
            into[key] = value


def gather_choices(events: list[tuple[str | None, Any]]) -> dict[str, Any]:
    """A chat or completions stream as one object: choices by index, last usage, and the order of event kinds."""
    gathered: dict[str, Any] = {"choices": {}, "usage": None, "order": []}
    for _, data in events:
        data = copy.deepcopy(data)
        if not isinstance(data, dict):
            kind = data
        elif "error" in data:
            kind, gathered["error"] = "error", data["error"]
        else:
            choices = data.pop("choices", [])
            usage = data.pop("usage", None)
            kind = "choices" if choices else "usage"
            gathered["usage"] = usage or gathered["usage"]
            gathered["usage on pieces"] = usage is not None
            for choice in choices:
                _merge(gathered["choices"].setdefault(choice["index"], {}), choice)
            _merge(gathered, {k: v for k, v in data.items() if v is not None})
        if not gathered["order"] or gathered["order"][-1] != kind:
            gathered["order"].append(kind)
    return masked(gathered)


def collapse_deltas(events: list[tuple[str | None, Any]]) -> list[list[Any]]:
    """A responses or messages stream with runs of delta events joined, so that chunk borders do not count."""
    joined: list[list[Any]] = []
    for name, data in events:
        data = copy.deepcopy(data)
        previous = joined[-1] if joined else None
        if name and name.endswith("delta") and name != "message_delta" and previous and previous[0] == name:
            _join(previous[1], data)
        else:
            joined.append([name, data])
    return masked(joined)


def _join(into: dict, piece: dict) -> None:
    for key, value in piece.items():
        if isinstance(value, dict):
            _join(into[key], value)
        elif isinstance(value, list):
            into[key] = into[key] + value
        elif key in MERGED:
            into[key] += value


def canonical(answer: Answer) -> dict[str, Any]:
    """Everything of an answer that must be equal between two servers."""
    form: dict[str, Any] = {"status": answer.status, "kind": answer.kind}
    if not answer.events:
        form["body"] = masked(answer.body)
    elif any(name for name, _ in answer.events):
        form["events"] = collapse_deltas(answer.events)
    else:
        form["stream"] = gather_choices(answer.events)
    return form


def differences(plain: Any, fleet: Any, at: str = "") -> Iterator[str]:
    """One line per place where two canonical forms differ."""
    if isinstance(plain, dict) and isinstance(fleet, dict):
        for key in sorted(plain.keys() | fleet.keys(), key=str):
            if key not in fleet:
                yield f"{at}.{key}: only plain has {plain[key]!r:.200}"
            elif key not in plain:
                yield f"{at}.{key}: only the fleet has {fleet[key]!r:.200}"
            else:
                yield from differences(plain[key], fleet[key], f"{at}.{key}")
    elif isinstance(plain, list) and isinstance(fleet, list):
        if len(plain) != len(fleet):
            yield f"{at}: {len(plain)} entries {plain!r:.300} != {len(fleet)} {fleet!r:.300}"
        for index, (left, right) in enumerate(zip(plain, fleet, strict=False)):
            yield from differences(left, right, f"{at}[{index}]")
    elif isinstance(plain, float) or isinstance(fleet, float):
        if not (isinstance(plain, int | float) and isinstance(fleet, int | float) and abs(plain - fleet) <= TOLERANCE):
            yield f"{at}: {plain!r} != {fleet!r}"
    elif plain != fleet:
        yield f"{at}: {plain!r:.300} != {fleet!r:.300}"
