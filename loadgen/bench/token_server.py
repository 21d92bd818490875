"""A server that answers every chat request with prepared tokens at once: what is left to measure is its client.

`python -m loadgen.bench.token_server TOKENS` prints its port and serves until its input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, cast

import uvloop

PAUSE = 0.01  # s between tokens, so that they come one by one and not in one packet


def events(tokens: int) -> tuple[list[bytes], bytes]:
    """The answer's pieces as vLLM writes them, each a chunk of HTTP, and what ends it."""
    fixed = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1, "model": "bench"}
    pieces = [
        {"choices": [{"index": 0, "delta": {"content": " token"}, "logprobs": None, "finish_reason": None}]}
        for _ in range(tokens)
    ]
    counts = {"prompt_tokens": 9, "total_tokens": 9 + tokens, "completion_tokens": tokens}
    every: list[dict[str, Any]] = [*pieces, {"choices": [], "usage": counts}]
    lines = [b"data: " + json.dumps({**fixed, **event}).encode() + b"\n\n" for event in every]
    chunks = [b"%x\r\n%s\r\n" % (len(line), line) for line in [*lines, b"data: [DONE]\n\n"]]
    return chunks[:tokens], b"".join(chunks[tokens:]) + b"0\r\n\r\n"


class TokenServer(asyncio.Protocol):
    """HTTP, as little of it as one client needs: requests with a Content-Length, one after the other."""

    def __init__(self, pieces: list[bytes], end: bytes) -> None:
        self._pieces, self._end = pieces, end
        self._received = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client came."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        """Answer each request that is complete."""
        self._received += data
        while (found := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:found].lower()
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
            if len(self._received) < found + 4 + length:
                return
            self._received = self._received[found + 4 + length :]
            self._write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            asyncio.get_running_loop().call_later(PAUSE, self._piece, 0)

    def _piece(self, number: int) -> None:
        self._write(self._pieces[number] if number < len(self._pieces) else self._end)
        if number < len(self._pieces):
            asyncio.get_running_loop().call_later(PAUSE, self._piece, number + 1)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


async def serve(tokens: int) -> None:
    """Serve until the standard input ends."""
    loop = asyncio.get_running_loop()
    pieces, end = events(tokens)
    server = await loop.create_server(lambda: TokenServer(pieces, end), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
