"""Streaming client of an OpenAI-compatible server, cheap enough to share a core with what it measures."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from loadgen.metrics import RequestRecord

DATA = b"data: "
DONE = b"data: [DONE]"
REASON = "x-tidegate-reason"  # why the fleet refused a request, for machines


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to ask: chat text and the number of tokens to answer with (forced: end-of-sequence is ignored).

    `headers` and `body` are added to those of the request, `X-Vllm-Priority` or `priority` say.
    """

    text: str
    output_len: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)


class StreamingClient:
    """Sends streamed chat requests to one server over kept-alive connections."""

    def __init__(self, base_url: str, model: str, timeout_s: float = 300.0) -> None:
        self._url = f"{base_url}/v1/chat/completions"
        self._model = model
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=timeout_s)
        )

    async def __aenter__(self) -> StreamingClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def ask(self, prompt: Prompt, t0: float, due: float | None = None) -> RequestRecord:
        """Send one request and read it to its end; times are `time.perf_counter()` seconds since `t0`.

        `due`: when the plan wanted it sent, default now. What fails is told in the record's `error`.
        """
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": prompt.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **prompt.body,
        }
        sent = time.perf_counter() - t0
        due = sent if due is None else due
        first, usage, finished = 0.0, {"prompt_tokens": 0, "completion_tokens": 0}, False
        last = sent
        status = 0
        try:
            async with self._session.post(self._url, json=body, headers=prompt.headers) as response:
                status = response.status
                if status != 200:
                    text = (await response.text())[:200]
                    return _failed(due, sent, f"status {status}: {text}", status, response.headers)
                async for line in response.content:
                    if not line.startswith(DATA):
                        continue
                    if line.startswith(DONE):
                        finished = True
                        break
                    # Only two kinds of line are parsed: reading every one would double the client's cost.
                    if not first and has_text(line):
                        first = time.perf_counter() - t0
                    if b'"usage":{' in line or b'"error"' in line:
                        event = json.loads(line[len(DATA) :])
                        if "error" in event:
                            return _failed(due, sent, str(event["error"])[:200], status)
                        usage = event.get("usage") or usage
                    last = time.perf_counter() - t0
        except (TimeoutError, aiohttp.ClientError) as e:
            return _failed(due, sent, f"{type(e).__name__}: {e}", status)
        if not (finished and first):
            return _failed(due, sent, "the stream ended without [DONE] or without a token", status)
        tokens_in, tokens_out = usage["prompt_tokens"], usage["completion_tokens"]
        return RequestRecord(due, sent, tokens_in, tokens_out, first - due, last - due, status=status)


def has_text(line: bytes) -> bool:
    """Whether an event line of a chat stream carries answer text (the first one only says who speaks)."""
    return b'"content":"' in line and b'"content":""' not in line


def _failed(
    due: float, sent: float, why: str, status: int = 0, headers: Mapping[str, str] | None = None
) -> RequestRecord:
    headers = headers or {}
    reason, wait = headers.get(REASON, ""), headers.get("Retry-After", "")
    return RequestRecord(
        due,
        sent,
        0,
        0,
        0.0,
        0.0,
        error=why or "no reason given",
        status=status,
        reason=reason,
        retry_after=float(wait) if wait.isdecimal() else None,
    )


async def closed_loop(client: StreamingClient, prompts: Sequence[Prompt], streams: int) -> list[RequestRecord]:
    """Keep `streams` requests in flight until every prompt was asked once."""
    t0 = time.perf_counter()
    left = iter(prompts)

    async def stream() -> list[RequestRecord]:
        return [await client.ask(prompt, t0) for prompt in left]

    parts = await asyncio.gather(*(stream() for _ in range(streams)))
    return [record for part in parts for record in part]


async def open_loop(client: StreamingClient, prompts: Sequence[Prompt], due: Sequence[float]) -> list[RequestRecord]:
    """Send each prompt at its time (seconds from now) whether or not earlier ones have been answered."""
    t0 = time.perf_counter()

    async def one(prompt: Prompt, at: float) -> RequestRecord:
        await asyncio.sleep(max(0.0, t0 + at - time.perf_counter()))
        return await client.ask(prompt, t0, at)

    return list(await asyncio.gather(*(one(p, at) for p, at in zip(prompts, due, strict=True))))
