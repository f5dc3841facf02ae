"""How many bytes of requests are held at once: from their first byte to the end of their answers.

It bounds what prompts may take of the memory, however many clients send however long ones. It decides which request is
one too many, and when it should come back; nothing else is judged here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coordinator.clock import Clock
from coordinator.errors import QueueFull, Shed
from coordinator.overload import clamped

# Sixteen of the longest that are read, or a thousand of 100,000 words.
MOST_BYTES = 256 * 2**20
# As little as this always finds room: connections and calls are bounded elsewhere.
_SMALL_BYTES = 64 * 1024
# How much of a request's time is believed, and what it is before any was seen.
_BLEND = 0.1
_UNSEEN_S = 10.0


def _untold(_: Shed) -> None: ...


class Held:
    """One request's bytes."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self.bytes = 0

    def add(self, nbytes: int) -> None:
        """Raises QueueFull."""
        self._intake._take(self, nbytes)

    def drop(self) -> None:
        """They are not kept any longer."""
        self._intake.bytes -= self.bytes
        self.bytes = 0


class Intake:
    """Of one process, on one event loop. `told` hears of each request that is turned away before it is a turn."""

    def __init__(
        self, clock: Clock, most_bytes: int = MOST_BYTES, told: Callable[[Shed], None] = _untold
    ) -> None:
        self.told = told
        self.bytes = 0
        self._clock = clock
        self._most = most_bytes
        self._held_s = _UNSEEN_S  # how long requests of more than a few bytes are held

    @contextmanager
    def opened(self) -> Iterator[Held]:
        """The request is read and answered inside."""
        held, since = Held(self), self._clock.now()
        try:
            yield held
        finally:
            if held.bytes > _SMALL_BYTES:
                self._held_s += (self._clock.now() - since - self._held_s) * _BLEND
            held.drop()

    def _take(self, held: Held, nbytes: int) -> None:
        if not nbytes:
            return  # small ones may have taken more than there is; that a body has ended, or a client left, takes none
        if held.bytes + nbytes > _SMALL_BYTES and self.bytes + nbytes > self._most:
            self.told(Shed.BYTES)
            raise QueueFull(
                waiting=self.bytes, retry_after_s=self._room_s(nbytes), reason=Shed.BYTES
            )
        held.bytes += nbytes
        self.bytes += nbytes

    def _room_s(self, nbytes: int) -> float:
        """As much goes in that time as has come in it: what is held, in the time that it is held for."""
        above = self.bytes + nbytes - self._most
        return clamped(self._held_s * above / max(self.bytes, 1))
