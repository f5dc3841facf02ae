"""What follows when an epoch ends: how long until the next is opened, and when the ring or a job is given up.

Counts the openings since the last good reply, or since the ring stood whole for long with nothing to do. Decides
nothing else: what is lost and how it is replaced is the ring's business, and what becomes of other jobs the
scheduler's. Pure; seconds are handed out, not waited for.
"""

from __future__ import annotations

from coordinator.config import SchedulerSettings

# Beyond it waiting longer brings nothing: whoever mends the cause wants to see it noticed.
_LONGEST_DELAY_S = 30.0


class Recovery:
    def __init__(self, settings: SchedulerSettings) -> None:
        self._most = settings.heal_attempts
        self._backoff_s = settings.heal_backoff_s
        self._openings = 0
        self._opened_at: float | None = None  # the last epoch that did

    @property
    def trusts_rows(self) -> bool:
        """Whether an epoch may go on from the rows that are left. Where that has led to no good reply, it may not."""
        return self._openings <= 1

    def hopeless(self, losses: int) -> bool:
        """Whether a job that has cost, or seen, so many epochs since its last token is to cost no more. A prompt that
        ends a stage each time would end it for ever: frames that are answered before it look like a ring that is well.
        """
        return losses > self._most

    def answered(self) -> None:
        self._openings = 0

    def opened(self, now: float) -> None:
        self._opened_at = now

    def broken(self, now: float, *, idle: bool) -> None:
        """An open epoch is lost. Losses of an idle ring that are hours apart have nothing to do with each other."""
        if idle and self._opened_at is not None and now - self._opened_at > _LONGEST_DELAY_S:
            self._openings = 0

    def verdict(self, reason: str) -> str:
        """What is said of a ring that is given up."""
        return f"it did not heal, again and again; the last: {reason}"

    def next_opening(self) -> float | None:
        """Seconds until the next epoch is to be opened; None: it has been tried often enough. The first opening is
        at once, and each one behind it waits twice as long as the one before.
        """
        self._openings += 1
        if self._openings > self._most:
            return None
        if self._openings == 1:
            return 0.0
        return min(self._backoff_s * 2.0 ** (self._openings - 2), _LONGEST_DELAY_S)
