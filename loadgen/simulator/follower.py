"""A simulated replica that makes the steps of a step log: the other half of replay.py.

Uses what replica.py keeps to itself: `_depth`, `_pipeline`, `_fill`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm.v1.request import RequestStatus

from deployments.scheduler import SchedulerSettings, make_policy
from deployments.step_content import Step
from deployments.step_log import DECIDED, StepLog
from loadgen.simulator import engine
from loadgen.simulator.hardware import MODELS
from loadgen.simulator.replay import LIMITS, Difference
from loadgen.simulator.replica import Clock, Replica

MODEL = MODELS["smollm2-135m"]  # any: what a KV block holds is of no account


class Account:
    """Takes no time, and keeps what the replica says is in its last step."""

    step = Step()

    def seconds(self, step: Step) -> float:
        """None."""
        self.step = step
        return 0.0


class Follower(Replica):
    """A replica set up as a log's first `setting` says, whose steps begin and end when somebody else says so."""

    def __init__(self, setting: dict[str, Any]) -> None:
        shape = engine.Shape(**{name: setting[name] for name in LIMITS})
        settings = SchedulerSettings(setting["policy"], None, setting["tiers"])
        (scheduler,) = engine.schedulers(MODEL, shape, settings, 1)
        self._account = Account()
        super().__init__("follower", scheduler, self._account, Clock(), asynchronous=shape.asynchronous, coast=False)
        self._log = StepLog(scheduler, lambda row: None, timer=self.clock)
        self.names: list[str] = []  # of the requests, by their numbers

    def take_in(self, in_flight: int) -> None:
        """End steps until so many are under way."""
        self._depth = 0
        while len(self._pipeline) > in_flight:
            self.end_step()

    def leave(self, row: dict[str, str]) -> None:
        """End what a stop word or its client ended after the step of this row, and compare who has left."""
        logged = row["left"].split()
        for entry in logged:
            number = int(entry.partition(":")[0])
            if number < len(self.names) and self.names[number] in self.scheduler.requests:
                self.scheduler.finish_requests(self.names[number], RequestStatus.FINISHED_ABORTED)
        if sorted(self._log.left) != sorted(logged):  # their order decides nothing
            raise Difference(row["step"], "left", row["left"], " ".join(self._log.left))

    def arrive(self, arrivals: Sequence[Sequence[Any]]) -> None:
        """Queue requests as the log has them."""
        for name, arrival, prompt, limit, tier, known, predicted, generated in arrivals:
            self.names.append(name)
            one = engine.request(
                name, prompt, limit, arrival, tier=tier, oracle=known is not None, told=known, generated=generated
            )
            self.scheduler.add_request(one)
            one.hints = replace(one.hints, predicted_tokens=predicted)

    def use_policy(self, spec: dict[str, Any]) -> None:
        """Schedule by another policy from the next step on."""
        self.scheduler.use_policy(make_policy(spec, self.scheduler.tiers))
        self.scheduler.policy_spec = spec

    def step(self, row: dict[str, str]) -> None:
        """Schedule a step at the time of this row; Difference unless it is the row's."""
        self.clock.now = float(row["now"])
        self._depth = len(self._pipeline) + 1
        try:
            self._fill()
        except RuntimeError:  # nothing may run at all
            pass
        if len(self._pipeline) < self._depth:
            raise Difference(row["step"], "scheduled", row["scheduled"], "")
        for what in DECIDED:
            if what != "left" and row[what] != str(self._log.row[what]):
                raise Difference(row["step"], what, row[what], str(self._log.row[what]))
        for what, value in self._account.step._asdict().items():
            if float(row[what]) != value:
                raise Difference(row["step"], f"the step-time model's {what}", row[what], str(value))
