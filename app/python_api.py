"""Python calls into the serving classes: the same validation, router and policies as HTTP, without HTTP."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi.datastructures import State
from pydantic import BaseModel, ValidationError

from app.errors import error_code
from app.fleet_client import FleetEngineClient
from app.incoming import incoming
from app.reception import Reception
from app.vllm_compat import (
    ChatCompletionRequest,
    CompletionRequest,
    ErrorResponse,
    RequestOutputKind,
    SamplingParams,
    openai_error,
    tokens_input,
)


class RequestRefused(Exception):
    """A call that HTTP would have answered with an error; `status` and `error` are what it would have said."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(status, error)
        self.status = status
        self.error = error

    def __str__(self) -> str:
        return f"{self.status}: {self.error['message']}"


class PythonApi:
    """Chat, completions and plain token generation for Python callers.

    Errors are RequestRefused, streams included; `body` is the JSON object of OpenAI's API as a dict. Tiers are asked
    for as over HTTP; API keys are for HTTP only, whoever has a handle is inside the cluster.
    """

    def __init__(self, state: State, client: FleetEngineClient, reception: Reception) -> None:
        self._state = state
        self._client = client
        self._reception = reception

    async def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """One chat completion."""
        return _whole(await self._chat({**body, "stream": False}))

    async def chat_stream(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Chunks of a chat completion."""
        async for chunk in _chunks(await self._chat({**body, "stream": True})):
            yield chunk

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """One text completion."""
        return _whole(await self._complete({**body, "stream": False}))

    async def complete_stream(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Chunks of a text completion."""
        async for chunk in _chunks(await self._complete({**body, "stream": True})):
            yield chunk

    async def _chat(self, body: dict[str, Any]) -> Any:
        return await self._refusing(self._state.openai_serving_chat.create_chat_completion, ChatCompletionRequest, body)

    async def _complete(self, body: dict[str, Any]) -> Any:
        return await self._refusing(self._state.openai_serving_completion.create_completion, CompletionRequest, body)

    async def _refusing(self, serve: Any, request_type: type[BaseModel], body: dict[str, Any]) -> Any:
        try:
            request, body = self._reception.call(body)
            incoming.set(request)  # the tasks of this call inherit it; the caller's next call sets its own
            result = await serve(request_type(**body))
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise RequestRefused(
                400, {"message": f"{field}: {first['msg']}", "type": "BadRequestError", "param": field, "code": 400}
            ) from error
        except Exception as error:
            raise _refused(error) from error
        if isinstance(result, ErrorResponse):
            code = None if request.error is None else error_code(request.error)
            raise RequestRefused(result.error.code, {**result.error.model_dump(), "code": code or result.error.code})
        return result

    async def generate_tokens(self, prompt: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
        """All tokens of one sequence."""
        result: dict[str, Any] = {"token_ids": [], "text": "", "finish_reason": None, "stop_reason": None}
        async for piece in self.generate_tokens_stream(prompt, sampling):
            result["token_ids"] += piece["token_ids"]
            result["text"] += piece["text"]
            result["finish_reason"], result["stop_reason"] = piece["finish_reason"], piece["stop_reason"]
        return result

    async def generate_tokens_stream(
        self, prompt: list[int], sampling: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        """New tokens of one sequence, piece by piece; `tier` beside the sampling parameters is a number or a name."""
        try:
            request, _ = self._reception.call({"priority": sampling.get("tier")})
            incoming.set(request)
            sampling = {name: value for name, value in sampling.items() if name != "tier"}
            params = SamplingParams(**sampling, output_kind=RequestOutputKind.DELTA)
            if params.n != 1:
                raise ValueError("n: generate_tokens makes one sequence; call it n times")
            self._client.check_admission(1)
            outputs = self._client.generate(tokens_input(prompt), params, f"tokens-{uuid.uuid4().hex}")
            async for output in outputs:
                sequence = output.outputs[0]
                yield {
                    "token_ids": list(sequence.token_ids),
                    "text": sequence.text,
                    "finish_reason": sequence.finish_reason,
                    "stop_reason": sequence.stop_reason,
                }
        except Exception as error:
            raise _refused(error) from error


def _refused(error: Exception) -> RequestRefused:
    if isinstance(error, RequestRefused):
        return error
    status, body = openai_error(error)
    return RequestRefused(status, {**body["error"], "code": error_code(error) or status})


def _whole(result: BaseModel) -> dict[str, Any]:
    return result.model_dump(mode="json")


async def _chunks(events: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    async for event in events:
        data = event.removeprefix("data: ").strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if "error" in chunk:
            raise RequestRefused(chunk["error"]["code"], chunk["error"])
        yield chunk
