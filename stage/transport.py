"""Moves messages between processes: one ZeroMQ PULL socket where a stage listens, PUSH sockets towards it.

Decides addresses and socket options, and nothing about what a message says. A waiting receiver is blocked in the
kernel, not polling. What can be reached from another host is encrypted and takes frames from one known peer only; on
one host the file system says who may connect. A secret key never leaves the process that made it, nor its memory.
Shared memory or NCCL would be another Inlet and Outlet.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.utils import z85

from coordinator.errors import RingLost
from stage import wire
from stage.kv.node_file import Buffer
from stage.messages import Delivery, FrameMessage, ReplyMessage

log = logging.getLogger(__name__)


# No frame comes near it: a stranger's announcement of more is refused before memory is given to it.
_LONGEST_PART = 1 << 30
_ZAP_DOMAIN = b"ring"
# Messages of a channel that wait on either side: of large ones, memory has room for few.
_CHANNEL_BOUND = 2


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a listener is reached, and the public key of whoever listens there; no key: a path of this host."""

    address: str
    public: bytes | None = None


@dataclass(frozen=True, slots=True)
class _KeyPair:
    """Of one link, that is of one process for one start of a ring."""

    public: bytes
    secret: bytes = field(repr=False)

    def put_on(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


class Link:
    """The sockets of one stage, or of the coordinator. `close` may be called from any thread, and twice."""

    def __init__(self) -> None:
        self._context = zmq.Context(io_threads=1)
        self._made_keys: _KeyPair | None = None
        self._door: _Door | None = None

    def listen(self, where: Path | str) -> Listener:
        """Binds to a path (one host: ipc) or to an interface's address (tcp, on a free port, behind a door). Raises
        RingLost.
        """
        socket = self._socket(zmq.PULL)
        return Listener(socket, self._bound(socket, where))

    def answer(self, where: Path | str) -> tuple[Channel, Endpoint]:
        """As `listen`, for one peer, who is answered."""
        socket = self._socket(zmq.DEALER, _CHANNEL_BOUND)
        endpoint = self._bound(socket, where)
        return Channel(socket), endpoint

    def _bound(self, socket: zmq.Socket[bytes], where: Path | str) -> Endpoint:
        try:
            if isinstance(where, Path):
                socket.bind(f"ipc://{where}")
                return Endpoint(f"ipc://{where}")
            self._guard(socket)
            port = socket.bind_to_random_port(f"tcp://{where}")
            return Endpoint(f"tcp://{where}:{port}", self._keys.public)
        except zmq.ZMQError as error:
            socket.close()
            is_out_of_ports = error.errno == zmq.EADDRINUSE and not isinstance(where, Path)
            why = "no port is free in net.ipv4.ip_local_port_range" if is_out_of_ports else error
            raise RingLost(None, f"cannot listen at {where}: {why}") from error

    def admit(self, public: bytes | None) -> None:
        """Names the peer whose frames are taken from other hosts. Until then nobody's are."""
        if self._door is not None:
            self._door.admitted = public

    def connect(self, to: Endpoint) -> Sender:
        socket = self._socket(zmq.PUSH)
        try:
            self._connect(socket, to)
        except zmq.ZMQError:
            socket.close()
            raise
        return Sender(socket)

    def call(self, to: Endpoint) -> Channel:
        """As `connect`, for who answers. Closed from the start when the link is."""
        channel = Channel(None)
        try:
            channel = Channel(socket := self._socket(zmq.DEALER, _CHANNEL_BOUND))
            self._connect(socket, to)
        except zmq.ZMQError:
            channel.close()
        return channel

    def _connect(self, socket: zmq.Socket[bytes], to: Endpoint) -> None:
        if to.public is not None:
            self._keys.put_on(socket)
            socket.setsockopt(zmq.CURVE_SERVERKEY, to.public)
        socket.connect(to.address)

    def close(self) -> None:
        """Wakes whoever waits in `receive`; returns when all sockets are closed by those who use them."""
        self._context.term()

    @property
    def _keys(self) -> _KeyPair:
        """The same pair for what this link binds and what it connects: it is who we are."""
        if self._made_keys is None:
            self._made_keys = _KeyPair(*zmq.curve_keypair())
        return self._made_keys

    def _guard(self, socket: zmq.Socket[bytes]) -> None:
        self._door = self._door or _Door(self._context)
        self._keys.put_on(socket)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)
        # Without it, frames would be taken from everybody should the door be gone.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, _LONGEST_PART)

    def _socket(self, kind: int, bound: int = 0) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        # Frames have no bound here: the coordinator bounds those in flight, and a full queue would block a stage.
        socket.setsockopt(zmq.SNDHWM, bound)
        socket.setsockopt(zmq.RCVHWM, bound)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        return socket


class _Door:
    """Answers ZeroMQ's question who may connect (RFC 27, ZAP): the one admitted key. Ends with its context.

    pyzmq's own authenticator logs keys and has to be stopped by somebody before the context can be.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.admitted: bytes | None = None
        self._refused = False
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Before any listener is bound: its peers are asked for here.
        self._socket.bind("inproc://zeromq.zap.01")
        threading.Thread(target=self._answer, name="door", daemon=True).start()

    def _answer(self) -> None:
        try:
            while True:
                self._socket.send_multipart(self._verdict(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()

    def _verdict(self, question: list[bytes]) -> list[bytes]:
        version, request, _domain, address, _identity, mechanism, *credentials = question
        known = self.admitted is not None and credentials == [z85.decode(self.admitted)]
        if mechanism == b"CURVE" and known:
            return [version, request, b"200", b"OK", b"", b""]
        if not self._refused:  # a stranger tries again, many times a second
            self._refused = True
            log.warning("refused connections from=%s", address.decode("ascii", "replace"))
        return [version, request, b"400", b"unknown key", b"", b""]


class Listener:
    """An Inlet on a bound socket, used by one thread. `unreadable` counts what had no readable envelope."""

    def __init__(self, socket: zmq.Socket[bytes], endpoint: Endpoint) -> None:
        self._socket = socket
        self.endpoint = endpoint
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
                log.warning("dropped a message at=%s reason=%s", self.endpoint.address, error)

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


class Channel:
    """Both ways between two processes, for raw parts in their order; used by one thread at a time. That its link was
    closed shows at the next use, which closes it.
    """

    def __init__(self, socket: zmq.Socket[bytes] | None) -> None:
        self._socket = socket

    @property
    def is_closed(self) -> bool:
        return self._socket is None

    def send(self, parts: Sequence[Buffer], within_s: float | None = None) -> bool:
        """Waits while the peer lags behind. False: it is closed, or the time is up."""
        if self._socket is None:
            return False
        try:
            if within_s is not None and not self._socket.poll(int(within_s * 1000), zmq.POLLOUT):
                return False
            self._socket.send_multipart(parts, copy=False)
        except zmq.ZMQError:
            self.close()
        return not self.is_closed

    def receive(self, within_s: float | None = None) -> list[memoryview] | None:
        """None: it is closed, or the time is up."""
        if self._socket is None:
            return None
        try:
            if within_s is not None and not self._socket.poll(max(0, int(within_s * 1000))):
                return None
            return [part.buffer for part in self._socket.recv_multipart(copy=False)]
        except zmq.ZMQError:
            self.close()
            return None

    def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()
