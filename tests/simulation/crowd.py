"""Clients of one ring in virtual time who come back when they are told to, and read as fast as they like. For tests.

Everything that they are told is held against the oracle. They decide nothing of their own: same plan, same run.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.driver import RingDriver
from coordinator.errors import QueueFull, RingserveError
from coordinator.requests import Finished, Request, TokenDelta
from coordinator.streams import JobStream
from fakering.clock import VirtualClock
from fakering.model import FakeModel

# Turns of the event loop in which a reply has reached the driver.
_SETTLE_TURNS = 4
_MOST_STEPS = 400_000


@dataclass(frozen=True, slots=True)
class Visit:
    """A turn that a client wants, and how it reads. `every_s` 0: at once; `reads`: so many times, then never more."""

    at_s: float
    request: Request
    every_s: float = 0.0
    reads: int | None = None


@dataclass(slots=True)
class Client:
    """What became of it."""

    visit: Visit
    stream: JobStream | None = None
    # When it was sent away, and for how long.
    told: list[tuple[float, float]] = field(default_factory=list)
    got_in_s: float | None = None
    ended_s: float | None = None
    tokens: list[int] = field(default_factory=list)
    end: Finished | RingserveError | None = None
    reads: int = 0

    @property
    def tries(self) -> int:
        """How often it came back."""
        return len(self.told)

    @property
    def late_s(self) -> float:
        """How much later than it was told at first it got in."""
        assert self.got_in_s is not None
        came, after = self.told[0]
        return self.got_in_s - (came + math.ceil(after))


class Crowd:
    def __init__(self, clock: VirtualClock, driver: RingDriver, model: FakeModel) -> None:
        self.clients: list[Client] = []
        self._clock = clock
        self._driver = driver
        self._model = model
        self._live: list[Client] = []  # those who read at once

    async def play(self, visits: Sequence[Visit]) -> None:
        """Until each has had its turn, or lost it, and nothing is left to happen."""
        for visit in visits:
            client = Client(visit)
            self.clients.append(client)
            self._clock.call_at(self._clock.now() + visit.at_s, lambda c=client: self._come(c))  # type: ignore[misc]
        for _ in range(_MOST_STEPS):
            due = self._clock.next_due()
            if due is None:
                break
            self._clock.advance_to(due)
            for _ in range(_SETTLE_TURNS):
                await asyncio.sleep(0)
            for client in tuple(self._live):
                self._read(client)
            self.look()
        else:
            raise AssertionError("the run goes on for ever")
        for client in self.clients:
            self._read(client)
            self._check(client)

    def look(self) -> None:
        """After each step, once all who read at once have read."""

    def _come(self, client: Client) -> None:
        try:
            client.stream = self._driver.submit(client.visit.request)
        except QueueFull as full:
            client.told.append((self._clock.now(), full.retry_after_s))
            back = self._clock.now() + math.ceil(full.retry_after_s)
            self._clock.call_at(back, lambda: self._come(client))
            return
        client.got_in_s = self._clock.now()
        if client.visit.every_s:
            self._read_later(client)
        else:
            self._live.append(client)

    def _read_later(self, client: Client) -> None:
        visit = client.visit
        if visit.reads is None or client.reads < visit.reads:
            after = self._clock.now() + visit.every_s
            self._clock.call_at(after, lambda: self._read_one(client))

    def _read_one(self, client: Client) -> None:
        client.reads += 1
        self._take(client)
        if client.end is None:
            self._read_later(client)

    def _read(self, client: Client) -> None:
        """All that is there."""
        while self._take(client):
            pass

    def _take(self, client: Client) -> bool:
        """The next event, if there is one."""
        assert client.stream is not None
        if client.end is not None:
            return False
        try:
            event = client.stream._take()
        except RingserveError as error:
            self._ended(client, error)
            return False
        if isinstance(event, TokenDelta):
            client.tokens.extend(event.tokens)
        elif isinstance(event, Finished):
            self._ended(client, event)
        return event is not None

    def _ended(self, client: Client, end: Finished | RingserveError) -> None:
        client.end, client.ended_s = end, self._clock.now()
        if client in self._live:
            self._live.remove(client)

    def _check(self, client: Client) -> None:
        request, got = client.visit.request, tuple(client.tokens)
        right = self._model.oracle(request.prompt, request.max_new_tokens, request.sampling)
        assert client.end is not None, "a turn never ended"
        assert got == right[: len(got)], "wrong tokens"
        if isinstance(client.end, Finished):
            assert got == right, "it finished early"
