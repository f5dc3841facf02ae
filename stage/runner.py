"""A stage's loop that can be rested, and run again over other sockets.

Decides which call belongs to which turn: each wiring of the ring is a turn, and a call of an earlier one, however late
it arrives, is refused. A stage that failed in computing is broken for good. Its methods come in any threads; the loop
runs in the one that called `run`. It knows no Ray.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coordinator.errors import RingLost
from stage.loop import Pulse, run_stage
from stage.messages import Delivery
from stage.private_folder import remove_private_folder
from stage.stage import Stage
from stage.transport import Endpoint, Link, Listener, Sender

# Turns of one gateway: more than it will ever begin.
_TERM_BITS = 32


class Outdated(Exception):
    """The call belongs to a turn that is over. Whoever made it has given up on the answer."""


@dataclass(frozen=True, slots=True)
class LoopEnd:
    """How a stage's loop ended; without a reason it was told to."""

    stage: int | None = None
    reason: str | None = None


class Runner:
    def __init__(self) -> None:
        self.pulse = Pulse()
        self.turn = 0
        self.broken: str | None = None  # why nobody knows what the stage's rows hold
        self._changing = threading.Lock()
        self._wires: _Wires | None = None
        self._still = threading.Event()  # no loop runs
        self._still.set()

    def rest(self, turn: int, within_s: float) -> bool:
        """Ends the loop, with the frame that it computes, and its sockets. False: not in time."""
        with self._changing:
            if turn <= self.turn:
                raise Outdated(f"turn {turn} is over, this is {self.turn}")
            self.turn = turn
            wires, self._wires = self._wires, None
        if wires is not None:
            # In a thread, since it waits for as long as the frame takes.
            threading.Thread(target=wires.close, name="rest", daemon=True).start()
        return self._still.wait(within_s)

    def take_over(self) -> None:
        """Another gateway drives from now on: turns of the one before are over, also those that it still begins."""
        with self._changing:
            self.turn = ((self.turn >> _TERM_BITS) + 1) << _TERM_BITS
            if self._wires is not None:
                self._wires.is_orphan = True

    def bind(self, turn: int, where: Path | str) -> Endpoint:
        """Where frames of this turn are to be sent. It begins the turn of a stage that had none to rest from."""
        with self._changing:
            if turn > self.turn and self._wires is None and self._still.is_set():
                self.turn = turn
            self._check(turn)
            self._wires = wires = _Wires(where)
            return wires.listener.endpoint

    def connect(self, turn: int, previous: bytes | None, following: Endpoint) -> None:
        """Who sends frames here, by its public key, and where they go on to."""
        with self.within(turn):
            assert self._wires is not None
            self._wires.admit(previous, following)

    def run(self, turn: int, stage: Stage) -> LoopEnd:
        """Until the next turn."""
        with self.within(turn):
            wires = self._wires
            assert wires is not None
            wires.take()
            self._still.clear()
        try:
            return self._serve(stage, wires)
        finally:
            self.pulse.since = None
            # ZeroMQ's sockets belong to the thread that uses them.
            wires.close_sockets()
            self._still.set()

    @contextmanager
    def within(self, turn: int) -> Iterator[None]:
        """No other turn begins in the meantime. Raises Outdated."""
        with self._changing:
            self._check(turn)
            yield

    def _check(self, turn: int) -> None:
        if turn != self.turn:
            raise Outdated(f"turn {turn} is over, this is {self.turn}")

    def busy_s(self) -> float:
        """For how long the frame in work has been."""
        since = self.pulse.since
        return 0.0 if since is None else time.monotonic() - since

    def _serve(self, stage: Stage, wires: _Wires) -> LoopEnd:
        assert wires.sender is not None
        try:
            run_stage(stage, wires, wires.sender, self.pulse)
        except RingLost as error:
            # Without a stage it is the way on that failed: the rows are what the ledger says.
            if error.stage is not None:
                self.broken = error.reason
            elif wires.closing:
                return LoopEnd()
            return LoopEnd(error.stage, error.reason)
        return LoopEnd()


class _Wires:
    """The sockets of one turn: new ones, with new keys. What was sent to older ones never arrives here."""

    def __init__(self, where: Path | str) -> None:
        self._link = Link()
        self._where = where
        self.is_orphan = False  # whoever made its folder may be gone
        try:
            self.listener: Listener = self._link.listen(where)
        except RingLost:
            self._link.close()
            raise
        self.sender: Sender | None = None
        self._following: Endpoint | None = None
        self.taken = False  # by the loop, which closes them
        self.closing = False

    def admit(self, previous: bytes | None, following: Endpoint) -> None:
        self._link.admit(previous)
        self._following = following

    def take(self) -> None:
        """Connects: by now everybody knows whom to let in."""
        assert self._following is not None
        self.sender = self._link.connect(self._following)
        self.taken = True

    def receive(self) -> Delivery | None:
        """A socket may still hand out what it has when it is to be closed."""
        delivery = None if self.closing else self.listener.receive()
        return None if self.closing else delivery

    def close(self) -> None:
        """Returns when all sockets are closed by those who use them."""
        self.closing = True
        if not self.taken:
            self.close_sockets()
        self._link.close()
        if self.is_orphan and isinstance(self._where, Path):
            remove_private_folder(self._where.parent)

    def close_sockets(self) -> None:
        if self.sender is not None:
            self.sender.close()
        self.listener.close()
