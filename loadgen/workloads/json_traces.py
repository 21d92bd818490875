"""Readers of JSON traces: Mooncake, ShareGPT, evalscope's workload_trace, and our own workload files."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from loadgen.workloads.rows import BadRow, BadTrace, checked, seconds, whole
from loadgen.workloads.workload import FORMAT, Header, Request, Workload, by_due

MOONCAKE_BLOCK = 512  # tokens that one of its hash ids stands for
TIER_HEADER = "x-vllm-priority"
SESSION_HEADER = "x-session-id"
SECRET_HEADERS = frozenset({"authorization", "x-api-key"})
CHARACTERS_PER_TOKEN = 4

Count = Callable[[str], int]


def estimated(text: str) -> int:
    """Tokens of an English text, roughly: a fourth of its characters."""
    return max(1, round(len(text) / CHARACTERS_PER_TOKEN))


def mooncake(path: Path) -> Iterator[Request | BadRow]:
    """Lines with timestamp (ms), input_length, output_length and hash_ids, one for each 512 tokens of the prompt."""

    def parse(row: dict[str, Any]) -> Request:
        ids = row.get("hash_ids", [])
        if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise ValueError("hash_ids is not a list of whole numbers >= 0")
        prompt = whole("input_length", row.get("input_length"), 1)
        if ids and len(ids) != -(-prompt // MOONCAKE_BLOCK):
            raise ValueError(f"hash_ids: {len(ids)} for {prompt} tokens, not one for each {MOONCAKE_BLOCK}")
        return Request(
            due=seconds("timestamp", row.get("timestamp")) / 1e3,
            prompt_tokens=prompt,
            output_tokens=whole("output_length", row.get("output_length"), 1),
            blocks=tuple(ids),
        )

    return checked(_lines(path), parse)


def sharegpt(path: Path, count: Count = estimated) -> Iterator[Request | BadRow]:
    """A list of conversations, of which the first question and answer are taken; all are due at once.

    Lengths are those of `count`; bad rows are named by their place in the list, counted from 1.
    """
    try:
        conversations = decoded(path.read_bytes().removeprefix(BOM_UTF8))
    except ValueError as error:
        raise BadTrace(f"{path}: {error}") from None
    if not isinstance(conversations, list):
        raise BadTrace(f"{path}: not a list of conversations")

    def parse(entry: Any) -> Request:
        turns = entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
        if not isinstance(turns, list) or len(turns) < 2:
            raise ValueError("no `conversations` with a question and an answer")
        speakers = [turn.get("from") if isinstance(turn, dict) else None for turn in turns[:2]]
        if speakers[0] not in ("human", "user") or speakers[1] not in ("gpt", "assistant", "chatgpt", "bing", "bard"):
            raise ValueError(f"begins with {speakers[0]!r} and {speakers[1]!r}, not with a question and its answer")
        question, answer = (turn.get("value") for turn in turns[:2])
        if not isinstance(question, str) or not isinstance(answer, str) or not question or not answer:
            raise ValueError("an empty question or answer")
        return Request(due=0.0, prompt_tokens=count(question), output_tokens=count(answer), text=question)

    return checked(enumerate(conversations, 1), parse, "conversation")


def evalscope(path: Path) -> Iterator[Request | BadRow]:
    """Lines with body (a request, also as a string of JSON), timestamp (s, or a date), headers, completion_tokens.

    The model's name is left out of the body, and keys out of the headers; tier and session are read from them.
    """

    def parse(row: dict[str, Any]) -> Request:
        body = row.get("body")
        if isinstance(body, str):
            body = decoded(body.encode())
        if not isinstance(body, dict) or not ("messages" in body or "prompt" in body):
            raise ValueError("body is not a request with messages or a prompt")
        headers = row.get("headers") or {}
        if not isinstance(headers, dict) or not all(isinstance(value, str) for value in headers.values()):
            raise ValueError("headers are not names with texts")
        answer = row.get("completion_tokens") or body.get("max_completion_tokens") or body.get("max_tokens") or 0
        lower = {name.lower(): value for name, value in headers.items()}
        priority = body.get("priority", lower.get(TIER_HEADER))
        body = {name: value for name, value in body.items() if name not in ("model", "stream", "stream_options")}
        return Request(
            due=_instant(row.get("timestamp")),
            prompt_tokens=estimated(str(body.get("prompt", body.get("messages")))),
            output_tokens=whole("completion_tokens", answer),
            tier=whole("priority", priority) if priority is not None and str(priority).isdecimal() else None,
            session=lower.get(SESSION_HEADER),
            headers={name: value for name, value in headers.items() if name.lower() not in SECRET_HEADERS},
            body=body,
        )

    return checked(_lines(path), parse)


def ours(path: Path, allowed: float = 0.0) -> Workload:
    """A workload file; BadTrace names the line that is no good. `allowed` bad rows there are none."""
    with path.open("rb") as file:
        lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
    problem = f"{path}: not a workload file"
    if not lines:
        raise BadTrace(f"{problem}: it is empty")
    try:
        header = msgspec.json.decode(lines[0][1].removeprefix(BOM_UTF8), type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadTrace(f"{problem}: line 1: {error}") from None
    if header.workload != FORMAT:
        raise BadTrace(f"{path}: format {header.workload}, this version reads {FORMAT}")
    decode = msgspec.json.Decoder(Request).decode
    requests = []
    for number, line in lines[1:]:
        try:
            requests.append(decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadTrace(f"{path}: line {number}: {error}") from None
    if len(requests) != header.requests:
        raise BadTrace(f"{path}: {len(requests)} requests, line 1 announces {header.requests}: the file was cut")
    return Workload(by_due(requests), header.about, header.block_tokens, header.context)


def _instant(value: object) -> float:
    if isinstance(value, str) and not value.strip().replace(".", "", 1).isdecimal():
        try:
            moment = datetime.fromisoformat(value.strip())
        except ValueError:
            raise ValueError(f"timestamp is {value[:60]!r}, neither seconds nor a date") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return seconds("timestamp", value)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """(line, object) of a file of JSON lines; what is no JSON object is bad. Empty lines are nothing."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(BOM_UTF8)  # editors of Windows write it
            if not line.strip():
                continue
            try:
                row = decoded(line)
            except ValueError as error:
                yield number, BadRow(number, str(error))
                continue
            yield number, row if isinstance(row, dict) else BadRow(number, "not a JSON object")


def decoded(data: bytes) -> Any:
    """The JSON value; ValueError if it is none, or nested too deep."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
