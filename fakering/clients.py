"""The clients of a simulation: what they have asked, what they were told, and what they should have been told.

Holds every stream against the oracle. Raises Breach; it decides nothing and knows neither ring nor time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from coordinator.errors import (
    Cancelled,
    ConstraintFailed,
    RingserveError,
    RingUnavailable,
    StageLost,
)
from coordinator.foresight import Wish
from coordinator.frames import Frame, JobId, SegmentKind
from coordinator.requests import (
    Finished,
    JobEvent,
    Recovering,
    Request,
    Started,
    TokenDelta,
)
from fakering.model import FakeModel
from fakering.plan import PlannedJob
from fakering.toys import ToyConstraint
from fakering.truth import require


@dataclass(slots=True)
class PlayedJob:
    """What became of it."""

    request: Request
    expected: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    started: Started | None = None
    finished: Finished | None = None
    error: RingserveError | None = None
    recoveries: int = 0  # how often it was told that its ring heals
    paused: bool = False  # its client reads nothing
    in_vain: int = 0  # of these, since its last token

    @property
    def ended(self) -> bool:
        return self.finished is not None or self.error is not None

    @property
    def context(self) -> tuple[int, ...]:
        return (*self.request.prompt, *self.tokens)


class Clients:
    def __init__(
        self,
        plan: Sequence[PlannedJob],
        model: FakeModel,
        max_rows: int,
        end_tokens: frozenset[int],
        most_losses: int,
    ) -> None:
        """`most_losses`: how often a job may lose its ring until it has another token."""
        self.jobs: dict[JobId, PlayedJob] = {}
        self._plan = plan
        self._model = model
        self._max_rows = max_rows
        self._end_tokens = end_tokens
        self._most_losses = most_losses

    def waits(self, job: JobId) -> bool:
        """A client sends its next turn when the last one has ended."""
        follows = self._plan[job].follows
        earlier = None if follows is None else self.jobs.get(JobId(follows))
        return follows is not None and (earlier is None or not earlier.ended)

    def ask(self, job: JobId) -> Request:
        follows = self._plan[job].follows
        earlier = None if follows is None else self.jobs[JobId(follows)]
        before = None if earlier is None else earlier.request
        answer = () if earlier is None else earlier.tokens
        request = self._plan[job].request(before, answer, self._end_tokens)
        self.jobs[job] = PlayedJob(request, self._oracle(request))
        return request

    def _oracle(self, request: Request) -> tuple[int, ...]:
        count = min(request.max_new_tokens, self._max_rows - len(request.prompt))
        toy = request.constraint
        if isinstance(toy, ToyConstraint) and toy.fails_at is not None:
            count = min(count, toy.fails_at)
            toy = replace(toy, fails_at=None)
        return self._model.oracle(request.prompt, count, request.sampling, self._end_tokens, toy)

    def wish(self, job: JobId) -> Wish | None:
        """What its session's next prompt is known to begin with, now that it has finished."""
        planned, played = self._plan[job], self.jobs[job]
        if planned.next_keeps is None or played.request.session is None:
            return None
        tokens = (*played.context[: planned.next_keeps], *planned.next_adds)
        return Wish(played.request.session, tokens, tenant=planned.tenant) if tokens else None

    def tell(self, job: JobId, event: JobEvent) -> None:
        played = self.jobs[job]
        require(not played.ended, f"job {job}: an event behind the end")
        match event:
            case Started():
                require(played.started is None, f"job {job} started twice")
                played.started = event
            case TokenDelta(tokens, _):
                require(played.started is not None, f"job {job}: tokens before its start")
                played.tokens.extend(tokens)
                played.in_vain = 0
            case Recovering():
                played.recoveries += 1
                played.in_vain += 1
                require(played.in_vain <= self._most_losses, f"job {job} is lost for ever")
            case Finished():
                played.finished = event
        self._check(job, played)

    def served(self, frame: Frame) -> None:
        """Whose reader lags gets no more tokens than are on their way."""
        for segment in frame.segments:
            played = self.jobs.get(segment.job)
            rests = played is not None and played.paused and segment.kind is SegmentKind.VERIFY
            require(not rests, f"job {segment.job} rests, and gets rows")

    def fail(self, job: JobId, error: RingserveError, *, is_down: bool) -> None:
        """`is_down`: the ring was given up."""
        played = self.jobs[job]
        require(not played.ended, f"job {job} fails behind its end")
        may = isinstance(error, Cancelled | ConstraintFailed)
        if isinstance(error, StageLost):
            may = is_down or played.in_vain == self._most_losses
        require(may, f"job {job} fails: {type(error).__name__}: {error}")
        played.error = error
        self._check(job, played)

    def desert(self) -> None:
        """Who served them is gone."""
        for played in self.jobs.values():
            if not played.ended:
                played.error = RingUnavailable("its coordinator is gone")

    def _check(self, job: JobId, played: PlayedJob) -> None:
        got, expected = tuple(played.tokens), played.expected
        require(got == expected[: len(got)], f"job {job}: wrong tokens: {got} for {expected}")
        require(played.finished is None or got == expected, f"job {job} finished early")
        if isinstance(played.error, ConstraintFailed):
            require(got == expected, f"job {job}: a constraint failed early")
