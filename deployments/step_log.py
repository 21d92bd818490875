"""A log of an engine's steps: what came, what was scheduled, what a step consisted of, how long it took.

Nothing of it exists unless it is asked for: `StepLog` puts itself before five methods of one scheduler, so that a
scheduler without a log has no line for it to pass. `loadgen calibrate` fits step times to the file, `loadgen replay`
plays it again.

Names of vLLM 0.32 besides those of deployments/scheduler.py, held by tests/deployments/test_step_log.py: of the
scheduler `scheduler_config` (`max_num_seqs`, `max_num_batched_tokens`), `has_unfinished_requests` and
`kv_cache_manager.enable_caching`; `Request.num_prompt_tokens`, `.num_output_tokens`, `.max_tokens`.
"""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deployments.step_content import Step, content_of

#: What was decided in the step: two engines that do the same have the same there.
DECIDED = (*Step._fields, "waiting", "running", "free_blocks", "preempted", "scheduled", "left")
COLUMNS = ("step", "now", "seconds", *DECIDED, "in_flight", "arrivals", "setting")

Row = dict[str, Any]


class StepLog:
    """Writes a row for each step of a scheduler that has tokens in it.

    Requests are known by their numbers, in the order in which they came; those that left before any step have none.

    now: the scheduler's clock when it began to schedule, seconds. The clock stands still while it does.
    seconds: from the end of the step before (from `now`, if the engine was idle) until the step's tokens were taken in.
    prefill_tokens, prefill_requests, attention, decodes, context_tokens: as in Step.
    waiting, running (requests), free_blocks (KV): when the step was scheduled.
    scheduled: `NUMBER:TOKENS` in the order of the batch, `NUMBER` for one token. preempted: numbers, in that order.
    left: `NUMBER:TOKENS` of the requests that ended before the next step was scheduled, with the tokens they generated.
    in_flight: steps that were not over yet when this one was scheduled.
    arrivals: JSON, for each request that came since the step before: id, arrival time, prompt tokens, max_tokens, tier,
        its hints of the answer's length (true, predicted), tokens generated elsewhere.
    setting: JSON in the first row (limits, tiers, policy), and in the first row of another policy.
    """

    def __init__(
        self,
        scheduler: Any,
        write: Callable[[Row], object],
        *,
        flush: Callable[[], object] = lambda: None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.row: Row = {}  # of the last step scheduled
        self.left: list[str] = []  # since then
        self._scheduler, self._write, self._flush, self._timer = scheduler, write, flush, timer
        self._numbers: dict[str, int] = {}
        self._came = 0
        self._arrivals: dict[str, list[Any]] = {}  # requests that no step has seen yet
        self._preempted: list[int] = []
        self._rows: list[Row] = []  # not written yet
        self._flying: dict[int, tuple[Any, Row, float]] = {}  # by identity of vLLM's output; rows and when they began
        self._busy_since: float | None = None  # end of the last step, if there was more to do
        self._step = 0
        self._spec: dict[str, Any] | None = None
        self._schedule, self._update = scheduler.schedule, scheduler.update_from_output
        self._add, self._preempt, self._free = (
            scheduler.add_request,
            scheduler._preempt_request,
            scheduler._free_request,
        )
        scheduler.schedule, scheduler.update_from_output = self.schedule, self.update_from_output
        scheduler.add_request = self.add_request
        scheduler._preempt_request, scheduler._free_request = self.preempt_request, self.free_request

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """The scheduler's, at one moment of its clock."""
        began = self._timer()
        scheduler, clock = self._scheduler, self._scheduler.clock
        now = clock()
        scheduler.clock = lambda: now
        try:
            output = self._schedule(throttle_prefills)
        finally:
            scheduler.clock = clock
        if output.num_scheduled_tokens:
            self._enter(output, now, began)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """The scheduler's; the step is over."""
        outputs = self._update(scheduler_output, model_runner_output)
        if (found := self._flying.pop(id(scheduler_output), None)) is not None:
            _, row, began = found
            ended = self._timer()
            row["seconds"] = ended - (began if self._busy_since is None else self._busy_since)
            if self._flying or self._scheduler.has_unfinished_requests():
                self._busy_since = ended
            else:
                self._busy_since = None
                self.write_rows()
                self._flush()
        return outputs

    def add_request(self, request: Any) -> None:
        """The scheduler's; the next step that is logged has the request among its arrivals."""
        if not self._flying and not self._scheduler.has_unfinished_requests():
            self._busy_since = None
        if request.request_id in self._scheduler.requests:  # the next part of a streamed input
            self._add(request)
            return
        self._add(request)
        self._arrivals[request.request_id] = [
            request.request_id,
            request.arrival_time,
            request.num_prompt_tokens,
            request.max_tokens,
            request.priority,
            request.hints.output_tokens,
            request.hints.predicted_tokens,
            request.num_output_tokens,
        ]

    def preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        """The scheduler's."""
        self._preempt(request, *args, **kwargs)
        self._preempted.append(self._number(request.request_id))

    def free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """The scheduler's; the request has ended."""
        if self._arrivals.pop(request.request_id, None) is None:  # else no step will ever know of it
            self.left.append(f"{self._number(request.request_id)}:{request.num_output_tokens}")
            self._numbers.pop(request.request_id, None)
        return self._free(request, *args, **kwargs)

    def write_rows(self) -> None:
        """Write the rows of the steps that are over, in the order in which they were scheduled."""
        if self._rows:
            self.row["left"] = " ".join(self.left)
        while self._rows and self._rows[0]["seconds"] is not None:
            self._write(self._rows.pop(0))

    def _enter(self, output: Any, now: float, began: float) -> None:
        self.write_rows()
        for name in self._arrivals:
            self._numbers[name] = self._came
            self._came += 1
        scheduler = self._scheduler
        scheduled: dict[str, int] = output.num_scheduled_tokens
        step, _ = content_of(scheduler.requests, scheduled)
        batch = [f"{self._number(name)}:{n}" if n != 1 else f"{self._number(name)}" for name, n in scheduled.items()]
        self._step += 1
        self.row = {
            "step": self._step,
            "now": now,
            "seconds": None,
            **step._asdict(),
            "waiting": len(scheduler.waiting) + len(scheduler.kv_holding_waiting),
            "running": len(scheduler.running),
            "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            "preempted": " ".join(map(str, self._preempted)),
            "scheduled": " ".join(batch),
            "in_flight": len(self._flying),
            "arrivals": json.dumps([*self._arrivals.values()]) if self._arrivals else "",
            "setting": self._setting(),
        }
        self._rows.append(self.row)
        self._flying[id(output)] = output, self.row, began
        self._arrivals.clear()
        self._preempted.clear()
        self.left.clear()

    def _number(self, name: str) -> int:
        """A request's number; -1 for one that came by no arrival, but moved here with its KV."""
        return self._numbers.get(name, -1)

    def _setting(self) -> str:
        scheduler, spec = self._scheduler, self._scheduler.policy_spec
        if spec == self._spec:
            return ""
        setting: dict[str, Any] = {"policy": spec}
        if self._spec is None:
            setting |= {
                "kv_blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1,
                "block_size": scheduler.block_size,
                "max_model_len": scheduler.max_model_len,
                "max_num_seqs": scheduler.scheduler_config.max_num_seqs,
                "max_num_batched_tokens": scheduler.scheduler_config.max_num_batched_tokens,
                "asynchronous": scheduler.runs_async,
                "prefix_caching": scheduler.kv_cache_manager.enable_caching,
                "tiers": scheduler._tier_spec,
            }
        self._spec = spec
        return json.dumps(setting)


def log_steps(scheduler: Any, path: str) -> None:
    """Log the steps of a scheduler to the CSV file `path`, which is replaced, until it is shut down."""
    file = Path(path).open("w", newline="")
    writer = csv.DictWriter(file, COLUMNS)
    writer.writeheader()
    log = StepLog(scheduler, writer.writerow, flush=file.flush)
    shutdown = scheduler.shutdown

    def close() -> None:
        log.write_rows()
        file.close()
        shutdown()

    scheduler.shutdown = close
