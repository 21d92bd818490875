"""vLLM's queue of waiting requests in the order of a scheduling policy."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request, RequestStatus

from policies.scheduling import SchedulingPolicy
from policies.tiers import MAX_TIERS
from policies.types import SchedulerContext


class PolicyRequestQueue(RequestQueue):
    """Waiting requests in a policy's order, with running sums: tokens still to be prefilled, requests of each tier.

    The order is made at the first look and then stays until `begin_step` brings another order epoch or the set
    changes: vLLM looks at a request, works on it, and pops it only later, so both must give the same one. A few
    newcomers are put in their places, which spares a long queue the sort.
    For a policy that does not reorder this is vLLM's own FCFS deque: preempted and skipped requests in front.
    """

    def __init__(self, policy: SchedulingPolicy, context: SchedulerContext) -> None:
        self.tokens = 0
        self.by_tier = [0] * MAX_TIERS
        self._policy = policy
        self._context = context
        self._epoch: Hashable = policy.order_epoch(context)
        self._queue: deque[Request] = deque()
        self._weights: dict[Request, int] = {}  # what each request added to `tokens`: it may grow while it waits
        self._unsorted = 0  # so many at the right end have no place yet

    @property
    def head(self) -> Request | None:
        """First of the order last made, without making a new one: a look for statistics must not cost a sort."""
        return self._queue[0] if self._queue else None

    def begin_step(self, context: SchedulerContext) -> None:
        """Take the snapshot by which requests are ordered from now on, if this step has an order of its own."""
        if self._policy.reorders and (epoch := self._policy.order_epoch(context)) != self._epoch:
            self._context, self._epoch, self._unsorted = context, epoch, len(self._queue)

    def use_policy(self, policy: SchedulingPolicy) -> None:
        """Change the policy under the waiting requests; back to FCFS: preempted ones first, then by arrival."""
        self._policy = policy
        if policy.reorders:
            self._epoch, self._unsorted = policy.order_epoch(self._context), len(self._queue)
        else:
            fcfs = sorted(self._queue, key=lambda r: (r.status != RequestStatus.PREEMPTED, r.arrival_time))
            self._queue, self._unsorted = deque(fcfs), 0

    def refresh(self, request: Request) -> None:
        """Count a waiting request anew after its length changed."""
        if request in self._weights:
            self._leave(request)
            self._count(request)
            if self._policy.reorders:
                self._queue.remove(request)
                self._queue.append(request)
                self._unsorted = min(self._unsorted + 1, len(self._queue))

    def _count(self, request: Request) -> None:
        weight = self._weights[request] = request.num_tokens - request.num_computed_tokens
        self.tokens += weight
        self.by_tier[request.priority] += 1

    def _leave(self, request: Request) -> None:
        self.tokens -= self._weights.pop(request)
        self.by_tier[request.priority] -= 1

    def _ordered(self) -> deque[Request]:
        if self._unsorted:
            waiting_key, context, count = self._policy.waiting_key, self._context, len(self._queue)

            def key(request: Request) -> Any:
                return waiting_key(request, context)

            if self._unsorted * count.bit_length() < count:
                for request in [self._queue.pop() for _ in range(self._unsorted)]:
                    insort(self._queue, request, key=key)
            else:
                self._queue = deque(sorted(self._queue, key=key))
            self._unsorted = 0
        return self._queue

    def add_request(self, request: Request) -> None:
        """Queue a new request."""
        self._queue.append(request)
        self._count(request)
        self._unsorted += self._policy.reorders

    def prepend_request(self, request: Request) -> None:
        """Queue a preempted request: in front, unless the policy says otherwise."""
        if self._policy.reorders:
            self.add_request(request)
        else:
            self._queue.appendleft(request)
            self._count(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Queue skipped requests again, as `deque.extendleft` does."""
        for request in requests:
            self.prepend_request(request)

    def peek_request(self) -> Request:
        """The next request; IndexError if none waits."""
        if not self._queue:
            raise IndexError("peek from an empty queue")
        return self._ordered()[0]

    def pop_request(self) -> Request:
        """Take the next request; IndexError if none waits."""
        if not self._queue:
            raise IndexError("pop from an empty queue")
        request = self._ordered().popleft()
        self._leave(request)
        return request

    def remove_request(self, request: Request) -> None:
        """Take one request out; ValueError if it does not wait here."""
        self._queue.remove(request)
        self._unsorted = min(self._unsorted, len(self._queue))
        self._leave(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Take out those of the requests that wait here."""
        leaving = {request for request in requests if request in self._weights}
        if leaving:
            self._queue = deque(request for request in self._queue if request not in leaving)
            self._unsorted = min(self._unsorted, len(self._queue))
            for request in leaving:
                self._leave(request)

    def __bool__(self) -> bool:
        return bool(self._queue)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._ordered())
