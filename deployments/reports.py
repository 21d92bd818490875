"""Load reports on their way from the replica's page to every router: ZMQ PUB to SUB, msgpack.

Publisher and subscriber are plain non-blocking sockets inside the asyncio loop that uses the reports. The subscriber
watches its socket's file descriptor and, woken up, empties it: no thread that would wait for the interpreter lock while
the loop computes, no future per message (both cost more than the decoding), and the table it feeds needs no lock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import zmq

from deployments.load_page import Figures, LoadPage, LoadPageError
from deployments.wire import ReplicaReport, ReplicaState

logger = logging.getLogger(f"ray.serve.{__name__}")

REPEATS = 3  # consecutive reports that name a ticket
BATCH = 1000  # frames taken before the loop gets its turn again

_UNKNOWN = Figures._make((0.0, *[0] * 13, (), (), (), 0, 0))


class ReportPublisher:
    """Publishes one replica's load: at once when requests come or go, else at least every `heartbeat_s` seconds.

    Make it in the replica's running asyncio loop. It looks at the page every `poll_s` seconds while requests are in
    the engine and every `idle_poll_s` while none is; changes of the free blocks and queued tokens alone, which each
    step brings, go out no more often than every `minor_s`. Before the engine's first figures nothing is published.
    """

    def __init__(
        self,
        page: LoadPage,
        replica_id: str,
        bind_host: str,
        *,
        poll_s: float = 0.002,
        idle_poll_s: float = 0.01,
        minor_s: float = 0.005,
        heartbeat_s: float = 0.1,
    ) -> None:
        self._page = page
        self._replica_id = replica_id
        self._poll_s, self._idle_poll_s, self._minor_s, self._heartbeat_s = poll_s, idle_poll_s, minor_s, heartbeat_s
        self._context = zmq.Context()
        self._context.linger = 0  # one that is never closed must not keep its process from ending
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PUB)
        self._socket.bind(f"tcp://{bind_host}:*")
        self.endpoint = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._encode = msgspec.msgpack.Encoder().encode
        self._state: ReplicaState = "serving"
        self._settings: dict[str, Any] | None = None
        self._settings_t = 0.0
        self._seq = 0
        self.moving: Callable[[], list[str]] = list  # destinations of the moves under way from here
        self._figures: Figures | None = None
        self._sent: Figures | None = None
        self._sent_moving: list[str] = []
        self._sent_at = 0.0
        self._recent: deque[list[int]] = deque(maxlen=REPEATS)
        self._task = asyncio.get_running_loop().create_task(self._watch())

    def check(self) -> None:
        """Look at the page now and publish what is due; cheap enough to call whenever the engine gave output."""
        if self._page.version != (self._figures.version if self._figures else 0):
            self._figures = self._page.read()
        figures, sent = self._figures, self._sent
        if figures is None:
            return
        age = time.monotonic() - self._sent_at
        if (
            sent is None
            or age >= self._heartbeat_s
            or figures.admitted != sent.admitted
            or figures.running != sent.running
            or figures.waiting != sent.waiting
            or self.moving() != self._sent_moving
            or (figures.version != sent.version and age >= self._minor_s)
        ):
            self._publish(figures)

    def set_state(self, state: ReplicaState) -> None:
        """Publish a change of state at once; after "dead" the page is no longer read."""
        self._state = state
        if state == "dead":
            self._task.cancel()
        else:
            self._figures = self._page.read()
        self._publish(self._figures or _UNKNOWN)

    def set_settings(self, settings: dict[str, Any]) -> None:
        """Send balancing settings with every report from now on."""
        self._settings, self._settings_t = settings, time.time()
        if self._figures is not None:
            self._publish(self._figures)

    def close(self) -> None:
        """Stop publishing; what was published is given a moment to leave."""
        self._task.cancel()
        self._context.destroy(linger=200)

    async def _watch(self) -> None:
        try:
            while True:
                self.check()
                figures = self._figures
                busy = figures is not None and (figures.running or figures.waiting)
                await asyncio.sleep(self._poll_s if busy else self._idle_poll_s)
        except LoadPageError:
            logger.exception("Replica %s publishes no more load reports", self._replica_id)
            raise

    def _publish(self, figures: Figures) -> None:
        known = self._sent.admitted if self._sent else 0
        tickets: list[int] = []
        if figures.admitted > known:
            tickets, _ = self._page.admitted_since(known, until=figures.admitted)
        self._recent.append(tickets)
        self._seq += 1
        self._sent_moving = self.moving()
        report = report_of(
            figures,
            replica=self._replica_id,
            seq=self._seq,
            state=self._state,
            admitted=[ticket for tickets in self._recent for ticket in tickets],
            settings=self._settings,
            settings_t=self._settings_t,
            moving=self._sent_moving,
        )
        self._socket.send(self._encode(report), zmq.NOBLOCK)  # PUB drops rather than blocks
        self._sent, self._sent_at = figures, time.monotonic()


def report_of(
    figures: Figures,
    *,
    replica: str,
    seq: int,
    state: ReplicaState,
    admitted: list[int],
    settings: dict[str, Any] | None = None,
    settings_t: float = 0.0,
    moving: list[str] | None = None,
) -> ReplicaReport:
    """The report that tells these figures."""
    return ReplicaReport(
        replica=replica,
        seq=seq,
        t=figures.t,
        state=state,
        free_blocks=figures.free_blocks,
        total_blocks=figures.total_blocks,
        block_size=figures.block_size,
        running=figures.running,
        waiting=figures.waiting,
        queued_tokens=figures.queued_tokens,
        head_blocks=figures.head_blocks,
        batch_tokens=figures.batch_tokens,
        max_num_seqs=figures.max_num_seqs,
        preemptions=figures.preemptions,
        admitted=admitted,
        running_by_tier=_trimmed(figures.running_by_tier),
        waiting_by_tier=_trimmed(figures.waiting_by_tier),
        settings=settings,
        settings_t=settings_t,
        blocks_by_tier=_trimmed(figures.blocks_by_tier),
        moving=moving or [],
    )


def _trimmed(by_tier: Sequence[int]) -> list[int]:
    """Counts up to the last tier that has any: on the wire most fleets need few of the 16."""
    end = len(by_tier)
    while end and not by_tier[end - 1]:
        end -= 1
    return list(by_tier[:end])


class ReportSubscriber:
    """Hands the reports of a changing set of replicas to `on_report`, in the given asyncio loop.

    Where several reports of a replica have piled up, only the newest is handed on, with the tickets of all of them.
    That is why the socket does not conflate: a dropped report would lose tickets once more than two are dropped.
    """

    def __init__(self, on_report: Callable[[ReplicaReport], None], loop: asyncio.AbstractEventLoop) -> None:
        self._on_report = on_report
        self._loop = loop
        self._decode = msgspec.msgpack.Decoder(ReplicaReport).decode
        self._context = zmq.Context()
        self._context.linger = 0  # one that is never closed must not keep its process from ending
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.reconnect_ivl_max = 2000
        self._socket.heartbeat_ivl = 5000  # a replica's host that vanished sends no FIN: reconnect when it is back
        self._endpoints: set[str] = set()
        self._reader: int | None = None
        self._closed = False

    def set_endpoints(self, endpoints: Iterable[str]) -> None:
        """Follow exactly these publishers from now on; may be called from any thread."""
        self._loop.call_soon_threadsafe(self._connect, set(endpoints))

    def close(self) -> None:
        """Stop; call it in the loop. May be called twice."""
        if not self._closed:
            self._closed = True
            if self._reader is not None:
                self._loop.remove_reader(self._reader)
            self._context.destroy(linger=0)

    def _connect(self, endpoints: set[str]) -> None:
        if self._closed:
            return
        if self._reader is None:
            self._reader = descriptor = int(self._socket.getsockopt(zmq.FD))
            self._loop.add_reader(descriptor, self._drain)
        for endpoint in endpoints - self._endpoints:
            self._socket.connect(endpoint)
        for endpoint in self._endpoints - endpoints:
            self._socket.disconnect(endpoint)
        self._endpoints = endpoints
        self._drain()

    def _drain(self) -> None:
        """Take all that has arrived: the descriptor only signals again once the socket was found empty."""
        newest: dict[str, ReplicaReport] = {}
        for _ in range(BATCH):
            if self._closed:
                return
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                report = self._decode(frame)
            except msgspec.MsgspecError as error:
                logger.warning("Ignored a frame that is no load report (another version of Tidegate?): %s", error)
                continue
            if (earlier := newest.get(report.replica)) is not None:
                report = msgspec.structs.replace(report, admitted=[*earlier.admitted, *report.admitted])
            newest[report.replica] = report
        else:
            self._loop.call_soon(self._drain)
        for report in newest.values():
            self._on_report(report)
