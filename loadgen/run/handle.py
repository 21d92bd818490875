"""The same client by a Python handle of Ray Serve instead of HTTP: what the proxy and the network cost is the rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from loadgen.client import CHAT, Answer, Prompt
from loadgen.metrics import RequestRecord

PREFIX = "handle:"


class HandleClient:
    """Asks an application of the running Ray cluster, whose ingress has `chat_stream` and `complete_stream`.

    Headers of prompts are not sent: there is no HTTP. Refusals are exceptions with `status` and `error`, as
    docs/tiers.md has them.
    """

    def __init__(self, handle: Any, model: str) -> None:
        self._handle = handle.options(stream=True)
        self._model = model
        self._open: set[asyncio.Timeout] = set()

    async def ask(
        self,
        prompt: Prompt,
        t0: float,
        due: float | None = None,
        leave_at: float | None = None,
        why: str = "cancelled",
        started: Callable[[], None] | None = None,
    ) -> RequestRecord:
        """Send one request and read it to its end; see StreamingClient.ask."""
        sent = time.perf_counter() - t0
        due = sent if due is None else due
        answer = Answer()
        limit = asyncio.timeout(None if leave_at is None else max(0.0, leave_at - sent))
        self._open.add(limit)
        stream: Any = None
        status, problem, reason, left = 200, "", "", ""
        try:
            async with limit:
                call = self._handle.chat_stream if prompt.path == CHAT else self._handle.complete_stream
                stream = call.remote(prompt.request(self._model))
                async for chunk in stream:
                    problem = answer.take_object(chunk, time.perf_counter() - t0)
                    if started is not None and answer.times:
                        started()
                        started = None
                    if problem:
                        break
                answer.finished = not problem
        except TimeoutError as error:
            problem = left = why
            if not limit.expired():
                problem, left, status = f"TimeoutError: {error}", "", 0
        except Exception as error:  # whatever the application raises: the request failed, the run goes on
            cause = getattr(error, "cause", error)
            status = getattr(cause, "status", 0)
            problem = f"{type(cause).__name__}: {str(cause)[:200]}"
            reason = str(getattr(cause, "error", {}).get("code") or "") if status else ""
        finally:
            self._open.discard(limit)
            if problem and stream is not None:
                stream.cancel()
        return answer.record(due, sent, problem, status, reason, left=left)

    def leave_all(self) -> None:
        """Leave all requests that are open now."""
        now = asyncio.get_running_loop().time()
        for limit in self._open:
            limit.reschedule(now)


def connect(application: str, model: str) -> HandleClient:
    """A client of an application of the Ray cluster on this machine (or at $RAY_ADDRESS); ValueError if there is none.

    ConnectionError if there is no cluster.
    """
    import ray
    from ray import serve
    from ray.serve.exceptions import RayServeException

    if not ray.is_initialized():
        ray.init(address="auto", namespace="serve", log_to_driver=False, logging_level="ERROR")
    try:
        return HandleClient(serve.get_app_handle(application), model)
    except RayServeException as error:
        raise ValueError(f"handle: no application {application!r} runs in this Ray cluster: {error}") from None
