"""Streaming client of an OpenAI-compatible server, cheap enough to share a core with what it measures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import msgspec

from loadgen.metrics import RequestRecord

REASON = "x-tidegate-reason"  # why the fleet refused a request, for machines
CONSTRAINED = {"response_format", "structured_outputs", "tool_choice"}  # fields that bind an answer to a grammar
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to ask: text and the number of tokens to answer with (forced: end-of-sequence is ignored; 0: not forced).

    `headers` and `body` are added to those of the request, `X-Vllm-Priority` or `priority` say. `path` is where it
    goes, chat or completions; a body with `messages` or `prompt` of its own needs no text.
    """

    text: str
    output_len: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    path: str = CHAT

    def request(self, model: str) -> dict[str, Any]:
        """The JSON body of the HTTP request."""
        body: dict[str, Any] = {"model": model, "temperature": 0, "stream": True}
        if self.path == CHAT:
            body["messages"] = [{"role": "user", "content": self.text}]
        else:
            body["prompt"] = self.text
        if self.output_len:
            # A grammar ends by itself: engines fail when they are made to go on after it (vLLM issue 37506).
            body |= {"max_tokens": self.output_len, "ignore_eos": not CONSTRAINED & self.body.keys()}
        return {**body, "stream_options": {"include_usage": True}, **self.body}


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Answer:
    """The stream of one answer, as it comes: pieces of text, when each came, what it counts."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.pieces: list[str] = []
        self.token_ids: list[int] = []
        self.usage = _Usage()
        self.finished = False
        self._rest = b""

    def take(self, chunk: bytes, now: float) -> str:
        """Take in bytes of the stream that came at `now`; returns what the server says went wrong, if it does."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            try:
                event = _decode(line[5:])
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if line[5:].strip() == b"[DONE]":
                    self.finished = True
                    continue
                return f"an event that is not understood: {error}: {line[5:100]!r}"
            if problem := self._event(event, now):
                return problem
        return ""

    def take_object(self, chunk: Any, now: float) -> str:
        """The same for an event that comes as a Python object."""
        try:
            return self._event(msgspec.convert(chunk, _Event), now)
        except msgspec.ValidationError as error:
            return f"an event that is not understood: {error}: {str(chunk)[:100]}"

    def _event(self, event: _Event, now: float) -> str:
        if event.error:
            return str(event.error)[:200]
        if event.usage is not None:
            self.usage = event.usage
        for choice in event.choices:
            self._add(choice, now)
        return ""

    def record(
        self, due: float, sent: float, problem: str, status: int, reason: str = "", wait: str = "", left: str = ""
    ) -> RequestRecord:
        """What became of the request; an answer without its end or without a token is a failed one."""
        if not problem and not (self.finished and self.times):
            problem = "the stream ended without [DONE] or without a token"
        return RequestRecord(
            due,
            sent,
            self.usage.prompt_tokens,
            self.usage.completion_tokens or len(self.token_ids) or len(self.times),
            self.times[0] - due if self.times else 0.0,
            self.times[-1] - due if self.times else 0.0,
            error=problem,
            status=status,
            reason=reason,
            retry_after=float(wait) if wait.isdecimal() else None,
            times=tuple(self.times),
            text="".join(self.pieces),
            token_ids=tuple(self.token_ids),
            left=left,
        )

    def _add(self, choice: _Choice, now: float) -> None:
        delta = choice.delta
        text = choice.text if delta is None else delta.content or delta.reasoning or delta.reasoning_content
        if text:
            self.pieces.append(text)
        if choice.token_ids:
            self.token_ids += choice.token_ids
        if text or choice.token_ids or (delta is not None and delta.tool_calls):
            self.times.append(now)


class Client(Protocol):
    """Something that asks a server: over HTTP, or by a Python handle."""

    async def ask(
        self,
        prompt: Prompt,
        t0: float,
        due: float | None = None,
        leave_at: float | None = None,
        why: str = "cancelled",
        started: Callable[[], None] | None = None,
    ) -> RequestRecord:
        """Send one request and read its answer to the end; see StreamingClient."""
        ...

    def leave_all(self) -> None:
        """Leave all requests that are open now."""
        ...


class StreamingClient:
    """Sends streamed requests to one server over kept-alive connections."""

    def __init__(
        self, base_url: str, model: str, timeout_s: float = 300.0, headers: Mapping[str, str] | None = None
    ) -> None:
        self._base = base_url
        self._model = model
        self._timeout_s = timeout_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),  # ours costs once a request, aiohttp's at every chunk
            headers=headers,
            json_serialize=lambda body: msgspec.json.encode(body).decode(),
        )
        self._open: set[asyncio.Timeout] = set()

    async def __aenter__(self) -> StreamingClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def ask(
        self,
        prompt: Prompt,
        t0: float,
        due: float | None = None,
        leave_at: float | None = None,
        why: str = "cancelled",
        started: Callable[[], None] | None = None,
    ) -> RequestRecord:
        """Send one request and read it to its end; times are `time.perf_counter()` seconds since `t0`.

        `due`: when the plan wanted it sent, default now. At `leave_at` the connection is closed, for the reason `why`.
        `started` is called at the first token. What fails is told in the record's `error`.
        """
        sent = time.perf_counter() - t0
        due = sent if due is None else due
        answer = Answer()
        headers: Mapping[str, str] = {}
        status, problem, left = 0, "", ""
        patience = self._timeout_s if leave_at is None else min(self._timeout_s, max(0.0, leave_at - sent))
        limit = asyncio.timeout(patience)
        self._open.add(limit)
        try:
            async with (
                limit,
                self._session.post(
                    self._base + prompt.path, json=prompt.request(self._model), headers=prompt.headers
                ) as response,
            ):
                status, headers = response.status, response.headers
                if status != 200:
                    problem = f"status {status}: {(await response.text())[:200]}"
                else:
                    problem = await _read(response.content, answer, t0, started)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            # A ValueError is a header that HTTP does not allow: this request fails, not the run.
            problem = f"{type(error).__name__}: {error}"
            if answer.finished:
                problem = ""
            elif limit.expired() and patience == self._timeout_s <= time.perf_counter() - t0 - sent:
                problem = f"TimeoutError: no end after {patience:g} s"
            elif limit.expired():
                left = problem = why
        finally:
            self._open.discard(limit)
        told = headers if problem else {}
        return answer.record(due, sent, problem, status, told.get(REASON, ""), told.get("Retry-After", ""), left)

    def leave_all(self) -> None:
        """Close the connections of all requests that are open now."""
        now = asyncio.get_running_loop().time()
        for limit in self._open:
            limit.reschedule(now)


async def _read(stream: aiohttp.StreamReader, answer: Answer, t0: float, started: Callable[[], None] | None) -> str:
    while chunk := await stream.readany():
        problem = answer.take(chunk, time.perf_counter() - t0)
        if started is not None and answer.times:
            started()
            started = None
        if problem:
            return problem
    return ""  # read to the end of the body, not only to [DONE]: the connection can be used again


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
