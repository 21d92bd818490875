"""Keep a client's sequence running: follow it from replica to replica, send it again when it is lost, tell its end."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ray.serve.handle import DeploymentHandle

from app.calls import Call, Lost, attach, submit
from app.errors import ClientGone, NoReplicaAvailable, ReplicaLost
from app.request_span import resume
from app.stream import Stream
from app.vllm_compat import VLLMValidationError
from deployments import metrics
from deployments.routing import NoReplicaError
from deployments.wire import trace_id

logger = logging.getLogger(f"ray.serve.{__name__}")

#: Seconds that tokens may take on the delta link after the Serve call said that they are on their way, and that the
#: call of a replica which has given the sequence away, or finished it, may take to return.
_LAST_DELTA_S = 5.0


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

    A lost replica is answered by a new submission elsewhere, which goes on after the tokens that the client has.
    Attempts count from the last token on, the time to find a replica from the last loss; moves do not count.
    """
    deadline, lost, had = math.inf, 0, 0
    while True:
        stream.submit()
        try:
            return await _follow(stream, handle, reply_to)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Serve cancels the calls of an HTTP request whose client left; vLLM's handler may not hear of it.
            return fail(stream, ClientGone("the client left"))
        except (Lost, NoReplicaError) as error:
            problem = error
        except Exception as error:  # whatever it is, the client must not wait for a task that ended
            return fail(stream, error)
        if len(stream.delivered) > had:
            deadline, lost, had = math.inf, 0, len(stream.delivered)
        if isinstance(problem, Lost):  # the time in that replica's queue was not spent looking for one
            deadline, lost = math.inf, lost + 1
        deadline = min(deadline, time.monotonic() + failover.timeout_s)
        if lost >= failover.max_attempts or time.monotonic() > deadline:
            return fail(stream, _given_up(stream, lost, problem))
        reason = problem.reason if isinstance(problem, Lost) else "no_replica"  # the router has waited for one already
        metrics.failed_over(reason)
        logger.warning(
            "failover request=%s trace=%s epoch=%d hop=%d delivered=%d reason=%s message=%s",
            *(stream.rid, trace_id(stream.trace), stream.epoch, stream.hop, len(stream.delivered)),
            *(reason, str(problem)[:200]),
        )
        resume(stream, reason, lost)


def _given_up(stream: Stream, lost: int, problem: Lost | NoReplicaError) -> Exception:
    """What the client hears: before its first token it may try again, after it the answer is cut."""
    if stream.delivered:
        message = (
            f"the answer was cut after {len(stream.delivered)} tokens and no replica could go on ({problem}); ask again"
        )
        return ReplicaLost(message, retry_after=1)
    if isinstance(problem, NoReplicaError):
        return NoReplicaAvailable(f"{problem}; try again later", retry_after=5)
    return NoReplicaAvailable(f"no replica finished the request in {lost} attempts ({problem})", retry_after=5)


async def _follow(stream: Stream, handle: DeploymentHandle, reply_to: str) -> None:
    """Submit the sequence and follow it over its moves; returns when the client has every token.

    Raises Lost if it must be sent again, NoReplicaError if there was nobody to send it to, VLLMValidationError if the
    engine refused it.
    """
    calls = [submit(stream, handle, reply_to)]
    try:
        await _until_finished(stream, handle, calls)
        for call in calls:
            await call.linger(_LAST_DELTA_S)
    except BaseException:
        for call in calls:
            call.cancel()
        raise


async def _until_finished(stream: Stream, handle: DeploymentHandle, calls: list[Call]) -> None:
    """The last of `calls` is the run that counts; each move adds one."""
    loop = asyncio.get_running_loop()
    due: float | None = None  # when the client must have `wanted` tokens; inf: its end
    wanted = 0.0
    while not stream.finished:
        call = calls[-1]
        stream.news.clear()
        if stream.hop > call.hop and stream.sender is not None:  # a first token, whatever became of the run before
            loop.call_later(_LAST_DELTA_S, call.cancel)
            calls.append(attach(stream, handle, stream.sender, stream.hop))
            due, wanted = None, 0.0
            continue
        if stream.is_barred(call.hop):
            raise Lost("other", "it moved, and another run of it went on")
        if call.ended and wanted < math.inf:
            outcome = call.outcome()
            if outcome.fault is not None:
                raise VLLMValidationError(outcome.message, parameter=outcome.parameter)
            due, wanted = loop.time() + _LAST_DELTA_S, math.inf
            if outcome.moved_to is not None:
                wanted = outcome.tokens
                calls.append(attach(stream, handle, outcome.moved_to, outcome.hop))
                continue
        try:
            async with asyncio.timeout_at(due):
                await stream.news.wait()
        except TimeoutError:
            if len(stream.delivered) < wanted:
                raise Lost("tokens_lost", "its last tokens did not arrive") from None
            due = None
