"""Which jobs may wait for a lane, and when those that may not should come back.

Decides by how many wait and how many tokens would have to be computed for them. When there will be room is worked out
from what frames cost (costs.py) and from what turns were like of late; who is shed stands in line from then on, behind
those who were shed before: else all would come back at once, and all but one in vain. It ends no job. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from coordinator.config import SchedulerSettings
from coordinator.costs import Costs
from coordinator.errors import QueueFull, Shed
from coordinator.jobs import Job, Phase
from coordinator.requests import Request
from coordinator.ring import RingInfo

# Seconds of prefill that may wait where nobody says how many tokens: what a client may be asked to wait for.
_QUEUE_S = 120.0
# The same before anything was measured: so many lanes' rows for each lane.
_UNSEEN_FILLS = 4
# What clients are told: less is no wait at their resolution, more is more than some of them keep to.
LEAST_RETRY_S, MOST_RETRY_S = 1.0, 60.0
# Tokens of an answer, and seconds of a turn, before any was seen.
_UNSEEN_TOKENS = 256.0
_UNSEEN_TURN_S = 10.0
# Who comes too early has come in vain; a little too late costs nobody anything while others wait.
_MARGIN = 1.1
_FULL = 0.75
# How much of a new turn is believed.
_BLEND = 0.05
# Those who were shed and are expected back: beyond these, all are told the same.
_MOST_EXPECTED = 256
# Seconds that a ring takes to heal before it ever did: a spare is there at once, weights are loaded in minutes.
_UNSEEN_HEALING_S = 5.0
# The same of a ring that loads, or that is drained.
UNSEEN_LOADING_S = 5.0


def clamped(seconds: float) -> float:
    return min(max(seconds, LEAST_RETRY_S), MOST_RETRY_S)


class Healing:
    """How long a ring that heals will be away."""

    def __init__(self) -> None:
        self._last_s = _UNSEEN_HEALING_S
        self._since: float | None = None

    def expect(self, load_s: float) -> None:
        """Before it ever healed: where a lost stage's weights must be loaded again, it takes as long as they took."""
        self._last_s = max(load_s, _UNSEEN_HEALING_S)

    def look(self, now: float, *, heals: bool) -> None:
        if heals and self._since is None:
            self._since = now
        elif not heals and self._since is not None:
            self._last_s, self._since = now - self._since, None

    def left_s(self, now: float) -> float:
        """As long as it took the last time. Where it takes longer, half of what it has taken so far; 0: it is whole."""
        if self._since is None:
            return 0.0
        taken = now - self._since
        return max(self._last_s - taken, taken / 2)


@dataclass(frozen=True, slots=True, order=True)
class _Guest:
    """When a job comes, and what it asks of the ring: rows to prefill, and tokens that it is likely to generate."""

    due: float
    rows: int
    tokens: float


@dataclass(frozen=True, slots=True)
class _Pace:
    """What guests take: seconds a row of the whole ring, seconds a token of one lane."""

    row_s: float
    token_s: float | None  # None: nothing was seen yet, and a turn takes as long as any
    lanes: int

    def lane_s(self, guest: _Guest) -> float:
        """For how long it holds a lane that shares the ring with no prefill."""
        return guest.rows * self.row_s + self._answer_s(guest)

    def work_s(self, guest: _Guest) -> float:
        """What the ring has to do for it: a token of each lane's answer is computed in the time of one."""
        return guest.rows * self.row_s + self._answer_s(guest) / self.lanes

    def _answer_s(self, guest: _Guest) -> float:
        return _UNSEEN_TURN_S if self.token_s is None else guest.tokens * self.token_s


class _Turns:
    """What turns were like of late."""

    def __init__(self) -> None:
        self._n = 0
        self.tokens = _UNSEEN_TOKENS
        self.token_s: float | None = None

    def ended(self, job: Job, now: float) -> None:
        """One that came to its own end."""
        if job.first_token_at is None or job.disturbed:
            return
        self._n += 1
        share = max(1.0 / self._n, _BLEND)
        self.tokens += (job.generated - self.tokens) * share
        if job.generated > 1:
            each = (now - job.first_token_at) / (job.generated - 1)
            known = each if self.token_s is None else self.token_s
            self.token_s = known + (each - known) * share


class Gate:
    """One ring's. `unheld`: how many of a request's tokens, followed by those, are held nowhere on the ring."""

    def __init__(
        self,
        info: RingInfo,
        settings: SchedulerSettings,
        costs: Costs,
        unheld: Callable[[Request, Sequence[int]], int],
    ) -> None:
        self._info = info
        self._settings = settings
        self._costs = costs
        self._unheld = unheld
        self._turns = _Turns()
        self._expected: list[_Guest] = []  # who was shed, and told when to come
        self.healing = Healing()

    @property
    def most_jobs(self) -> int:
        """That have lanes or wait."""
        return self._info.lanes + self._settings.queue_limit

    @property
    def most_tokens(self) -> int:
        """That may wait, of those to be computed."""
        if self._settings.queue_tokens is not None:
            return self._settings.queue_tokens
        rate = self._costs.rows_per_s(self._settings.frame_rows)
        if not rate:
            return _UNSEEN_FILLS * self._info.lanes * self._info.max_rows
        return max(round(rate * _QUEUE_S), self._info.max_rows)

    def check(
        self, request: Request, running: Collection[Job], waiting: Sequence[Job], now: float
    ) -> None:
        """Raises QueueFull. Where nobody waits, anybody may. Of those that wait, the first get the idle lanes."""
        queue = waiting[self._info.lanes - len(running) :]
        if not queue:
            return
        most, tokens = self.most_tokens, sum(map(self._fresh, queue))
        reason, own = Shed.JOBS, len(request.prompt)
        if len(queue) < self._settings.queue_limit:
            if tokens + own > most:
                own = self._unheld(request, request.prompt)
            if tokens + own <= most:
                return
            reason = Shed.TOKENS
        guest = _Guest(now, own, self._answer(request.max_new_tokens))
        retry_s = self._expect(guest, running, waiting, now)
        much = len(queue) if reason is Shed.JOBS else tokens
        raise QueueFull(waiting=much, retry_after_s=retry_s, reason=reason)

    def ended(self, job: Job, now: float) -> None:
        """A job came to its own end: what the next ones take is guessed from it."""
        self._turns.ended(job, now)

    def begun(self, waiting: Iterable[Job]) -> None:
        """An epoch begins: other rows are held than when these jobs were looked at."""
        for job in waiting:
            job.fresh = None

    def _fresh(self, job: Job) -> int:
        """Looked up once an epoch, when somebody comes behind the job."""
        if job.fresh is None:
            job.fresh = self._unheld(job.request, job.context)
        return job.fresh

    # When to come back

    def _expect(
        self, guest: _Guest, running: Collection[Job], waiting: Collection[Job], now: float
    ) -> float:
        """When there will be room for one more, all those told before coming when they were told to."""
        self._expected = sorted(each for each in self._expected if each.due > now)
        here = [_Guest(now, self._fresh(job), self._answer(job.remaining)) for job in waiting]
        line = [replace(each, due=each.due - now) for each in (*here, *self._expected)]
        admissions = self._admissions(running, line, self.healing.left_s(now))
        retry_s = clamped(self._room_s(guest, admissions, line))
        if retry_s < MOST_RETRY_S and len(self._expected) < _MOST_EXPECTED:
            # Whole seconds, as HTTP has them.
            self._expected.append(replace(guest, due=now + math.ceil(retry_s)))
        return retry_s

    def _room_s(self, guest: _Guest, admissions: Iterable[float], line: Sequence[_Guest]) -> float:
        """From when on the queue always has room for one more guest."""
        moves = [(each.due, 1, each.rows) for each in line]
        moves += [(at_s, -1, -each.rows) for at_s, each in zip(admissions, line, strict=True)]
        most_jobs, most_tokens = self._settings.queue_limit * _FULL, self.most_tokens * _FULL
        jobs, tokens, room_s = 0, 0, math.inf
        for at_s, more, rows in sorted(moves):
            jobs, tokens = jobs + more, tokens + rows
            fits = jobs + 1 <= most_jobs and tokens + guest.rows <= most_tokens
            room_s = min(room_s, at_s) if fits or not jobs else math.inf
        return room_s

    def _admissions(
        self, running: Collection[Job], line: Sequence[_Guest], from_s: float
    ) -> Iterator[float]:
        """When each of the line gets its lane: once one comes free, and the ring has had time for those before it."""
        pace = self._pace()
        ahead = [self._left(job) for job in running if not job.rests]
        idle = self._info.lanes - len(running)
        # Nobody knows when who reads slowly will have read: when he is given up at the latest, if he reads no more.
        resting = [from_s + self._settings.unread_s] * (len(running) - len(ahead))
        free = [from_s] * idle + [from_s + pace.lane_s(each) for each in ahead] + resting
        heapify(free)
        before = [*sorted(ahead, key=pace.work_s), *line]
        done_s = from_s
        for place, guest in enumerate(line):
            if place >= idle:
                first = before[place - idle]
                done_s = max(done_s, first.due) + pace.work_s(first)
            at_s = max(heappop(free), done_s, guest.due)
            heappush(free, at_s + pace.lane_s(guest))
            yield at_s * _MARGIN

    def _left(self, job: Job) -> _Guest:
        rows = len(job.context) - job.cursor if job.phase is Phase.PREFILL else 0
        return _Guest(0.0, rows, self._answer(job.remaining))

    def _answer(self, most: int) -> float:
        return min(float(most), self._turns.tokens)

    def _pace(self) -> _Pace:
        info, rate = self._info, self._costs.rows_per_s(self._settings.frame_rows)
        token_s = self._turns.token_s
        if token_s is None and rate:
            # No turn has ended yet. A step of a full ring is as many frames as stages.
            token_s = info.stages * self._costs.frames.seconds(math.ceil(info.lanes / info.stages))
        return _Pace(1.0 / rate if rate else 0.0, token_s, info.lanes)
