"""The error tree and the one table that maps it to HTTP."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from app import errors
from app.errors import FleetError, error_body
from app.incoming import Incoming, incoming, record_early
from app.vllm_compat import GracefulHTTPError, openai_error

TREE = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, FleetError) and c is not FleetError]


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_vllm_answers_with_our_status(kind: type[FleetError]) -> None:
    """vLLM's own table gives each of our errors its status and message, as it does on its own routes."""
    status, body = openai_error(kind("what to do"))
    assert status == kind.status != 500
    assert body["error"]["message"] == "what to do"
    assert body["error"]["code"] == kind.status
    assert issubclass(kind, GracefulHTTPError)


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_docstring_lists_every_error(kind: type[FleetError]) -> None:
    """The tree drawn in the module's docstring shows each error with its status."""
    assert errors.__doc__
    (line,) = (line for line in errors.__doc__.splitlines() if f" {kind.__name__} " in line)
    assert str(int(kind.status)) in line


@pytest.mark.parametrize("status", [400, 404, 405, 413, 429, 500, 503, 504])
def test_body_has_openais_shape(status: int) -> None:
    """Our own answers have exactly the four fields of OpenAI's error object."""
    error = error_body(status, "text")["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] == "text"
    assert error["type"].endswith("_error")


def test_early_errors_belong_to_one_request() -> None:
    """An error recorded in one request's context is not seen by another, nor outside of any."""

    async def request(message: str | None) -> Incoming:
        one = Incoming(tier=0)
        incoming.set(one)
        await asyncio.sleep(0)
        if message is not None:
            await asyncio.create_task(asyncio.to_thread(record_early, ValueError(message)))
        return one

    async def scenario() -> list[Incoming]:
        return await asyncio.gather(*map(request, ("one", None, "two")))

    one, none, two = asyncio.run(scenario())
    assert (str(one.error), none.error, str(two.error)) == ("one", None, "two")
    record_early(ValueError("outside"))
    assert incoming.get() is None
