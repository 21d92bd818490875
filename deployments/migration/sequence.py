"""One sequence on this replica: the gate that its deltas pass to the ingress, and what the ingress hears in the end."""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Callable

import msgspec

from deployments.wire import Delta, Logprobs, Outcome, Submit

Key = tuple[str, int, int]
Emit = Callable[[Delta], None]


class End(enum.Enum):
    """How a sequence left this replica's engine."""

    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"


class Sequence:
    """One submission or hop. `tokens`: index of the next token that the engine gives.

    Its deltas pass through here: all go on to the ingress, or those from an index on are held back while it is open who
    runs the sequence, until `pass_on` or `shut`. `outcome` is what the ingress hears. `moves`: commits that were sent,
    each a hop of its own. `listeners` hear of the end, `on_first` of the first delta.
    """

    def __init__(self, submit: Submit, send: Emit, sender: str | None = None, parent: int = 0) -> None:
        loop = asyncio.get_running_loop()
        self.submit = submit
        self.key: Key = (submit.rid, submit.epoch, submit.hop)
        self.request_id = request_id(submit)
        self.tokens = len(submit.output)
        self.outcome: asyncio.Future[Outcome] = loop.create_future()
        self.task: asyncio.Task[Outcome] | None = None
        self.listeners: list[Callable[[End], None]] = []
        self.on_first: Callable[[], None] | None = None
        self.moved_at = loop.time() if sender else -math.inf
        self.busy = sender is not None  # in a move, or about to come here
        self.attached = sender is None
        self.over = False
        self._hops = submit.hop
        self._send = send
        self._sender, self._parent = sender, parent  # for the first delta of a hop
        self._begins = self.tokens
        self._held: list[Delta] = []
        self._hold_from: float = 0 if sender else math.inf
        self._shut = False
        self._reached: list[tuple[int, asyncio.Future[None]]] = []

    @property
    def gone(self) -> bool:
        """Whether it runs here no more, or only until the engine hears of it."""
        return self.over or self._shut

    def made(self, index: int) -> int:
        """The hop that made the token before `index`, which is the next one; 0 if none in this epoch did."""
        return self.submit.hop if index > self._begins else self._parent

    def next_hop(self) -> int:
        """A number that no commit of this sequence had yet."""
        self._hops += 1
        return self._hops

    def emit(self, delta: Delta) -> None:
        """Take a delta of the engine."""
        if self._shut:
            return
        if self._sender is not None:
            delta = msgspec.structs.replace(delta, sender=self._sender, parent=self._parent)
            self._sender = None
        self.tokens = delta.start + len(delta.token_ids)
        if delta.start < self._hold_from < self.tokens:
            delta, late = _split(delta, int(self._hold_from))
            self._send(delta)
            self._held.append(late)
        elif delta.start >= self._hold_from:
            self._held.append(delta)
        else:
            self._send(delta)
        if self.on_first is not None and delta.finish_reason != "error":  # a failed adoption gives a token that is none
            tell, self.on_first = self.on_first, None
            tell()
        for index, reached in self._reached:
            if self.tokens >= index and not reached.done():
                reached.set_result(None)

    def hold(self, index: int) -> None:
        """Hold back the tokens from `index` on."""
        self._hold_from = index

    def pass_on(self) -> None:
        """Send what was held back, and all that follows."""
        self._hold_from = math.inf
        held, self._held = self._held, []
        for delta in held:
            self._send(delta)

    def shut(self, outcome: Outcome) -> None:
        """Nothing of it leaves this replica any more; the ingress is told `outcome` unless it was told before."""
        self._shut = True
        self._held.clear()
        self.settle(outcome)

    def settle(self, outcome: Outcome) -> None:
        """Tell the ingress, once."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def cancel(self) -> None:
        """Abort it in the engine, which is told before this replica's next message to it."""
        if self.task is not None:
            self.task.cancel()

    async def reach(self, index: int, timeout_s: float) -> bool:
        """Wait until all tokens before `index` have come from the engine; False if they do not."""
        if self.tokens >= index:
            return True
        reached = asyncio.get_running_loop().create_future()
        self._reached.append((index, reached))
        try:
            async with asyncio.timeout(timeout_s):
                await reached
        except TimeoutError:
            return False
        finally:
            self._reached.remove((index, reached))
        return True


def request_id(submit: Submit) -> str:
    """The engine's (external) id of a submission or hop."""
    return f"{submit.rid}#{submit.epoch}.{submit.hop}"


def _split(delta: Delta, at: int) -> tuple[Delta, Delta]:
    """The delta's tokens before index `at`, and the others with how it ends."""
    count = at - delta.start
    early = msgspec.structs.replace(
        delta,
        token_ids=delta.token_ids[:count],
        finish_reason=None,
        stop_reason=None,
        logprobs=_rows(delta.logprobs, 0, count),
    )
    late = msgspec.structs.replace(
        delta,
        start=at,
        token_ids=delta.token_ids[count:],
        logprobs=_rows(delta.logprobs, count, None),
        prompt_logprobs=None,
        cached_tokens=None,
        cache_creation_tokens=None,
        sender=None,
    )
    return early, late


def _rows(rows: Logprobs | None, first: int, last: int | None) -> Logprobs | None:
    if rows is None:
        return None
    cells = slice(first * rows.width, None if last is None else last * rows.width)
    return Logprobs(rows.width, rows.token_ids[cells], rows.logprobs[cells], rows.ranks[first:last])
