"""What became of each request of a run: its replica, its submission, its times, how it ended; each ends once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from loadgen.metrics import RequestRecord
from loadgen.simulator.fleet import Job

Watch = Callable[[Job, RequestRecord], object]


def number_of(name: str) -> int:
    """The request of a submission: `12`, or after moves `12.1`."""
    return int(name.partition(".")[0])


class Ledger:
    """Requests by their numbers. `names[i]` is the submission whose tokens the client takes, `replica[i]` where it is.

    `left`: requests that have not ended; `watch` hears of each that does. RuntimeError for one that ends twice.
    """

    def __init__(self, jobs: Sequence[Job], watch: Watch | None = None) -> None:
        self.jobs = jobs
        self._watch = watch
        self.left = len(jobs)
        self.replica = [-1] * len(jobs)
        self.names = [str(number) for number in range(len(jobs))]
        self._submissions: Counter[int] = Counter()  # of requests that have moved, beyond the first
        self._first = [math.nan] * len(jobs)
        self._last = [math.nan] * len(jobs)
        self._refused: dict[int, tuple[int, str, float | None]] = {}
        self._cut: dict[int, str] = {}  # why the client left

    def next_name(self, number: int) -> str:
        """The name of one more submission."""
        self._submissions[number] += 1
        return f"{number}.{self._submissions[number]}"

    def sent_again(self, number: int) -> str:
        """The name under which a request is sent to a replica: a new one if it may still be known by the last."""
        if self._submissions[number]:
            self.names[number] = self.next_name(number)
        return self.names[number]

    def over(self, number: int) -> bool:
        """Whether the request has ended."""
        return number in self._refused or not math.isnan(self._last[number])

    def started(self, number: int, now: float) -> None:
        """It has its first token."""
        self._first[number] = now

    def ended(self, number: int, now: float, left: str | None = None) -> None:
        """It has its last token, or its client has `left`."""
        if self.over(number):
            raise RuntimeError(f"request {number} ended twice")
        self._last[number] = now
        if left is not None:
            self._cut[number] = left
        self._count(number)

    def refused(self, number: int, status: int, reason: str, retry_after: float | None) -> None:
        """It gets no answer."""
        if self.over(number):
            raise RuntimeError(f"request {number} ended twice")
        self._refused[number] = (status, reason, retry_after)
        self._count(number)

    def _count(self, number: int) -> None:
        self.left -= 1
        if self._watch is not None:
            self._watch(self.jobs[number], self._record(number, self.jobs[number]))

    def records(self) -> list[RequestRecord]:
        """The record of each request."""
        return [self._record(number, job) for number, job in enumerate(self.jobs)]

    def _record(self, number: int, job: Job) -> RequestRecord:
        ended = RequestRecord(
            due=job.due,
            sent=job.due,
            prompt_len=job.prompt_tokens,
            output_len=job.output_tokens,
            ttft=first - job.due if not math.isnan(first := self._first[number]) else 0.0,
            latency=self._last[number] - job.due,
            status=200,
        )
        if number in self._refused:
            status, reason, wait = self._refused[number]
            return replace(
                ended, output_len=0, latency=0.0, error=reason, status=status, reason=reason, retry_after=wait
            )
        if number in self._cut:
            why = self._cut[number]
            return replace(ended, output_len=0, error=why, left=why)
        return ended
