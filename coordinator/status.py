"""What a ring's driver tells of it to whoever asks. A snapshot: nothing is decided by it but where a job goes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from coordinator.counts import RingCounts
from coordinator.ring import RingInfo


class RingState(StrEnum):
    READY = "ready"
    LOADING = "loading"
    RECOVERING = "recovering"
    DRAINING = "draining"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class RingStatus:
    name: str
    info: RingInfo | None  # None until the ring has started
    ready: bool
    reason: str  # why it is not ready
    draining: bool  # its running and waiting jobs are its last
    recovering: bool  # it lost something and heals; jobs wait meanwhile
    epoch: int
    busy_lanes: int
    free_lanes: int  # idle, and no session's rows would be lost there
    waiting_jobs: int
    running_jobs: int
    sessions: int
    counts: RingCounts
    stored_rows: int = 0  # of RingInfo.host_rows
    pinned_rows: int = 0
    frames_in_flight: int = 0
    resting_jobs: int = 0  # of those that run: their readers lag
    most_jobs: int = 0  # that it can ever have, in lanes and waiting
    back_s: float = 0.0  # until it may take jobs again, where it takes none; as far as can be said
    spares: int = 0  # loaded processes that wait to take a lost stage's place
    replaced: int = 0  # stages, since the ring started

    @property
    def state(self) -> RingState:
        """In one word. One that drains takes no new turn, whether it heals or not."""
        if self.draining:
            return RingState.DRAINING
        if self.ready:
            return RingState.READY
        if self.recovering:
            return RingState.RECOVERING
        return RingState.LOADING if self.info is None else RingState.DOWN
