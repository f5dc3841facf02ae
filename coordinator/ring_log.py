"""Log lines about a ring's losses: one when it lost something, one when it answers again, one when it is given up.

Decides their words and levels only. Which process of a stage was lost is logged by whoever started it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from coordinator.frames import Reply
from coordinator.observe import EpochEnd, Restored

log = logging.getLogger(__name__)

_WHAT_TO_DO = (
    "mend the cause, which the lines before this one name; then put a new ring in its place "
    "(ringserve rings add, ringserve rings drain) or start ringserve again"
)


@dataclass(frozen=True, slots=True)
class RecoveringLine:
    ring: str
    epoch: int
    cause: str
    reason: str
    attempt: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class RestoredLine:
    """`rows_lost` are computed again, or come back from the chain store, when somebody wants them."""

    ring: str
    epoch: int
    seconds: float
    attempts: int
    replaced_stages: int
    rows_kept: int
    rows_lost: int


@dataclass(frozen=True, slots=True)
class GivenUpLine:
    ring: str
    reason: str
    what_to_do: str


class RingLog:
    """A RingObserver."""

    def started(self, ring: str) -> None:
        """Told by whoever started it."""

    def replied(self, ring: str, reply: Reply) -> None:
        """Nothing is wrong."""

    def replaced(self, ring: str, stages: int) -> None:
        """Told when the ring answers again."""

    def epoch_ended(self, ring: str, end: EpochEnd) -> None:
        line = RecoveringLine(
            ring, end.epoch, end.cause.value, end.reason, end.attempt, round(end.delay_s, 3)
        )
        log.warning("recovering", extra={"fields": line})

    def restored(self, ring: str, restored: Restored) -> None:
        line = RestoredLine(
            ring,
            restored.epoch,
            round(restored.seconds, 3),
            restored.attempts,
            restored.replaced,
            restored.rows_kept,
            restored.rows_lost,
        )
        # As loud as the loss: whoever saw that wants to see this.
        log.warning("answers again", extra={"fields": line})

    def given_up(self, ring: str, reason: str) -> None:
        log.error("given up", extra={"fields": GivenUpLine(ring, reason, _WHAT_TO_DO)})
