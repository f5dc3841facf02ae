"""Counts what happens on rings: each frame's times on each stage, refusals, epochs. What a figure means is in
families.py.

These figures belong to the process: a ring that was drained leaves its counts behind.
"""

from __future__ import annotations

from coordinator.frames import RefusalCode, Reply
from coordinator.observe import EpochCause, EpochEnd, Restored
from gateway.observing.metrics import families
from gateway.observing.metrics.naming import Naming


class RingMetrics:
    """A RingObserver."""

    def __init__(self, naming: Naming) -> None:
        self._steps = naming.histograms(families.STAGE_STEP)
        self._queued = naming.counters(families.STAGE_QUEUE)
        self._transferred = naming.counters(families.STAGE_TRANSFER)
        self._refusals = naming.counters(families.REFUSALS)
        self._epochs = naming.counters(families.EPOCHS)
        self._restores = naming.histogram(families.RESTORE)
        self._replaced = naming.counters(families.REPLACED)
        # From the start at 0, so that the first one is seen as an increase.
        for code in RefusalCode:
            self._refusals[str(code)]
        for cause in EpochCause:
            self._epochs[str(cause)]

    def started(self, ring: str) -> None:
        """From here at 0, for the same reason."""
        self._replaced[ring]

    def replied(self, ring: str, reply: Reply) -> None:
        for timing in reply.timings:
            series = ring, str(timing.stage)
            self._queued[series].inc(timing.queue_s)
            self._transferred[series].inc(timing.transfer_s)
            # A frame that only moves nodes is no step.
            if reply.segments:
                self._steps[series].observe(timing.compute_s)
        for refusal in reply.refusals:
            self._refusals[refusal.code.value].inc()

    def epoch_ended(self, ring: str, end: EpochEnd) -> None:
        self._epochs[end.cause.value].inc()

    def replaced(self, ring: str, stages: int) -> None:
        self._replaced[ring].inc(stages)

    def restored(self, ring: str, restored: Restored) -> None:
        self._restores.observe(restored.seconds)

    def given_up(self, ring: str, reason: str) -> None:
        """Its state says so."""
