"""An HTTP client for ASGI apps that sees when each part of an answer comes, and can hang up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """An HTTP answer as the ASGI server would have sent it."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Data of an event stream, JSON where it is JSON."""
        lines = [line for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [json.loads(d) if (d := line.removeprefix("data: ")).startswith("{") else d for line in lines]

    @property
    def text(self) -> str:
        """All text of a streamed chat or completion."""
        choices = [choice for event in self.events if isinstance(event, dict) for choice in event.get("choices", [])]
        return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)


async def ask(
    app: Any,
    method: str,
    path: str,
    body: Any = None,
    *,
    headers: dict[str, str] | None = None,
    pieces: list[bytes] | None = None,
    on_chunk: Callable[[Answer], Any] | None = None,
    leave: asyncio.Event | None = None,
) -> Answer:
    """Drive an ASGI app with one request; `pieces` sends a chunked body, `leave` hangs up when it is set."""
    data = pieces if pieces is not None else [b"" if body is None else json.dumps(body).encode()]
    raw = {"content-type": "application/json", **(headers or {})}
    if pieces is None:
        raw.setdefault("content-length", str(len(data[0])))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},  # as uvicorn says
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
        "headers": [(k.lower().encode(), v.encode()) for k, v in raw.items()],
    }
    answer, parts = Answer(), iter(enumerate(data, start=1))

    async def receive() -> dict[str, Any]:
        for number, piece in parts:
            return {"type": "http.request", "body": piece, "more_body": number < len(data)}
        await (leave or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            assert answer.status is None, "the answer started twice"
            answer.status = message["status"]
            answer.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
        elif message["type"] == "http.response.body" and message.get("body"):
            assert answer.status is not None, "a body before the start"
            answer.chunks.append(message["body"])
            if on_chunk is not None:
                on_chunk(answer)

    await asyncio.wait_for(app(scope, receive, send), 60)
    return answer
