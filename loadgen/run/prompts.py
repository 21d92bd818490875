"""From the requests of a workload to what is sent: texts, headers for tier, session and key, the server's overhead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from loadgen.client import CHAT, COMPLETIONS, Client, Prompt
from loadgen.lengths import words
from loadgen.workloads.texts import texts
from loadgen.workloads.workload import Request, Workload

TIER_PLACES = ("header", "body", "none")
TIER_HEADER = "X-Vllm-Priority"
SESSION_HEADER = "X-Session-ID"
PROBE_WORDS = 64


class ProbeFailed(RuntimeError):
    """The server does not answer as an OpenAI server; the message says what it did."""


async def probe(client: Client, path: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> int:
    """Ask one short question; returns the tokens that the server adds to a prompt (0 if it does not count them).

    ProbeFailed if it fails.
    """
    text = words(PROBE_WORDS, np.random.default_rng(0))
    record = await client.ask(Prompt(text, 1, headers, body, path), 0.0)
    if record.error:
        raise ProbeFailed(f"the first, short request failed: {record.error}")
    return max(0, record.prompt_len - PROBE_WORDS)


def prompts(
    workload: Workload,
    *,
    path: str,
    template_tokens: int,
    tier_place: str = "header",
    keys: Mapping[str, str] | None = None,
    body: Mapping[str, Any] | None = None,
    seed: int = 0,
    run_id: str = "run",
) -> list[Prompt]:
    """A prompt for each request. `keys`: secret of each name that requests use; `body` is added to every request's.

    ValueError if a request names a key that is not among them.
    """
    keys = keys or {}
    made = []
    for i, (request, text) in enumerate(zip(workload.requests, texts(workload, seed, template_tokens), strict=True)):
        if request.key is not None and request.key not in keys:
            raise ValueError(f"key: request {i} uses {request.key!r}, which is not in the file of keys (--keys)")
        headers = {**request.headers, "X-Request-Id": f"{run_id}-{i}"}
        if request.key is not None:
            headers["Authorization"] = f"Bearer {keys[request.key]}"
        if request.session is not None:
            headers[SESSION_HEADER] = request.session
        fields = {**(body or {}), **request.body}
        if request.tier is not None and tier_place == "header":
            headers[TIER_HEADER] = str(request.tier)
        if request.tier is not None and tier_place == "body":
            fields["priority"] = request.tier
        made.append(Prompt(text or "", request.output_tokens, headers, fields, _path(request, path)))
    return made


def _path(request: Request, path: str) -> str:
    if "messages" in request.body:
        return CHAT
    return COMPLETIONS if "prompt" in request.body else path
