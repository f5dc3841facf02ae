"""What a ring has done since it started: plain running totals for whoever watches. Nothing is decided by them."""

from __future__ import annotations

from collections import Counter as Counts
from dataclasses import dataclass, fields
from itertools import zip_longest

from coordinator.errors import RingserveError, SlowReader
from coordinator.frames import Frame, Reply
from coordinator.jobs import Job
from coordinator.requests import MissKind


@dataclass(frozen=True, slots=True)
class RingCounts:
    """`stage_busy_s`: seconds that each stage has computed, by the replies' own times."""

    frames: int = 0
    rows: int = 0
    discarded_frames: int = 0  # answered, but built on a guess that had failed
    drafted: int = 0
    accepted: int = 0
    refusals: int = 0
    prefilled_rows: int = 0
    reused_rows: int = 0
    stage_busy_s: tuple[float, ...] = ()
    restored_rows: int = 0  # of those reused: brought back from the chain store
    recalled: int = 0  # prompts whose first token came from a memo, no row being computed
    ahead_rows: int = 0  # computed while nobody waited
    misses: tuple[
        tuple[MissKind, int], ...
    ] = ()  # turns that reused less than their session had, by reason
    draft_steps: int = 0  # segments with drafts in them
    pauses: int = 0  # jobs that rested since their readers lagged
    slow_readers: int = 0  # of these, ended since nothing was read

    def plus(self, other: RingCounts) -> RingCounts:
        """Of two rings together."""
        added = {
            each.name: getattr(self, each.name) + getattr(other, each.name)
            for each in fields(self)
            if each.type == "int"
        }
        busy = zip_longest(self.stage_busy_s, other.stage_busy_s, fillvalue=0.0)
        misses = Counts(dict(self.misses)) + Counts(dict(other.misses))
        return RingCounts(**added, stage_busy_s=tuple(map(sum, busy)), misses=tuple(misses.items()))


class Counter:
    """Adds up; `totals` is a snapshot."""

    def __init__(self, stages: int) -> None:
        self.pauses = self._slow_readers = 0
        self._frames = self._rows = self._refusals = self._prefilled = self._reused = 0
        self._discarded = self._drafted = self._accepted = 0
        self._restored = self._ahead = self._recalled = self._draft_steps = 0
        self._misses: Counts[MissKind] = Counts()
        self._busy = [0.0] * stages

    def answered(self, frame: Frame, reply: Reply) -> None:
        self._frames += 1
        self._rows += frame.rows
        self._refusals += len(reply.refusals)
        for timing in reply.timings:
            self._busy[timing.stage] += timing.compute_s

    def ended(self, job: Job, *, discarded_frames: int) -> None:
        self._drafted += job.drafted
        self._draft_steps += job.draft_steps
        self._accepted += job.accepted
        self._discarded += discarded_frames

    def failed(self, error: RingserveError) -> None:
        """A job is ended from outside."""
        self._slow_readers += isinstance(error, SlowReader)

    def computed_ahead(self, rows: int) -> None:
        self._ahead += rows

    def admitted(self, job: Job) -> None:
        self._prefilled += job.prompt_tokens - job.cached_prefix
        self._reused += job.cached_prefix
        self._restored += job.restored_rows
        self._recalled += job.cached_prefix == job.prompt_tokens
        if job.miss is not None:
            self._misses[job.miss.kind] += 1

    @property
    def totals(self) -> RingCounts:
        return RingCounts(
            frames=self._frames,
            rows=self._rows,
            discarded_frames=self._discarded,
            drafted=self._drafted,
            accepted=self._accepted,
            refusals=self._refusals,
            prefilled_rows=self._prefilled,
            reused_rows=self._reused,
            stage_busy_s=tuple(self._busy),
            restored_rows=self._restored,
            recalled=self._recalled,
            ahead_rows=self._ahead,
            misses=tuple(self._misses.items()),
            draft_steps=self._draft_steps,
            pauses=self.pauses,
            slow_readers=self._slow_readers,
        )
