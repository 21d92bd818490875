"""Token path from replicas to ingresses: one ZMQ frame per engine step and ingress, beside the Serve call.

Serve moves the request (so that its router decides) and its end; tokens take this link, because one Serve stream
item per token costs 100-200 us of two processes' time and a frame for the whole batch costs less than one such item.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

from deployments.wire import Delta

logger = logging.getLogger(f"ray.serve.{__name__}")

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Delta])


class DeltaSender:
    """Replica side: collects the deltas of one event-loop turn (one engine step) and sends them per ingress."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket] = {}
        self._pending: dict[str, list[Delta]] = {}

    def send(self, reply_to: str, delta: Delta) -> None:
        """Queue a delta for an ingress; it leaves at the end of this loop turn, together with its step's others."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.setdefault(reply_to, []).append(delta)

    def _flush(self) -> None:
        pending, self._pending = self._pending, {}
        for reply_to, deltas in pending.items():
            self._socket(reply_to).send(_encoder.encode(deltas), zmq.NOBLOCK)

    def _socket(self, reply_to: str) -> zmq.Socket:
        socket = self._sockets.get(reply_to)
        if socket is None:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, 0)  # tokens are never dropped; a vanished ingress is forgotten by `forget`
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(reply_to)
            self._sockets[reply_to] = socket
        return socket

    def forget(self, reply_to: str) -> None:
        """Drop the connection to an ingress that no stream needs any more."""
        if (socket := self._sockets.pop(reply_to, None)) is not None:
            socket.close()

    def close(self) -> None:
        """Send what is queued and close every connection, waiting at most one second for the peer."""
        self._flush()
        for socket in self._sockets.values():
            socket.setsockopt(zmq.LINGER, 1000)
            socket.close()
        self._sockets.clear()
        self._context.term()


class DeltaReceiver:
    """Ingress side: hands every frame's deltas to `on_deltas` inside the running event loop."""

    def __init__(self, host: str, on_deltas: Callable[[list[Delta]], None]) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"
        self._on_deltas = on_deltas
        self._task = asyncio.get_running_loop().create_task(self._receive())

    async def _receive(self) -> None:
        while True:
            frame = await self._socket.recv()
            try:
                self._on_deltas(_decoder.decode(frame))
            except Exception:  # one bad frame must not end every stream of this ingress
                logger.exception("a delta frame could not be processed")

    def close(self) -> None:
        """Stop receiving and free the port."""
        self._task.cancel()
        self._socket.close()
        self._context.term()
