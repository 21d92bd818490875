"""One replica in virtual time: a real scheduler, a step-time model, and a pipeline of one or two steps.

With coast.py it uses what deployments/scheduler.py keeps to itself: `_page`, `_publish`, `_control`, `_stale` and
`_context`, and of deployments/migration/kv_scheduler.py `_parked` and `_reservations`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from deployments.load_page import Figures
from deployments.reports import report_of
from deployments.step_content import content_of
from deployments.wire import ReplicaReport, ReplicaState
from loadgen.simulator.coast import Coast, may_coast
from loadgen.simulator.lean import TOKEN, Ended, Lean
from loadgen.simulator.step_cost import StepCost

ATTEMPTS = 8  # empty steps in a row before the scheduler counts as stuck


class Clock:
    """Virtual seconds since the start of the run; call it for the time, as a scheduler does."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Board:
    """Stands for the load page (deployments/load_page.py): the scheduler's last figures and all tickets it took in."""

    def __init__(self) -> None:
        self.figures: Figures | None = None
        self.version = 0
        self.tickets: list[int] = []
        self._grace = (0.0, 0.0)

    def write(self, figures: Figures, tickets: Sequence[int] = ()) -> None:
        """What the scheduler publishes."""
        self.figures = figures
        self.tickets += tickets
        self.version += 1

    def policy_if_changed(self, last_version: int) -> None:
        """Nobody changes a simulated replica's policy."""

    def set_grace(self, seconds: float, until: float) -> None:
        """Let requests of higher tiers wait so long for help, in steps before `until`."""
        self._grace = (seconds, until)

    def grace_s(self, now: float) -> float:
        """The grace in force, 0 if there is none."""
        seconds, until = self._grace
        return seconds if now < until else 0.0

    def close(self) -> None:
        """Nothing to release."""


class Batch(NamedTuple):
    """A scheduled step: vLLM's output, who of it samples a token, its seconds; `decodes`: nothing but decodes."""

    output: Any
    sampled: list[bool]
    seconds: float
    decodes: bool


class Replica:
    """`asynchronous`: while a step runs the next one is scheduled already, as in vLLM's `step_with_batch_queue`.

    Whoever drives it calls `end_step` when the clock shows `busy_until`. Between those times requests may come and go.
    `state` is what it reports. `slowed`: share by which steps that begin now take longer.
    """

    def __init__(
        self, name: str, scheduler: Any, cost: StepCost, clock: Clock, *, asynchronous: bool, coast: bool = True
    ) -> None:
        self.name, self.scheduler, self.clock = name, scheduler, clock
        self.busy_until: float | None = None
        self.busy_s = 0.0
        self.steps = 0
        self.state: ReplicaState = "serving"
        self.slowed = 0.0
        self._asked: list[Callable[[], None]] = []  # to be done between two steps
        self._between = False
        self._watched: dict[str, tuple[int, Callable[[], None]]] = {}  # tokens of a request so far, who wants the next
        self._cost = cost
        self._depth = 2 if asynchronous else 1
        self._pipeline: deque[Batch] = deque()
        self._fast = isinstance(scheduler, Lean)
        self._coasts = coast and self._fast and may_coast(scheduler)
        self._coast: Coast | None = None
        self._last_decodes = False  # whether the step scheduled last was one of decodes only
        self._frozen = False  # whether the queue has changed since the last step of a coast
        self.board = Board()
        scheduler.clock = scheduler.lease_clock = clock
        scheduler._page = self.board
        scheduler._publish()

    def submit(self, request: Any) -> None:
        """Queue a request; an idle replica begins with it at once, a busy one looks up when its step ends."""
        self._freeze()
        self.scheduler.add_request(request)
        if self.busy_until is None:
            self._fill()

    def abort(self, name: str) -> None:
        """Forget a request."""
        if self.scheduler.requests[name].status is RequestStatus.RUNNING:
            self._settle()
        else:
            self._freeze()
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def ask(self, call: Callable[[], None]) -> None:
        """Have `call` done between two steps, as an EngineCore does with what it is asked: now if none runs."""
        self._asked.append(call)
        if self.busy_until is None and not self._between:
            self._between = True
            self._answer()
            self._between = False
            self._fill()

    def watch(self, name: str, call: Callable[[], None]) -> None:
        """Call when the request's next token is there; never if it leaves before."""
        self._watched[name] = (self.scheduler.requests[name].num_output_tokens, call)

    def report(self, seq: int, admitted: list[int] | None = None) -> ReplicaReport:
        """Its load report of now."""
        figures = self.figures()._replace(t=self.clock.now)
        return report_of(figures, replica=self.name, seq=seq, state=self.state, admitted=admitted or [])

    def drop(self, name: str) -> None:
        """Forget a request if it is here."""
        if name in self.scheduler.requests:
            self.abort(name)

    def tokens(self, name: str) -> int:
        """Tokens that a request has generated."""
        self._settle()
        generated: int = self.scheduler.requests[name].num_output_tokens
        return generated

    def crash(self) -> dict[str, int]:
        """Stop for good; the tokens that each of its requests has generated."""
        self._settle()
        self._asked.clear()
        self._watched.clear()
        if self.busy_until is not None:
            self.busy_s -= self.busy_until - self.clock.now
            self.busy_until = None
        return {name: request.num_output_tokens for name, request in self.scheduler.requests.items()}

    def end_step(self) -> Ended:
        """The running step ends now, the next begins; which requests got their first and their last token."""
        batch = self._pipeline.popleft()
        self.busy_until = None
        self._between = True
        self.steps += 1
        ended = self._coast.end_step() if self._coast else self._take_in(batch)
        if self._watched:
            self._look(ended)
        if self._asked:
            self._answer()
        self._between = False
        self._fill()
        if self._coast and self._frozen:
            self.scheduler._publish()
        self._frozen = False
        return ended

    def figures(self) -> Figures:
        """Load figures as the product's scheduler would have published them last."""
        if self._coast and not self._frozen:
            now: Figures = self.scheduler.figures()
            return now
        figures = self.board.figures
        assert figures is not None
        return figures

    def check_idle(self) -> None:
        """RuntimeError unless all requests have left and all KV blocks are back."""
        figures = self.scheduler.figures()
        if self.scheduler.requests or figures.free_blocks != figures.total_blocks:
            raise RuntimeError(
                f"{self.name} still has {len(self.scheduler.requests)} requests and "
                f"{figures.total_blocks - figures.free_blocks} KV blocks of theirs"
            )

    @property
    def version(self) -> int:
        """Grows whenever the figures change."""
        return self.board.version + self.steps

    def _answer(self) -> None:
        """Do what was asked for, in order, also what that asks for."""
        self._settle()
        if self._frozen:
            self.scheduler._publish()  # as the end of a step does after a change of the queue
            self._frozen = False
        while self._asked:
            self._asked.pop(0)()

    def _look(self, ended: Ended) -> None:
        requests = self.scheduler.requests
        for name, (before, call) in list(self._watched.items()):
            request = requests.get(name)
            if request is None or request.num_output_tokens > before:
                del self._watched[name]
                if request is not None or name in ended.last:
                    call()

    def _take_in(self, batch: Batch) -> Ended:
        if self._fast:
            ended: Ended = self.scheduler.update_from_output(batch.output, batch.sampled)
            return ended
        names = list(batch.output.num_scheduled_tokens)
        requests = [self.scheduler.requests.get(name) for name in names]
        tokens = [
            [request.answer if request else TOKEN] if sampled else []
            for request, sampled in zip(requests, batch.sampled, strict=True)
        ]
        before = {request.request_id for request in requests if request and not request.num_output_tokens}
        output = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled_token_ids=tokens)
        ended = Ended([], [])
        for batch_outputs in self.scheduler.update_from_output(batch.output, output).values():
            for one in batch_outputs.outputs:
                if one.new_token_ids and one.request_id in before:
                    ended.first.append(one.request_id)
                if one.finish_reason is not None:
                    ended.last.append(one.request_id)
        return ended

    def _fill(self) -> None:
        """Schedule until the pipeline is full or nothing can go; begin the first step if none runs."""
        while len(self._pipeline) < self._depth:
            batch = self._next()
            if batch is None:
                break
            self._pipeline.append(batch)
        if self._pipeline and self.busy_until is None:
            seconds = self._pipeline[0].seconds * (1 + self.slowed)
            self.busy_until = self.clock.now + seconds
            self.busy_s += seconds

    def _next(self) -> Batch | None:
        if (
            self._coasts
            and self._coast is None
            and self._last_decodes
            and len(self._pipeline) == self._depth - 1
            and not (self._watched or self.scheduler._parked)
        ):
            self._coast = Coast.begin(self.scheduler, self._depth)
        if self._coast:
            step = self._coast.schedule()
            if step is not None:
                return Batch(None, [], self._cost.seconds(step), True)
            if self._coast.running and not self._coast.decides:
                return None  # all are under way in their last step
            self._settle()
        return self._schedule()

    def _schedule(self) -> Batch | None:
        scheduler = self.scheduler
        for _ in range(ATTEMPTS):
            if not scheduler.has_unfinished_requests():
                return None
            output = scheduler.schedule()
            if output.num_scheduled_tokens:
                return self._batch(output)
            if self._pipeline:
                return None  # all is under way: look again when the running step has ended
            if scheduler._parked or scheduler._reservations:
                return None  # what waits has no room before they end: each end asks the replica
        raise RuntimeError(f"{self.name} has requests and schedules none: the policy lets nothing run")

    def _batch(self, output: Any) -> Batch:
        step, sampled = content_of(self.scheduler.requests, output.num_scheduled_tokens)
        self._last_decodes = not step.prefill_requests
        return Batch(output, sampled, self._cost.seconds(step), self._last_decodes)

    def _settle(self) -> None:
        """Bring the scheduler up to date with the steps that it was spared."""
        if self._coast is None:
            return
        ahead = self._coast.settle()
        for place, (output, sampled) in enumerate(ahead):
            if self._pipeline[place].output is None:
                self._pipeline[place] = self._pipeline[place]._replace(output=output, sampled=sampled)
        self._coast = None
        if not self._frozen:
            self.scheduler._publish()

    def _freeze(self) -> None:
        """Keep the published figures until the next step, whatever the queue does: nobody hears of it before."""
        if self._coast and not self._frozen:
            self.board.figures = self.figures()
            self._frozen = True
