"""The queue of jobs that wait for a lane: bounded by the scheduler, fair between sessions.

Decides who is next, by self-clocked fair queueing (Golestani 1994): a session that sends twenty
turns at once waits behind one that sends a single turn, and neither waits for ever. A job's
priority is its session's weight for that job; first come, first served within a session. Jobs that
had a lane already come before all others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from coordinator.frames import JobId
from coordinator.jobs import Job

# One step of priority is twice the share.
_SHARE_BASE = 2.0


@dataclass(slots=True)
class _Line:
    """One session's waiting jobs. `start` is where its first one begins on the queue's own clock."""

    start: float
    jobs: deque[Job] = field(default_factory=deque)

    @property
    def finish(self) -> float:
        """Where its first job ends: a job is as long as its weight is small."""
        return self.start + _SHARE_BASE ** -self.jobs[0].request.priority


class FairQueue:
    def __init__(self) -> None:
        self._resumed: deque[Job] = deque()
        self._lines: dict[str | JobId, _Line] = {}
        self._now = 0.0  # where the job that was served last ends: newcomers begin there

    def __len__(self) -> int:
        return len(self._resumed) + sum(len(line.jobs) for line in self._lines.values())

    def __iter__(self) -> Iterator[Job]:
        yield from self._resumed
        for line in self._lines.values():
            yield from line.jobs

    def push(self, job: Job) -> None:
        line = self._lines.setdefault(self._key(job), _Line(self._now))
        if not line.jobs:
            line.start = max(line.start, self._now)
        line.jobs.append(job)

    def push_front(self, job: Job) -> None:
        """The job had a lane and lost it with its epoch."""
        self._resumed.appendleft(job)

    def heads(self) -> Iterator[Job]:
        """Each session's next job, the one whose turn it is first."""
        yield from self._resumed
        lines = [line for line in self._lines.values() if line.jobs]
        for line in sorted(lines, key=lambda line: line.finish):
            yield line.jobs[0]

    def take(self, job: Job) -> None:
        """Takes out one of `heads`, which has been served."""
        if job in self._resumed:
            self._resumed.remove(job)
            return
        line = self._lines[self._key(job)]
        line.start = self._now = max(self._now, line.finish)
        line.jobs.popleft()
        self._forget_idle()

    def remove(self, job_id: JobId) -> Job | None:
        """Takes a job out, wherever it waits."""
        for jobs in (self._resumed, *(line.jobs for line in self._lines.values())):
            for job in jobs:
                if job.id == job_id:
                    jobs.remove(job)
                    self._forget_idle()
                    return job
        return None

    def clear(self) -> None:
        self._resumed.clear()
        self._lines.clear()

    def _key(self, job: Job) -> str | JobId:
        """A job without a session is a session of its own."""
        return job.request.session or job.id

    def _forget_idle(self) -> None:
        """Whoever comes back begins at the clock, so an empty line says nothing."""
        self._lines = {key: line for key, line in self._lines.items() if line.jobs}
