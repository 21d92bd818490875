"""Token path from replicas to ingresses: one ZMQ frame per engine step and ingress, beside the Serve call.

Serve moves the request (so that its router decides) and its end; tokens take this link, because one Serve stream
item per token costs 100-200 us of two processes' time and a frame for the whole batch costs less than one such item.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec
import zmq

from deployments.wire import Delta

logger = logging.getLogger(f"ray.serve.{__name__}")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Delta])


_BATCH = 100  # frames taken before the loop gets its turn again
_RETRY_S = 0.002
_LOST_S = 5.0


class DeltaSender:
    """Replica side: collects the deltas of one event-loop turn (one engine step) and sends them per ingress.

    Tokens are never dropped: those for an ingress that cannot be reached wait, and after 5 s `on_lost` is called with
    its endpoint, since nobody reads them any more.
    """

    def __init__(self, on_lost: Callable[[str], None]) -> None:
        self._on_lost = on_lost
        self._context = zmq.Context()
        self._context.linger = 0  # one that is never closed must not keep its process from ending
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._pending: dict[str, list[Delta]] = {}
        self._unreachable_since: dict[str, float] = {}

    def send(self, reply_to: str, delta: Delta) -> None:
        """Queue a delta for an ingress; it leaves at the end of this loop turn, together with its step's others."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.setdefault(reply_to, []).append(delta)

    def _flush(self) -> None:
        pending, self._pending = self._pending, {}
        for reply_to, deltas in pending.items():
            try:
                self._socket(reply_to).send(_encoder.encode(deltas), zmq.NOBLOCK)
                self._unreachable_since.pop(reply_to, None)
            except zmq.Again:  # not connected (yet)
                if time.monotonic() - self._unreachable_since.setdefault(reply_to, time.monotonic()) < _LOST_S:
                    self._pending[reply_to] = deltas
                else:
                    self.forget(reply_to)
                    self._on_lost(reply_to)
        if self._pending:
            asyncio.get_running_loop().call_later(_RETRY_S, self._flush)

    def _socket(self, reply_to: str) -> zmq.Socket[bytes]:
        socket = self._sockets.get(reply_to)
        if socket is None:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # queue for a live connection only, so that a dead ingress is noticed
            socket.connect(reply_to)
            self._sockets[reply_to] = socket
        return socket

    def forget(self, reply_to: str) -> None:
        """Drop the connection to an ingress that no stream needs any more."""
        self._unreachable_since.pop(reply_to, None)
        self._pending.pop(reply_to, None)
        if (socket := self._sockets.pop(reply_to, None)) is not None:
            socket.close()

    def close(self) -> None:
        """Close every connection; what was sent gets at most one second to leave."""
        for socket in self._sockets.values():
            socket.setsockopt(zmq.LINGER, 1000)
            socket.close()
        self._sockets.clear()
        self._context.term()


class DeltaReceiver:
    """Ingress side: hands every frame's deltas to `on_deltas` inside the running event loop."""

    def __init__(self, host: str, on_deltas: Callable[[list[Delta]], None]) -> None:
        self._context = zmq.Context()
        self._context.linger = 0  # one that is never closed must not keep its process from ending
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"
        self._on_deltas = on_deltas
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._drain)
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Take all that has arrived: the descriptor only signals again once the socket was found empty."""
        for _ in range(_BATCH):
            if self._socket.closed:
                return
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_deltas(_decoder.decode(frame))
            except Exception:  # one bad frame must not end every stream of this ingress
                logger.exception("a delta frame could not be processed")
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Stop receiving and free the port."""
        if not self._socket.closed:
            self._loop.remove_reader(self._descriptor)
            self._context.destroy(linger=0)
