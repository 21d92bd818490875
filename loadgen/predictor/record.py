"""Ask a running OpenAI-compatible vLLM server prompts of many kinds and log how long it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from policies.predictors import LoggedRequest


class RecordingFailed(RuntimeError):
    """The server cannot be reached or answers with something else: the message says what to do."""


async def record(
    url: str,
    prompts: Sequence[tuple[str, str]],
    path: Path,
    *,
    max_tokens: int,
    concurrency: int,
    done: Callable[[], None],
) -> int:
    """Ask all (kind, text) prompts greedily, at most `concurrency` at once; append one line per answer to `path`.

    The model stops where it wants to, at the latest after `max_tokens` tokens. `done` is called after each. Returns
    how many lines were written; what was answered before a failure stays in the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    gate, written = asyncio.Semaphore(concurrency), 0
    failure: Exception | None = None
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        model = (await _json(session.get(f"{url}/v1/models"), url))["data"][0]["id"]
        with path.open("ab") as log:

            async def one(kind: str, text: str) -> None:
                nonlocal written
                body = {
                    "model": model,
                    "messages": [{"role": "user", "content": text}],
                    "max_tokens": max_tokens,
                    "temperature": 0,
                    "return_token_ids": True,
                }
                async with gate:
                    answer = await _json(session.post(f"{url}/v1/chat/completions", json=body), url)
                ids = answer.get("prompt_token_ids")
                if not ids:
                    raise RecordingFailed(f"{url} gives no prompt_token_ids: it must be vLLM's server or Tidegate")
                tokens = answer["usage"]["completion_tokens"]
                log.write(msgspec.json.encode(LoggedRequest(tuple(ids), max_tokens, tokens, kind)) + b"\n")
                written += 1
                done()

            try:
                async with asyncio.TaskGroup() as group:
                    for kind, text in prompts:
                        group.create_task(one(kind, text))
            except* RecordingFailed as failures:
                failure = failures.exceptions[0]
    if failure is not None:
        raise failure
    return written


async def _json(call: Any, url: str) -> Any:
    try:
        async with call as answer:
            if answer.status != 200:
                raise RecordingFailed(f"{url} answered {answer.status}: {(await answer.text())[:500]}")
            return await answer.json()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise RecordingFailed(f"no server at {url} ({error!r}): start one (`make serve`) or give --url") from None
