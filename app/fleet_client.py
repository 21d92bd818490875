"""vLLM's EngineClient over the fleet: what the OpenAI serving classes call instead of a local engine.

One detokenizer, one stop-string window and one log-probability state live here per client sequence, for the whole
life of the stream, whichever replicas it runs on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from copy import copy
from typing import Any

from ray.serve.handle import DeploymentHandle

from app.errors import ClientGone, FleetError, NoReplicaAvailable, Overloaded, RequestTimeout, Shed
from app.incoming import Incoming, incoming, record_early
from app.metrics import Outcome, Promise, RequestMetrics
from app.remote_engine import RemoteEngine
from app.request_log import RequestLog
from app.request_span import of_handle, resumed
from app.stream import Stream
from app.streams import Failover, run_stream
from app.vllm_compat import (
    EngineCoreRequest,
    GracefulHTTPError,
    InputProcessor,
    OutputProcessor,
    ParentRequest,
    RequestOutput,
    RequestOutputCollector,
    SamplingParams,
    VLLMClientError,
    extract_prompt_components,
    renderer_from_config,
)
from deployments import metrics
from deployments.delta_link import DeltaReceiver
from deployments.token_codec import to_engine_output
from deployments.wire import Delta, trace_id
from policies.admission import AdmissionQueue

logger = logging.getLogger(f"ray.serve.{__name__}")


class FleetEngineClient(RemoteEngine):
    """Tokenised requests in, detokenised outputs out; the engines are elsewhere.

    `handle` is the Serve handle of the engine replicas, `host` the address that replicas reach this process at,
    `has_replica` says whether routing has any replica now, `observe(prompt, output)` gets finished lengths (tokens),
    `queue` decides who may wait for a first token (429 for the others), `default_tier` is the tier of a request that
    did not come through gate or Python API, `timeout_s` bounds the life of a request (None: no bound), `log` takes
    note of finished ones, `figures` of all.
    """

    def __init__(
        self,
        vllm_config: Any,
        handle: DeploymentHandle,
        host: str,
        *,
        has_replica: Callable[[], bool],
        observe: Callable[[int, int], None],
        failover: Failover,
        queue: AdmissionQueue[Incoming],
        default_tier: int,
        timeout_s: float | None,
        log: RequestLog | None = None,
        figures: RequestMetrics | None = None,
    ) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self._model = str(self.model_config.served_model_name)
        self.renderer = renderer_from_config(vllm_config)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self._outputs = OutputProcessor(self.renderer.tokenizer, log_stats=False, stream_interval=1)
        self._collectors: dict[str, RequestOutputCollector] = {}
        self._streams: dict[str, Stream] = {}
        self._handle = handle
        self._receiver = DeltaReceiver(host, self._on_deltas)
        self._has_replica = has_replica
        self._observe = observe
        self._failover = failover
        self._queue = queue
        self._default_tier = default_tier
        self._timeout_s = timeout_s
        self._log = log
        self._figures = figures or RequestMetrics([Promise("standard")])

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Refuse up front what cannot be served: 503 without any replica, 429 for what the queue does not take."""
        request = self._request()
        self._decide(request, n)
        request.wanted = max(request.wanted, n)

    def _request(self) -> Incoming:
        return incoming.get() or Incoming(self._default_tier)

    def _decide(self, request: Incoming, n: int) -> tuple[Incoming, ...]:
        """The requests to shed for this one; raises if it is refused."""
        error: FleetError
        if not self._has_replica():
            error = NoReplicaAvailable("no engine replica can take requests now; try again later", retry_after=5)
        else:
            verdict = self._queue.decide(request.tier, n)
            if verdict.reason is None:
                return verdict.shed
            wait = self._queue.retry_after(request.tier)
            if verdict.reason == "queue_full":
                full = (
                    f"{len(self._queue)} requests wait, the limit is {self._queue.total} (ingress.max_queued_requests)"
                )
            else:
                bound = self._queue.per_tier[request.tier]
                full = (
                    f"{self._queue.waiting(request.tier)} requests of this tier wait, its limit is {bound} (max_queued)"
                )
            message = f"{full} for a first token; try again in {wait} s"
            error = Overloaded(message, retry_after=wait, reason=verdict.reason)
        self._figures.refused(request.tier, error.reason or "")
        record_early(error)
        raise error

    def _admit(self, request: Incoming, n: int) -> None:
        """Check again when a request is about to queue: a burst passes the first check before any of it counts.

        A request of several prompts was counted whole by the first check and is not cut short here.
        """
        if request.admitted:
            return
        for other in self._decide(request, max(n, request.wanted)):
            wait = self._queue.retry_after(other.tier)
            message = f"a request of a higher tier took the place of this one in the queue; try again in {wait} s"
            for rid in list(other.rids):
                if (collector := self._collectors.get(rid)) is not None:
                    collector.put(Shed(message, retry_after=wait))
            self._figures.refused(other.tier, "shed")
            self._end(list(other.rids), "shed")
        request.admitted = True

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Any = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one request (n sequences) on the fleet; closing or cancelling the generator aborts all of them.

        Tier and session are those that the ingress chose (`incoming`); `priority`, which vLLM read off the request, is
        not one of our tiers. Raises VLLMClientError for bad input (400), Overloaded and Shed (429), NoReplicaAvailable
        and ReplicaLost (503).
        """
        request = self._request()
        if request.span is None:
            request.span = of_handle(request_id)
        if (span := request.span) is not None:
            trace_headers = span.headers
        rids: list[str] = []
        internal_id = None
        yielded = False
        outcome: Outcome = "aborted"
        deadline = None if self._timeout_s is None else asyncio.get_running_loop().time() + self._timeout_s
        try:
            core = self.input_processor.process_inputs(
                request_id,
                prompt,
                sampling_params,
                supported_tasks=("generate",),
                lora_request=lora_request,
                tokenization_kwargs=tokenization_kwargs,
                trace_headers=trace_headers,
                session_id=session_id,
            )
            self._admit(request, sampling_params.n)
            if request.charge is not None:
                request.charge.tokens(len(core.prompt_token_ids))
            if request.span is not None:
                request.span.admitted(self._model, len(core.prompt_token_ids))
            text, _, _ = extract_prompt_components(self.model_config, prompt)
            self.input_processor.assign_request_id(core)
            internal_id = core.request_id
            collector = RequestOutputCollector(sampling_params.output_kind, internal_id)
            for index, (child, parent) in enumerate(_children(core)):
                rids.append(child.request_id)
                self._outputs.add_request(child, text, parent, index, collector)
                self._collectors[child.request_id] = collector
                self._start(
                    Stream(
                        rid=child.request_id,
                        prompt=child.prompt_token_ids,
                        params=child.sampling_params,
                        arrival=core.arrival_time,
                        request=request,
                        cache_salt=child.cache_salt,
                        trace=dict(trace_headers) if trace_headers else None,
                        reasoning_ended=reasoning_ended,
                        reasoning_parser_kwargs=reasoning_parser_kwargs,
                    )
                )
            finished = False
            while not finished:
                output = collector.get_nowait()
                if output is None:
                    async with asyncio.timeout_at(deadline):
                        output = await collector.get()
                finished = output.finished
                yield output
                yielded = True
        except ClientGone:
            raise asyncio.CancelledError from None  # whoever still waits for this was forgotten: it ends without a word
        except TimeoutError:
            outcome = "timeout"
            error = RequestTimeout(f"the request took longer than {self._timeout_s:g} s (ingress.request_timeout_s)")
            if not yielded:
                request.error = error
            raise error from None
        except Exception as error:
            if not yielded:
                request.error = error
            if not isinstance(error, (VLLMClientError, GracefulHTTPError, ValueError, TypeError)):
                logger.exception("request %s failed", request_id)
            raise
        finally:
            self._end(rids, outcome)
            if span is not None and span.by_handle and not request.rids:
                request.span = None
                span.end(None, None, request.error)
            if internal_id is not None:
                self._outputs.abort_requests((internal_id,), internal=True)

    def _start(self, stream: Stream) -> None:
        self._streams[stream.rid] = stream
        request = stream.request
        request.rids.add(stream.rid)
        self._queue.enter(request, request.tier, time.monotonic(), whole=not request.begun)
        stream.task = asyncio.get_running_loop().create_task(
            run_stream(stream, self._handle, self._receiver.endpoint, self._failover, self._fail)
        )

    def _fail(self, stream: Stream, error: Exception) -> None:
        if self._forget(stream.rid) is not None:
            self._note_end(stream, "aborted" if isinstance(error, ClientGone) else "failed")
        if (collector := self._collectors.get(stream.rid)) is not None:
            collector.put(error)

    def _note_end(self, stream: Stream, outcome: Outcome) -> None:
        self._figures.ended(stream, outcome)
        if (span := stream.request.span) is not None:
            resumed(stream)
            span.sequence_ended(len(stream.delivered), outcome)

    def _forget(self, rid: str) -> Stream | None:
        """Take a sequence off the books; None if it was off already."""
        if (stream := self._streams.pop(rid, None)) is not None:
            stream.request.rids.discard(rid)
            if not stream.delivered:
                self._queue.leave(stream.request)
        return stream

    def _end(self, rids: Iterable[str], outcome: Outcome = "aborted") -> None:
        """Forget sequences; those still running are aborted on their replicas."""
        for rid in rids:
            self._collectors.pop(rid, None)
            if (stream := self._forget(rid)) is not None:
                self._note_end(stream, outcome)
                if stream.task is not None:
                    stream.task.cancel()

    def _on_deltas(self, deltas: list[Delta]) -> None:
        """One frame of the link: at most one engine step of one replica."""
        outputs, now = [], time.monotonic()
        for delta in deltas:
            stream = self._streams.get(delta.rid)
            if stream is None:
                continue
            request, first, hop, last_at = stream.request, not stream.delivered, stream.hop, stream.last_at
            taken = stream.take(delta, now)
            if stream.hop != hop:
                _note_move(stream, None if first else now - last_at)
            for piece in taken:
                outputs.append(to_engine_output(piece, first))
                if first and piece.token_ids:
                    first = False
                    self._queue.start(request, now)
                    if request.span is not None and not request.begun:
                        request.span.first_token(now - request.began)
                    request.begun = True
                    self._figures.first_token(stream, piece.times, now)
                self._figures.tokens(request.tier, len(piece.token_ids))
                if request.charge is not None:
                    request.charge.tokens(len(piece.token_ids))
            if stream.finished:
                self._finish(stream)
        if not outputs:
            return
        for rid in self._outputs.process_outputs(outputs).reqs_to_abort:  # a stop string was found
            if (stream := self._streams.get(rid)) is not None:
                self._finish(stream)
                if stream.task is not None:
                    stream.task.cancel()

    def _finish(self, stream: Stream) -> None:
        if self._forget(stream.rid) is not None:
            self._note_end(stream, "finished")
        stream.finish()
        self._observe(len(stream.prompt), len(stream.delivered))
        if self._log is not None:
            self._log.note(stream.prompt, stream.params.max_tokens, len(stream.delivered), stream.request.tier)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort requests by their external ids."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        self._end(self._outputs.abort_requests(ids, internal=False))

    def close(self) -> None:
        """Stop listening for tokens; running sequences are aborted."""
        self._end(list(self._streams))
        self._receiver.close()


def _note_move(stream: Stream, pause: float | None) -> None:
    """A stream has gone over to another replica, `pause` seconds after the last token before (None: there was none)."""
    if pause is not None:
        metrics.paused(pause)
    logger.info(
        "moved request=%s trace=%s epoch=%d hop=%d replica=%s delivered=%d pause_ms=%s",
        *(stream.rid, trace_id(stream.trace), stream.epoch, stream.hop, stream.sender, len(stream.delivered)),
        "-" if pause is None else f"{pause * 1e3:.1f}",
    )


def _children(request: EngineCoreRequest) -> Iterable[tuple[EngineCoreRequest, ParentRequest | None]]:
    """The n sequences of a request, as vLLM's AsyncLLM fans them out."""
    if request.sampling_params.n == 1:
        yield request, None
        return
    parent = ParentRequest(request)
    for index in range(request.sampling_params.n):
        child = copy(request)
        child.request_id, child.sampling_params = parent.get_child_info(index)
        yield child, parent
