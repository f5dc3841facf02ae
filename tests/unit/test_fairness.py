"""Who is next for a lane: fair between sessions, by weight, and nobody gets to the front by leaving and coming back."""

from __future__ import annotations

from collections import Counter, deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coordinator.drafters.none import NoDrafter
from coordinator.fairness import FairQueue
from coordinator.frames import JobId
from coordinator.jobs import Job
from coordinator.requests import Request, SessionId


def _job(number: int, session: str | None = None, priority: int = 0) -> Job:
    owner = None if session is None else SessionId(session)
    request = Request((1,), session=owner, priority=priority)
    return Job(JobId(number), request, 0.0, 8, NoDrafter())


def _first(queue: FairQueue) -> Job | None:
    return next(queue.heads(), None)


def _pop(queue: FairQueue) -> Job:
    job = _first(queue)
    assert job is not None
    queue.take(job)
    return job


def _fill(queue: FairQueue, session: str | None, numbers: range, priority: int = 0) -> None:
    for number in numbers:
        queue.push(_job(number, session, priority))


def _served(queue: FairQueue, count: int) -> list[str]:
    return [str(_pop(queue).request.session) for _ in range(count)]


def test_within_a_session_first_come_is_first_served() -> None:
    queue = FairQueue()
    _fill(queue, "a", range(5))
    assert [job.id for job in queue] == [0, 1, 2, 3, 4]
    assert [_pop(queue).id for _ in range(5)] == [0, 1, 2, 3, 4]
    assert len(queue) == 0


def test_a_session_that_floods_the_queue_does_not_starve_another() -> None:
    queue = FairQueue()
    _fill(queue, "flood", range(20))
    assert _served(queue, 3) == ["flood"] * 3
    _fill(queue, "other", range(20, 24))
    assert Counter(_served(queue, 8)) == {"flood": 4, "other": 4}


@pytest.mark.parametrize(("priority", "share"), [(0, 1), (1, 2), (2, 4), (3, 8)])
def test_a_step_of_priority_is_twice_the_share(priority: int, share: int) -> None:
    queue = FairQueue()
    _fill(queue, "heavy", range(100), priority)
    _fill(queue, "light", range(100, 200))
    got = Counter(_served(queue, 5 * (share + 1)))
    assert abs(got["heavy"] - 5 * share) <= 1


def test_the_lowest_priority_is_served_less_and_not_never() -> None:
    queue = FairQueue()
    _fill(queue, "low", range(2), priority=-2)
    _fill(queue, "plain", range(10, 40))
    assert Counter(_served(queue, 10))["low"] == 2


def test_jobs_that_had_a_lane_come_first_and_in_their_order() -> None:
    queue = FairQueue()
    _fill(queue, "a", range(3))
    had = [_pop(queue), _pop(queue)]
    for job in reversed(had):  # as the scheduler gives them back when an epoch ends
        queue.push_front(job)
    assert _first(queue) is had[0]
    assert [_pop(queue).id for _ in range(3)] == [0, 1, 2]


def test_leaving_and_coming_back_is_no_way_to_the_front() -> None:
    queue = FairQueue()
    _fill(queue, "greedy", range(3))
    _served(queue, 2)
    _fill(queue, "patient", range(10, 40))
    got: Counter[str] = Counter()
    for number in range(100, 120):
        # Before each turn it takes back all that it waits with, and asks anew.
        for job in [job for job in queue if job.request.session == "greedy"]:
            queue.remove(job.id)
        queue.push(_job(number, "greedy"))
        got.update(_served(queue, 1))
    assert got["greedy"] <= got["patient"] + 2


def test_a_job_is_taken_out_wherever_it_waits() -> None:
    queue = FairQueue()
    _fill(queue, "a", range(3))
    queue.push_front(_pop(queue))
    for number in (1, 0, 2):
        job = queue.remove(JobId(number))
        assert job is not None
        assert job.id == number
    assert queue.remove(JobId(1)) is None
    assert (len(queue), list(queue), _first(queue)) == (0, [], None)


def test_a_cleared_queue_holds_nobody() -> None:
    queue = FairQueue()
    _fill(queue, "a", range(3))
    queue.push_front(_pop(queue))
    queue.clear()
    assert (len(queue), _first(queue)) == (0, None)


@pytest.mark.parametrize("waiting", [1, 3])
def test_newcomers_without_end_do_not_starve_a_session(waiting: int) -> None:
    queue = FairQueue()
    _fill(queue, "patient", range(2))
    _fill(queue, None, range(10, 10 + waiting))
    for number in range(100, 100 + 10 * (waiting + 1)):
        queue.push(_job(number))
        if _pop(queue).id == 1:
            return
    pytest.fail("the second job of the session was never served")


def test_jobs_that_were_served_leave_nothing_behind() -> None:
    queue = FairQueue()
    for number in range(500):
        queue.push(_job(number))
        _pop(queue)
    assert len(queue) == 0
    assert len(queue._lines) < 10  # what it remembers is not to be seen from outside


class FairQueueMachine(RuleBasedStateMachine):
    """Against lists that forget nothing. Sessions that tie may be served in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue()
        self.resumed: deque[Job] = deque()
        self.lines: dict[str, list[Job]] = {}
        self.starts: dict[str, float] = {}
        self.out: list[Job] = []
        self.now = 0.0
        self.number = 0

    def _waiting(self) -> list[Job]:
        return [*self.resumed, *(job for line in self.lines.values() for job in line)]

    @rule(session=st.sampled_from("abc"), priority=st.integers(-2, 2))
    def push(self, session: str, priority: int) -> None:
        job = _job(self.number, session, priority)
        self.number += 1
        self.queue.push(job)
        if not self.lines.get(session):
            # Time spent away earns nothing.
            self.starts[session] = self.now
        self.lines.setdefault(session, []).append(job)

    @precondition(lambda self: self._waiting())
    @rule()
    def pop(self) -> None:
        first, job = _first(self.queue), _pop(self.queue)
        assert first is job
        self.out.append(job)
        if self.resumed:
            assert job is self.resumed.popleft()
            return
        session = str(job.request.session)
        assert job is self.lines[session].pop(0)
        finish = self._finish(session, job)
        rest = [(name, line) for name, line in self.lines.items() if line and name != session]
        others = [self._finish(name, line[0]) for name, line in rest]
        assert finish <= min(others, default=finish)
        self.starts[session] = self.now = max(self.now, finish)

    def _finish(self, session: str, job: Job) -> float:
        return self.starts[session] + 2.0**-job.request.priority

    @precondition(lambda self: self.out)
    @rule()
    def give_back(self) -> None:
        job = self.out.pop()
        self.queue.push_front(job)
        self.resumed.appendleft(job)

    @precondition(lambda self: self._waiting())
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self._waiting()))
        assert self.queue.remove(job.id) is job
        for jobs in (self.resumed, *self.lines.values()):
            if job in jobs:
                jobs.remove(job)

    @invariant()
    def holds_the_same_jobs(self) -> None:
        assert len(self.queue) == len(self._waiting())
        assert {job.id for job in self.queue} == {job.id for job in self._waiting()}


FairQueueMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)
TestFairQueueAgainstANaiveModel = FairQueueMachine.TestCase
