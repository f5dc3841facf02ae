"""Keeps two stages' copies in step: what this stage's neighbour keeps of it, and what this stage keeps of another one.

Decides who says what when: after each wiring a stage asks what its neighbour has; a new stage takes back what the one
before it had kept there; then it tells, in a thread, what it stores and what it gives up. No frame waits for any of
it: a neighbour that lags, or is gone, only makes the mirror lag. It knows no Ray, and not which stages are neighbours.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from coordinator.errors import RingLost
from stage.kv.mirror import Key, MirrorShelf, Record
from stage.kv.outbox import Outbox
from stage.mirror_wire import Absent, Dropped, Hello, Said, Shelved, Wanted, decode, encode
from stage.transport import Channel, Endpoint, Link

log = logging.getLogger(__name__)

# A neighbour that is silent for so long gives nothing more back: at 1 Gbit/s a record of 100 MB takes one second.
_SILENT_S = 10.0
# Records asked for that have not come yet: more than one, so that none waits for the way of the question.
_ASKED_AHEAD = 3


class TakesBack(Protocol):
    """A stage, as far as its mirror knows it."""

    def lacks(self, key: Key) -> bool: ...
    def take_back(self, record: Record) -> bool: ...


@dataclass(frozen=True, slots=True)
class MirrorPlace:
    """Where a stage takes what it keeps for another one, and whose it has."""

    endpoint: Endpoint
    keeps: int | None


@dataclass(frozen=True, slots=True)
class GivenBack:
    """What a new stage got of what the one before it had."""

    records: int = 0
    nbytes: int = 0
    absent: int = 0  # of those that the neighbour had: damaged, of other numerics, without room, or not in time
    seconds: float = 0.0


class Mirror:
    """One stage's. Its methods come in any threads; each turn is bound, admitted, opened and ended by `rest`."""

    def __init__(self, outbox: Outbox, budget: int) -> None:
        self._outbox = outbox
        self._budget = budget
        self.shelf = MirrorShelf(budget)
        self.keeps: int | None = None  # the index of the stage whose nodes lie on the shelf
        self._turn: _Turn | None = None

    def bind(self, turn: int, where: Path | str) -> MirrorPlace:
        self._turn = bound = _Turn(turn, where)
        return MirrorPlace(bound.endpoint, self.keeps)

    def admit(self, owner: int, public: bytes | None, keeper: Endpoint) -> None:
        """Whose nodes are kept here from now on, and who keeps this stage's."""
        assert self._turn is not None
        if owner != self.keeps:
            self.shelf.clear()
            self.keeps = owner
        # What the stage has for its nodes, and so may have of them here, it says itself in each turn.
        self.shelf.budget = self._budget
        self._turn.admit(public, keeper, self.shelf)

    def open(self, turn: int, stage: TakesBack | None, within_s: float) -> GivenBack:
        """Once all have admitted. `stage`: a new one takes back what the one before it had, for so long at most."""
        bound = self._turn
        if bound is None or bound.number != turn:
            return GivenBack()
        return bound.open(self._outbox, self._budget, stage, within_s)

    def rest(self) -> None:
        """Returns when nothing of this turn goes on."""
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.close(self._outbox)


class _Turn:
    """The sockets and threads between two wirings. A link of its own: frames share no thread with what is large."""

    def __init__(self, number: int, where: Path | str) -> None:
        self.number = number
        self._link = Link()
        try:
            self._answers, self.endpoint = self._link.answer(where)
        except RingLost:
            self._link.close()
            raise
        self._keeper: Endpoint | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._threads: list[threading.Thread] = []

    def admit(self, public: bytes | None, keeper: Endpoint, shelf: MirrorShelf) -> None:
        self._link.admit(public)
        self._keeper = keeper
        self._start("mirror-shelf", keep, self._answers, shelf)

    def open(
        self, outbox: Outbox, budget: int, stage: TakesBack | None, within_s: float
    ) -> GivenBack:
        assert self._keeper is not None
        with self._lock:
            if self._closed:
                return GivenBack()
            telling = Telling(self._link.call(self._keeper), outbox, budget, lambda: self._closed)
        given = GivenBack()
        try:
            if stage is not None:
                given = telling.take_back(stage, within_s)
        finally:
            if not self._start("mirror-tell", telling.run):
                telling.close()
        return given

    def close(self, outbox: Outbox) -> None:
        with self._lock:
            self._closed = True
        outbox.wake()
        if not self._threads:
            self._answers.close()
        self._link.close()
        for thread in self._threads:
            thread.join()

    def _start(self, name: str, run: Callable[..., None], *arguments: object) -> bool:
        with self._lock:
            if self._closed:
                return False
            thread = threading.Thread(target=run, args=arguments, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
            return True


def keep(answers: Channel, shelf: MirrorShelf) -> None:
    """The thread of what this stage keeps for another one."""
    most = shelf.budget
    try:
        while (parts := answers.receive()) is not None:
            said = decode(parts)
            if isinstance(said, Record):
                shelf.put(said)
            elif isinstance(said, Dropped):
                shelf.drop(said.keys)
            elif isinstance(said, Wanted):
                answers.send(encode(shelf.get(said.key) or Absent(said.key)))
            elif isinstance(said, Hello):
                shelf.budget = min(most, said.budget)
                answers.send(encode(Shelved(tuple(shelf.for_giving().items()))))
    finally:
        answers.close()


class Telling:
    """One turn's side of the stage whose nodes these are. One thread at a time uses it."""

    def __init__(
        self, channel: Channel, outbox: Outbox, budget: int, is_over: Callable[[], bool]
    ) -> None:
        self._channel = channel
        self._outbox = outbox
        self._is_over = is_over
        self._owed = 0  # answers to come, of which nobody wants to know any more
        self._there: dict[Key, int] | None = None
        channel.send(encode(Hello(budget)))

    def take_back(self, stage: TakesBack, within_s: float) -> GivenBack:
        """What the neighbour has, and the stage lacks."""
        began = time.monotonic()
        wanted = tuple(key for key in self._shelved(within_s) if stage.lacks(key))
        records = nbytes = 0
        for record in self._asked(wanted, began + within_s):
            if stage.take_back(record):
                self._outbox.came_from_there(record)
                records, nbytes = records + 1, nbytes + len(record.payload)
        return GivenBack(records, nbytes, len(wanted) - records, time.monotonic() - began)

    def run(self) -> None:
        """Tells what the stage stores and gives up, until the turn is over."""
        try:
            there = self._shelved(None)
            while self._owed and self._channel.receive() is not None:
                self._owed -= 1
            self._outbox.reconcile(there)
            while (told := self._outbox.take(self._is_over)) is not None:
                said: Said = told if isinstance(told, Record) else Dropped(told)
                if not self._channel.send(encode(said)):
                    return
        finally:
            self._channel.close()

    def close(self) -> None:
        self._channel.close()

    def _shelved(self, within_s: float | None) -> dict[Key, int]:
        """What the neighbour has; nothing when it does not say so in time."""
        if self._there is None:
            parts = self._channel.receive(None if within_s is None else min(within_s, _SILENT_S))
            if parts is None:
                return {}
            said = decode(parts)
            # Where that cannot be read, all is sent to it anew.
            self._there = dict(said.stamps) if isinstance(said, Shelved) else {}
        return self._there

    def _asked(self, wanted: Sequence[Key], until: float) -> Iterator[Record]:
        """The records that come in time, in this order."""
        keys = iter(wanted)
        for key in islice(keys, _ASKED_AHEAD):
            self._ask(key, until)
        while self._owed:
            left = _left_s(until)
            parts = self._channel.receive(left)
            if parts is None:
                return
            self._owed -= 1
            if left > 0:
                for another in islice(keys, 1):
                    self._ask(another, until)
            said = decode(parts)
            if isinstance(said, Record):
                yield said

    def _ask(self, key: Key, until: float) -> None:
        """A neighbour that is gone takes no question either."""
        if self._channel.send(encode(Wanted(key)), _left_s(until)):
            self._owed += 1


def _left_s(until: float) -> float:
    return max(0.0, min(until - time.monotonic(), _SILENT_S))
