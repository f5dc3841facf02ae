"""The loop of a stage's one thread: wait, process, send on.

Decides how waiting is measured and when the loop ends. It may not judge a frame. An error in computing leaves the
loop: the ring is then lost, since nobody knows what the stage's rows hold.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from coordinator.errors import RingLost
from stage.messages import Delivery, FrameMessage, Inlet, Outlet, ReplyMessage
from stage.stage import Stage, Waited

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Pulse:
    """What a loop is at. Its own thread writes, any may read."""

    frames: int = 0  # messages done with
    since: float | None = None  # time.monotonic() when it began with the one in work


def run_stage(stage: Stage, inlet: Inlet, outlet: Outlet, pulse: Pulse | None = None) -> None:
    """Returns when the inlet is closed. Raises RingLost when the stage cannot go on."""
    pulse = pulse or Pulse()
    while True:
        pulse.since = None
        free_at = time.time()
        delivery = inlet.receive()
        if delivery is None:
            return
        pulse.since = time.monotonic()
        _step(stage, delivery, free_at, outlet)
        pulse.frames += 1


def _step(stage: Stage, delivery: Delivery, free_at: float, outlet: Outlet) -> None:
    message = delivery.message
    if isinstance(message, ReplyMessage):
        log.warning("dropped stage=%d reason=a reply came to a stage", stage.index)
        return
    try:
        outcome = stage.process(message, _waited(delivery.sent_at, free_at, time.time()))
    except Exception as error:
        log.exception("failed stage=%d message=%s", stage.index, _name(delivery))
        reason = f"{type(error).__name__}: {error}"
        raise RingLost(stage.index, f"{_name(delivery)} failed: {reason}") from error
    if outcome is not None:
        outlet.send(outcome)


def _waited(sent_at: float, free_at: float, now: float) -> Waited:
    """What passed while this stage was busy is queueing; the rest is the way from the sender.

    Clocks of two hosts may differ: no part is negative.
    """
    return Waited(max(0.0, free_at - sent_at), max(0.0, now - max(sent_at, free_at)))


def _name(delivery: Delivery) -> str:
    message = delivery.message
    frame = message.frame if isinstance(message, FrameMessage) else message
    if isinstance(frame, ReplyMessage):
        return "reply"
    return f"epoch={frame.epoch} seq={frame.seq}"
