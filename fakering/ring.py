"""The ring port without a model: the network's replies on an event loop.

It decides nothing about frames; network.py does. With the system clock it serves clients, with a virtual
clock it serves tests. It keeps the port's promises as far as the script of faults lets it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace

from coordinator.clock import Clock, SystemClock, Timer
from coordinator.errors import RingLost
from coordinator.frames import PROTOCOL_VERSION, Epoch, Frame, Reply
from coordinator.held import Holding
from coordinator.ring import ProgressSink, RingHealth, RingInfo, StageProgress
from fakering.faults import FaultScript
from fakering.model import FakeModel
from fakering.network import Network, Pace


class FakeRing:
    """Implements coordinator.ring.Ring. `language`, when given, takes the place of vocab_size and seed."""

    def __init__(
        self,
        stages: int,
        lanes: int,
        max_rows: int,
        *,
        vocab_size: int,
        seed: int = 0,
        faults: FaultScript = (),
        clock: Clock | None = None,
        step_s: float = 0.0,
        row_s: float = 0.0,
        model: str = "fake",
        language: FakeModel | None = None,
        host_rows: int = 0,
    ) -> None:
        self.language = language or FakeModel(vocab_size, seed)
        pace = Pace(step_s, row_s)
        self.network = Network(stages, lanes, max_rows, self.language, faults, pace, host_rows)
        self._info = replace(
            describe(model, self.language, stages, lanes, max_rows), host_rows=host_rows
        )
        self._clock: Clock = clock or SystemClock()
        self._replies: deque[Reply] = deque()
        self._changed = asyncio.Event()
        self._timer: Timer | None = None
        self._runs = False  # it was started, and not stopped
        self._down: RingLost | None = RingLost(None, "not started")

    async def start(self, progress: ProgressSink) -> RingInfo:
        """A second start, after stop, makes new stages with no rows."""
        self.network.rebuild()
        self._forget_replies()
        self._runs, self._down = True, None
        self._pump()
        for stage in range(self._info.stages):
            progress(StageProgress(stage, bytes_done=0, bytes_total=0, note="nothing to load"))
        return self._info

    def capacity(self) -> RingInfo:
        return self._info

    async def open_epoch(self, epoch: Epoch) -> Holding:
        if not self._runs:
            self._raise_if_down()
        self._forget_replies()
        try:
            held = self.network.open_epoch(epoch, self._clock.now())
        except RingLost as lost:
            self._go_down(lost)
            raise
        self._down = None
        self._pump()
        return held

    def submit(self, frame: Frame) -> None:
        self._raise_if_down()
        self.network.send(frame, self._clock.now())
        self._pump()

    async def next_reply(self) -> Reply:
        while not self._replies:
            self._raise_if_down()
            self._changed.clear()
            await self._changed.wait()
        # Nothing is awaited between here and the return, so a cancellation loses no reply.
        return self._replies.popleft()

    def health(self) -> RingHealth:
        reason = "" if self._down is None else self._down.reason
        return RingHealth(self._down is None, reason, replaced=self.network.replaced)

    async def stop(self) -> None:
        self._runs = False
        self._go_down(RingLost(None, "stopped"))

    # Trouble, for who wants to see what follows

    def fail(self, stage: int) -> None:
        """The stage dies, now."""
        self.network.kill(stage, self._clock.now())
        self._pump()

    def take_away(self) -> None:
        """Somebody else has the ring from now on."""
        self._go_down(self.network.give_away())

    def hold_up(self, stage: int, seconds: float) -> None:
        """The stage computes nothing more for a while."""
        self.network.hold_up(stage, self._clock.now() + seconds)

    def _raise_if_down(self) -> None:
        if self._down is not None:
            # A new one each time: an exception that is raised twice drags both tracebacks along.
            raise type(self._down)(self._down.stage, self._down.reason)

    def _pump(self) -> None:
        """Collects what is due now, and comes back when the next thing is."""
        self._cancel_timer()
        for outcome in self.network.advance(self._clock.now()):
            if isinstance(outcome, RingLost):
                self._go_down(outcome)
                return
            self._replies.append(outcome)
        if self._replies:
            self._changed.set()
        due = self.network.next_due()
        if due is not None:
            self._timer = self._clock.call_at(due, self._pump)

    def _go_down(self, reason: RingLost) -> None:
        self._forget_replies()
        self._down = reason
        self._changed.set()

    def _forget_replies(self) -> None:
        self._cancel_timer()
        self._replies.clear()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# Few more than the coordinator needs, so that simulations see slots overwritten.
_SPARE_MEMOS = 2


def describe(name: str, language: FakeModel, stages: int, lanes: int, max_rows: int) -> RingInfo:
    """What a ring of fake stages says of itself."""
    return RingInfo(
        protocol_version=PROTOCOL_VERSION,
        model=name,
        model_fingerprint=repr(language),
        stages=stages,
        lanes=lanes,
        max_rows=max_rows,
        vocab_size=language.vocab_size,
        numerics="exact (bit-identical)",
        exact=True,
        devices=("fake",) * stages,
        # Nothing computes here, but the coordinator's lone frames are to be met in simulations too.
        lends_cores=True,
        memos=lanes + _SPARE_MEMOS,
    )
