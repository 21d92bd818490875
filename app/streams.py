"""One client sequence over the fleet: submit it, send it again when its replica is lost, tell its end."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from app.errors import ClientGone, NoReplicaAvailable, ReplicaLost
from app.incoming import Incoming
from app.vllm_compat import SamplingParams, VLLMValidationError
from deployments.routing import NoReplicaError
from deployments.token_codec import encode_params
from deployments.wire import Outcome, Submit, ticket

logger = logging.getLogger(f"ray.serve.{__name__}")

_encoder = msgspec.msgpack.Encoder()

#: Seconds that the last tokens may take on the delta link after the Serve call said that they are on their way.
_LAST_DELTA_S = 5.0


@dataclass(slots=True, eq=False)
class Stream:
    """The single truth about one sequence: what was asked, what the client has, which submission counts.

    `delivered` are the output token ids handed to the detokenizer; `epoch` grows by one per submission, deltas of
    older epochs are dropped. With `prompt` and `delivered` a later submission can go on where the last one broke.
    `request` is the client's request that this sequence belongs to.
    """

    rid: str
    prompt: list[int]
    params: SamplingParams
    arrival: float
    request: Incoming
    cache_salt: str | None = None
    trace: dict[str, str] | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    epoch: int = 0
    delivered: list[int] = field(default_factory=list)
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def accept(self, epoch: int, start: int, token_ids: list[int]) -> bool:
        """Whether a delta of this epoch is the next one; takes note of its tokens."""
        if epoch != self.epoch or start != len(self.delivered):
            return False
        self.delivered.extend(token_ids)
        return True


@dataclass(frozen=True, slots=True)
class Failover:
    """Bounds of re-sending: submissions per sequence, and seconds from the first one that failed."""

    max_attempts: int
    timeout_s: float


async def run_stream(
    stream: Stream,
    handle: DeploymentHandle,
    reply_to: str,
    failover: Failover,
    fail: Callable[[Stream, Exception], None],
) -> None:
    """Keep one sequence running until its last token or a final error (`fail`); cancelling aborts it on its replica.

    A lost replica is answered by a new submission elsewhere, which goes on after the tokens that the client has. The
    bounds count from the first loss since the last token.
    """
    deadline, lost, had = math.inf, 0, 0
    while True:
        stream.epoch += 1
        problem: Exception | None
        try:
            problem = await _submit(stream, handle, reply_to)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Serve cancels the calls of an HTTP request whose client left; vLLM's handler may not hear of it.
            return fail(stream, ClientGone("the client left"))
        except Exception as error:  # whatever it is, the client must not wait for a task that ended
            problem = error
        if problem is None:
            return
        if len(stream.delivered) > had:
            deadline, lost, had = math.inf, 0, len(stream.delivered)
        deadline = min(deadline, time.monotonic() + failover.timeout_s)
        if isinstance(problem, NoReplicaAvailable) and time.monotonic() < deadline:
            continue  # the router has waited for one already
        if not isinstance(problem, _Lost | NoReplicaAvailable):
            return fail(stream, problem)
        lost += isinstance(problem, _Lost)
        if lost >= failover.max_attempts or time.monotonic() > deadline:
            return fail(stream, _given_up(stream, lost, problem))
        logger.warning(
            "failover request=%s epoch=%d delivered=%d reason=%s", stream.rid, stream.epoch, had, str(problem)[:200]
        )


def _given_up(stream: Stream, lost: int, problem: Exception) -> Exception:
    """What the client hears: before its first token it may try again, after it the answer is cut."""
    if not stream.delivered:
        if isinstance(problem, NoReplicaAvailable):
            return problem
        message = f"no replica finished the request in {lost} attempts ({problem})"
        return NoReplicaAvailable(message, retry_after=5)
    message = (
        f"the answer was cut after {len(stream.delivered)} tokens and no replica could go on ({problem}); ask again"
    )
    return ReplicaLost(message, retry_after=1)


class _Lost(Exception):
    """The submission ended without the sequence's end, by no fault of the request."""


async def _submit(stream: Stream, handle: DeploymentHandle, reply_to: str) -> Exception | None:
    """Send one submission and wait for its end; returns None when the client has every token."""
    number = ticket(stream.rid, stream.epoch)
    begun = bool(stream.delivered)
    submit = Submit(
        rid=stream.rid,
        epoch=stream.epoch,
        reply_to=reply_to,
        prompt=stream.prompt,
        params=encode_params(stream.params, number, begun=begun),
        arrival=stream.arrival,
        priority=stream.request.tier,
        cache_salt=stream.cache_salt,
        trace=stream.trace,
        reasoning_ended=None if begun else stream.reasoning_ended,  # the replica finds out from the tokens
        reasoning_parser_kwargs=stream.reasoning_parser_kwargs,
        output=list(stream.delivered),
    )
    response = handle.generate.remote(
        _encoder.encode(submit),
        ticket=number,
        prompt_tokens=len(stream.prompt) + len(stream.delivered),
        tier=stream.request.tier,
        session=stream.request.session,
    )
    try:
        outcome: Outcome = await response
    except asyncio.CancelledError:
        response.cancel()
        raise
    except NoReplicaError as error:
        return NoReplicaAvailable(f"{error}; try again later", retry_after=5)
    except (RayError, RayServeException) as error:
        return _Lost(type(error).__name__)
    if outcome.fault == "request":
        return VLLMValidationError(outcome.message, parameter=outcome.parameter)
    if outcome.fault == "engine":
        return _Lost(outcome.message)
    try:
        await asyncio.wait_for(stream.finished.wait(), _LAST_DELTA_S)
    except TimeoutError:
        return _Lost("its last tokens did not arrive")
    return None
