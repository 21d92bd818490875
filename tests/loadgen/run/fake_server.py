"""A small OpenAI server in the test's own process: answers by rules, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Asked = dict[str, Any]
TEMPLATE = 5  # tokens that it counts beyond the words of a prompt


class FakeServer:
    """`rule(body, headers)` says what becomes of a request: None or {} for a good answer, else any of

    status, headers: of the answer; cut: tokens after which the connection breaks off; fault: tokens after which an
    error comes in the stream; stall: tokens after which none come; pause: seconds before each token; words: the
    answer's words; silent: no [DONE].
    """

    def __init__(self, rule: Callable[[Asked, Any], Asked | None] = lambda body, headers: None) -> None:
        self.rule = rule
        self.asked: list[tuple[str, Asked, dict[str, str]]] = []
        self.gone = 0  # clients that left before the end
        self.open = 0
        self.most_open = 0
        self.preemptions = 0
        self.peers: set[object] = set()  # connections that requests came by

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """The server's URL while it runs."""
        app = web.Application()
        for path in ("/v1/chat/completions", "/v1/completions"):
            app.router.add_post(path, self._answer)
        app.router.add_get("/v1/models", _models)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    @contextlib.contextmanager
    def in_thread(self) -> Iterator[str]:
        """The same for a test that runs its own event loop."""
        ready, url = threading.Event(), [""]
        loop = asyncio.new_event_loop()
        stop = asyncio.Event()

        async def serve() -> None:
            async with self.serving() as url[0]:
                ready.set()
                await stop.wait()

        thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
        thread.start()
        assert ready.wait(10)
        try:
            yield url[0]
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()

    async def until_left(self, clients: int) -> bool:
        """Whether so many clients left before the end of their answers; waits some seconds for the server to notice."""
        for _ in range(500):
            if self.gone >= clients:
                break
            await asyncio.sleep(0.02)
        return self.gone == clients

    async def _metrics(self, _: web.Request) -> web.Response:
        self.preemptions += 3
        return web.Response(text=f'vllm:num_preemptions_total{{model="m"}} {self.preemptions}\nup 1\n')

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        self.asked.append((request.path, body, {name.lower(): value for name, value in request.headers.items()}))
        rule = self.rule(body, request.headers) or {}
        if rule.get("status", 200) != 200:
            return web.json_response({"error": {"message": "no"}}, status=rule["status"], headers=rule.get("headers"))
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            return await self._stream(request, body, rule)
        except ConnectionResetError:
            self.gone += 1
            return web.Response()
        finally:
            self.open -= 1

    async def _stream(self, request: web.Request, body: Asked, rule: Asked) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        chat = "messages" in body
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        prompt = prompt if isinstance(prompt, str) else prompt[0]["text"]
        wanted = body.get("max_tokens") or body.get("max_completion_tokens") or 4
        words = rule.get("words") or [f"{prompt.split()[0]}{i} " for i in range(wanted)]
        for i, word in enumerate(words[:wanted]):
            await _wait(request, 60.0 if rule.get("stall") == i else rule.get("pause", 0))
            if rule.get("cut") == i and request.transport is not None:
                request.transport.abort()
                return response
            if rule.get("fault") == i:
                await response.write(_event({"error": {"message": "engine died"}}))
                return response
            if chat and i == 0:  # as vLLM does it: who speaks is told when the first token is there
                await response.write(_event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
            choice: Asked = {"delta": {"content": word}} if chat else {"text": word}
            if body.get("return_token_ids"):
                choice["token_ids"] = [1000 + i]
            await response.write(_event({"choices": [choice], "usage": None}))
        usage = {"prompt_tokens": len(prompt.split()) + TEMPLATE, "completion_tokens": len(words[:wanted])}
        await response.write(_event({"choices": [], "usage": usage}))
        if not rule.get("silent"):
            await response.write(b"data: [DONE]\n\n")
        return response


def _event(value: Asked) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


async def _wait(request: web.Request, seconds: float) -> None:
    """Wait; ConnectionResetError as soon as the client has left."""
    end = asyncio.get_running_loop().time() + seconds
    while (left := end - asyncio.get_running_loop().time()) > 0:
        await asyncio.sleep(min(left, 0.02))
        if request.transport is None or request.transport.is_closing():
            raise ConnectionResetError


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "fake"}]})
