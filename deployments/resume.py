"""Scheduler side of sequences that go on where another replica stopped.

A continued request is its original prompt plus the tokens it has generated, kept apart as after a preemption, so that
penalties, minimum and maximum lengths, seeds and grammars stay right; only the KV cache is computed anew. The tokens
travel in `SamplingParams.extra_args["tidegate"]["output"]`.

Private names, contract-tested: `Request.append_output_token_ids`, `.num_preemptions`, `.prefill_stats`,
`Scheduler._handle_blocked_waiting_request`, `.grammar_compile_error_reqs`, `StructuredOutputManager.accept_tokens`.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from deployments.hints import extra_argument


class ResumeMixin(Scheduler):
    """Takes in requests that have generated tokens already; comes before the vLLM class in the bases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._replay: dict[str, list[int]] = {}  # grammars that must still be led through these tokens

    def add_request(self, request: Request) -> None:
        """Queue a request; one that was begun elsewhere counts as preempted."""
        output = extra_argument(request, "output")
        if output and request.request_id not in self.requests:
            request.append_output_token_ids(list(output))
            request.num_preemptions = 1
            request.prefill_stats = None  # its prompt was counted where it began
            if request.use_structured_output:
                self._replay[request.request_id] = list(output)
        super().add_request(request)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        ready = super()._handle_blocked_waiting_request(request)
        if ready and (tokens := self._replay.pop(request.request_id, None)):
            if not self.structured_output_manager.accept_tokens(request, tokens):
                self.grammar_compile_error_reqs.add(request.request_id)  # ends it with an error, not the engine
                return False
        return ready

    def _free_request(self, request: Request, delay_free_blocks: bool = False) -> Any:
        self._replay.pop(request.request_id, None)
        return super()._free_request(request, delay_free_blocks)
