"""Serve calls that stand for a sequence on a replica: its submission, and attaching to it where it has moved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from app.stream import Stream
from deployments.routing import NoReplicaError
from deployments.token_codec import encode_params
from deployments.wire import Outcome, Submit, ticket

_encoder = msgspec.msgpack.Encoder()

#: Why a sequence is sent again: the label of `tidegate_failovers_total`.
REASONS = frozenset({"actor_died", "engine_dead", "draining", "stalled", "tokens_lost", "no_replica", "other"})


class Lost(Exception):
    """A run of the sequence ended without its end, by no fault of the request. `reason` is one of `REASONS`."""

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.reason = reason


class Call:
    """One run of a sequence, `hop` of its epoch, as a pending Serve call; `on_end` is called when it has ended."""

    def __init__(self, hop: int, response: DeploymentResponse[Outcome], on_end: Callable[[], None]) -> None:
        self.hop = hop
        self._response = response
        self._on_end = on_end
        self._task: asyncio.Task[Outcome] = asyncio.ensure_future(self._wait())
        self._task.add_done_callback(self._ended)

    async def _wait(self) -> Outcome:
        return await self._response

    def _ended(self, task: asyncio.Task[Outcome]) -> None:
        if task.cancelled():
            self._response.cancel()  # here, since a task that is cancelled before its first step never runs
        else:
            task.exception()  # it may be nobody's business any more
        self._on_end()

    @property
    def ended(self) -> bool:
        """Whether the call has returned."""
        return self._task.done()

    def outcome(self) -> Outcome:
        """How the run ended; raises Lost, NoReplicaError, what it raised, or CancelledError if Serve cancelled it."""
        try:
            outcome = self._task.result()
        except NoReplicaError as error:
            if self.hop == 0:
                raise
            raise Lost("actor_died", str(error)) from error
        except (RayError, RayServeException) as error:
            reason = "actor_died" if isinstance(error, RayActorError | ActorUnavailableError) else "other"
            raise Lost(reason, type(error).__name__) from error
        if outcome.fault == "engine":
            reason = outcome.message.split(":")[0]
            raise Lost(reason if reason in REASONS else "other", outcome.message)
        return outcome

    def cancel(self) -> None:
        """Abort the run on its replica; nothing happens if the call has returned."""
        self._task.cancel()

    async def linger(self, seconds: float) -> None:
        """Give a run that no longer counts so long to end by itself, then abort it."""
        await asyncio.wait([self._task], timeout=seconds)
        self.cancel()


def submit(stream: Stream, handle: DeploymentHandle, reply_to: str) -> Call:
    """Send prompt and delivered tokens to the replica that the router chooses, as the stream's epoch."""
    number = ticket(stream.rid, stream.epoch)
    begun = bool(stream.delivered)
    message = Submit(
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
        _encoder.encode(message),
        ticket=number,
        prompt_tokens=len(stream.prompt) + len(stream.delivered),
        tier=stream.request.tier,
        session=stream.request.session,
        trace=stream.trace,
    )
    return Call(0, response, stream.news.set)


def attach(stream: Stream, handle: DeploymentHandle, replica: str, hop: int) -> Call:
    """Wait for the sequence where it has moved, as hop `hop` of the stream's epoch."""
    response = handle.attach.remote(stream.rid, stream.epoch, hop, target_replica=replica)
    return Call(hop, response, stream.news.set)
