"""Streamed completions whose tokens are known one by one: the id of each and when the client had it.

Prompts are token ids, so that a sequence has exactly the length that is wanted; ids can be compared where text could
hide a difference.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

DATA = b"data: "
DONE = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Prompt ids and the number of tokens to answer with (forced); `headers` and `body` are added to the request."""

    ids: tuple[int, ...]
    output_len: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class TokenStream:
    """One answer: `times[i]` is when token `ids[i]` was read. Times are `time.perf_counter()` seconds.

    `status` is the HTTP status (0: no answer yet), `finish` the finish reason, `error` what failed; `whole` says
    whether the answer came to its end, `ended_at` when nothing more could come (inf: not yet).
    """

    prompt: TokenPrompt
    sent: float
    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    status: int = 0
    finish: str = ""
    error: str = ""
    whole: bool = False
    ended_at: float = math.inf
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.whole or bool(self.error)

    async def reach(self, tokens: int) -> None:
        """Wait for the first `tokens` tokens; RuntimeError if the stream ends before."""
        while len(self.ids) < tokens:
            if self.over:
                raise RuntimeError(f"a stream ended after {len(self.ids)} of {tokens} tokens: {self.error or 'whole'}")
            self._news.clear()
            await self._news.wait()

    async def ended(self) -> TokenStream:
        """The stream, once nothing more will come."""
        while not self.over:
            self._news.clear()
            await self._news.wait()
        return self

    async def cancel(self) -> None:
        """Leave, as a client does that closes the connection."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _take(self, event: dict[str, Any], now: float) -> None:
        if "error" in event:
            self.error = str(event["error"])[:300]
        for choice in event.get("choices", ()):
            ids = choice.get("token_ids") or ()
            self.ids += ids
            self.times += [now] * len(ids)
            self.finish = choice.get("finish_reason") or self.finish


class TokenClient:
    """Sends streamed completions of token ids to one server over kept-alive connections."""

    def __init__(self, base_url: str, model: str, timeout_s: float = 300.0) -> None:
        self._url = f"{base_url}/v1/completions"
        self._model = model
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=timeout_s)
        )
        self._running: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> TokenClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._session.close()

    def start(self, prompt: TokenPrompt) -> TokenStream:
        """Send one request; the stream fills while the caller does something else."""
        stream = TokenStream(prompt, time.perf_counter())
        stream._task = task = asyncio.get_running_loop().create_task(self._read(stream))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return stream

    async def ask(self, prompt: TokenPrompt) -> TokenStream:
        """One request, read to its end."""
        return await self.start(prompt).ended()

    async def _read(self, stream: TokenStream) -> None:
        body = {
            "model": self._model,
            "prompt": list(stream.prompt.ids),
            "max_tokens": stream.prompt.output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **stream.prompt.body,
        }
        finished = False
        try:
            async with self._session.post(self._url, json=body, headers=stream.prompt.headers) as response:
                stream.status = response.status
                if response.status != 200:
                    stream.error = f"status {response.status}: {(await response.text())[:300]}"
                    return
                async for line in response.content:
                    if line.startswith(DONE):
                        finished = True
                    elif line.startswith(DATA):
                        stream._take(json.loads(line[len(DATA) :]), time.perf_counter())
                        stream._news.set()
        except (TimeoutError, aiohttp.ClientError) as error:
            stream.error = stream.error or f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            stream.error = stream.error or "cancelled"
            raise
        finally:
            if not (finished and stream.finish):
                stream.error = stream.error or "the stream ended without a finish reason or [DONE]"
            stream.whole = not stream.error
            stream.ended_at = time.perf_counter()
            stream._news.set()


async def closed_loop(client: TokenClient, prompts: Sequence[TokenPrompt], streams: int) -> list[TokenStream]:
    """Keep `streams` requests in flight until every prompt was asked once; answers in the prompts' order."""
    answers: dict[int, TokenStream] = {}
    left = iter(enumerate(prompts))

    async def one() -> None:
        for i, prompt in left:
            answers[i] = await client.ask(prompt)

    await asyncio.gather(*(one() for _ in range(streams)))
    return [answers[i] for i in range(len(prompts))]
