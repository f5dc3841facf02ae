"""Moves messages between processes: one ZeroMQ PULL socket where a stage listens, PUSH sockets towards it.

Decides addresses and socket options, and nothing about what a message says. A waiting receiver is blocked in the
kernel, not polling. Links that leave the host are neither encrypted nor authenticated yet: `_socket` is where
CURVE keys, handed out with the addresses, have to be set. Shared memory or NCCL would be another Inlet and Outlet.
"""

from __future__ import annotations

import logging
from pathlib import Path

import zmq

from coordinator.errors import RingLost
from stage import wire
from stage.messages import Delivery, FrameMessage, ReplyMessage

log = logging.getLogger(__name__)


class Link:
    """The sockets of one stage, or of the coordinator. `close` may be called from any thread, and twice."""

    def __init__(self) -> None:
        self._context = zmq.Context(io_threads=1)

    def listen(self, where: Path | str) -> Listener:
        """Binds to a path (one host: ipc) or to an interface's address (tcp, on a free port)."""
        socket = self._socket(zmq.PULL)
        if isinstance(where, Path):
            address = f"ipc://{where}"
            socket.bind(address)
        else:
            port = socket.bind_to_random_port(f"tcp://{where}")
            address = f"tcp://{where}:{port}"
        return Listener(socket, address)

    def connect(self, address: str) -> Sender:
        socket = self._socket(zmq.PUSH)
        socket.connect(address)
        return Sender(socket)

    def close(self) -> None:
        """Wakes whoever waits in `receive`; returns when all sockets are closed by those who use them."""
        self._context.term()

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        # No bound of its own: the coordinator bounds the frames in flight, and a full queue would block a stage.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        return socket


class Listener:
    """An Inlet on a bound socket, used by one thread. `unreadable` counts what had no readable envelope."""

    def __init__(self, socket: zmq.Socket[bytes], address: str) -> None:
        self._socket = socket
        self.address = address
        self.unreadable = 0

    def receive(self) -> Delivery | None:
        while True:
            try:
                parts = self._socket.recv_multipart(copy=False)
            except zmq.ContextTerminated:
                self.close()
                return None
            try:
                return wire.decode([part.buffer for part in parts])
            except wire.WireError as error:
                self.unreadable += 1
                log.warning("dropped a message at=%s reason=%s", self.address, error)

    def close(self) -> None:
        self._socket.close()


class Sender:
    """An Outlet on a connected socket, used by one thread."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def send(self, message: FrameMessage | ReplyMessage) -> None:
        try:
            self._socket.send_multipart(wire.encode(message), zmq.NOBLOCK, copy=False)
        except zmq.ContextTerminated:
            self.close()  # the link is closing; the next `receive` says so
        except zmq.ZMQError as error:
            raise RingLost(None, f"cannot send on: {error}") from error

    def close(self) -> None:
        self._socket.close()
