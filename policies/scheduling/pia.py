"""PiA: sort by predicted length, run requests of like length as static batches, collect those that were misjudged.

Source: Zheng et al., "Response Length Perception and Sequence Scheduling: An LLM-Empowered LLM Inference Pipeline"
(NeurIPS 2023): sections on sequence scheduling, variable batch size and failure collection; constants of its code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from policies.predictors import Predicts
from policies.registry import flag, whole
from policies.types import Request, SchedulerContext

BUCKET = 50  # tokens
SIZES = (256, 128, 64, 32, 16)  # requests in a batch whose longest answer is 50, 100, ... tokens; beyond: SMALLEST
SMALLEST = 16
COLLECTED = math.inf  # bucket of those that outgrew theirs


class PiA(Predicts):
    """Static batches: a batch forms when the replica is idle, and nobody joins until all of it has ended.

    Requests come in groups of `group_size` by arrival; within a group the order is (bucket of 50 predicted tokens,
    arrival). A batch is one bucket of one group, of those that had arrived when it formed; where these are fewer
    than half its size, or than 16, the next longer bucket is merged into it. Answers that fill the
    batch's bucket while others wait are broken off and resumed, in batches of their own, at the end of their group
    (with `collect`; vLLM keeps the tokens and computes their KV cache again).
    A request is overtaken only by requests of its own group, fewer than `group_size`.

    group_size: requests, >= 1; 1 is FCFS one at a time.
    collect: false lets misjudged answers run on and hold up their batch.
    predictor, predictor_path: see policies/predictors.py.
    """

    name = "pia"
    reorders = True

    def __init__(
        self,
        *,
        group_size: int = 256,
        collect: bool = True,
        predictor: str = "max_tokens",
        predictor_path: str | None = None,
    ) -> None:
        super().__init__(predictor, predictor_path)
        self.group_size = whole("group_size", group_size, "It counts requests; 256 is the default.", low=1)
        self.collect = flag("collect", collect, "true is the default, as in the paper.")
        self._seen = 0
        self._groups: dict[str, int] = {}
        self._collected: set[str] = set()
        # The batch: its group, its longest bucket, when it formed, who is left of it, and whether it may grow.
        self._batch: tuple[int, float] = (0, 0.0)
        self._formed_at = 0.0
        self._members: set[str] = set()
        self._open = False

    def bucket(self, request: Request) -> float:
        """Number of the bucket, from 1: 50 tokens each; inf for those that outgrew theirs."""
        if request.request_id in self._collected:
            return COLLECTED
        return max(1, math.ceil(self.predicted_length(request) / BUCKET))

    def waiting_key(self, request: Request, ctx: SchedulerContext) -> tuple[float, float, float, str]:
        return self._group(request), self.bucket(request), request.arrival_time, request.request_id

    def order_epoch(self, ctx: SchedulerContext) -> int:
        return 0  # a request is collected while it runs, so the key that it queues with is already the new one

    def on_step(self, ctx: SchedulerContext) -> None:
        pass

    def admit(self, request: Request, running: Sequence[Request], ctx: SchedulerContext) -> bool:
        group, bucket = self._group(request), self.bucket(request)
        if not running:
            self._batch, self._formed_at = (group, bucket), ctx.now
            self._members, self._open = {request.request_id}, True
            return True
        longest = self._batch[1]
        if not self._open or group != self._batch[0] or request.arrival_time > self._formed_at:
            return False
        if bucket != longest:
            if len(running) >= max(_size(longest, ctx) / 2, SMALLEST) or COLLECTED in (bucket, longest):
                return False
            longest = max(bucket, longest)
        if len(running) >= _size(longest, ctx):
            return False
        self._batch = group, longest
        self._members.add(request.request_id)
        return True

    def select_preemptions(
        self, waiting: Sequence[Request], running: Sequence[Request], ctx: SchedulerContext
    ) -> list[Request]:
        """Those that filled the batch's bucket and want more."""
        limit = self._batch[1] * BUCKET if self.collect else math.inf
        failed = [r for r in running if limit <= r.num_output_tokens < r.max_tokens and r.request_id in self._members]
        self._collected.update(r.request_id for r in failed)
        return failed

    def on_scheduled(self, request: Request, tokens: int, ctx: SchedulerContext) -> None:
        pass

    def on_preempted(self, request: Request, ctx: SchedulerContext) -> None:
        self._leave(request)

    def on_finished(self, request: Request) -> None:
        self._leave(request)
        self._groups.pop(request.request_id, None)
        self._collected.discard(request.request_id)

    def _group(self, request: Request) -> int:
        if request.request_id not in self._groups:
            self._groups[request.request_id] = self._seen // self.group_size
            self._seen += 1
        return self._groups[request.request_id]

    def _leave(self, request: Request) -> None:
        """Nobody joins a batch that has lost a member."""
        if request.request_id in self._members:
            self._members.remove(request.request_id)
            self._open = False


def _size(bucket: float, ctx: SchedulerContext) -> int:
    return min(SIZES[int(bucket) - 1] if bucket <= len(SIZES) else SMALLEST, ctx.max_num_seqs)
