"""What a draft model knows of its jobs: their texts, which lane holds whose rows, and what is being thought.

Decides which lane a job gets and how many rows one call of catching up takes. Plain state without a lock, a thread or a
tensor: draft_model.py brings those. A lane's tokens say what its rows hold, whoever wrote them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from coordinator.prefixes import common_prefix

# A job waits at most for one call of catching up before its own thought begins: a call that took longer than this
# makes the next one smaller. About a decode step of a large model.
_CALL_S = 0.05
_LEAST_ROWS, _FIRST_ROWS, _MOST_ROWS = 16, 64, 512
# A lane is taken from a job only after so many questions of others: jobs that took turns in one lane would prefill
# for ever and never draft.
PATIENCE = 64


@dataclass(slots=True, eq=False)
class Thought:
    """The context's first `base` tokens and, behind them, `tail`: a guess and what is proposed behind it."""

    base: int
    tail: list[int]
    asked: int  # proposals are tail[asked:]
    limit: int  # how many are wanted; 0: only catch up, nobody waits
    thinking: bool = True

    @property
    def length(self) -> int:
        return self.base + len(self.tail)

    @property
    def satisfied(self) -> bool:
        return len(self.tail) - self.asked >= self.limit

    def covers(self, line: Sequence[int]) -> bool:
        """Whether `line`, behind the base, is what this thought assumed or proposed."""
        return self.tail[: len(line)] == line

    def go_on(self, base: int, asked: int, limit: int) -> None:
        """The context has grown along the tail, up to `base`."""
        del self.tail[: base - self.base]
        self.base, self.asked, self.limit = base, asked, limit


@dataclass(slots=True, eq=False)
class DraftLane:
    """`tokens`: the token in each row, all of one tenant's jobs. `agreed`: how many of them are known to be the owner's
    context.
    """

    number: int
    tenant: str = ""
    tokens: list[int] = field(default_factory=list)
    owner: DraftJob | None = None
    agreed: int = 0
    used_at: int = 0

    def holds_of(self, job: DraftJob) -> int:
        """How many of the job's first rows may be gone on from here: another tenant's are none."""
        return common_prefix(self.tokens, job.context) if self.tenant == job.tenant else 0

    def agree(self, context: Sequence[int]) -> int:
        """Counts on: what a context holds never changes, it only grows."""
        end = min(len(self.tokens), len(context))
        while self.agreed < end and self.tokens[self.agreed] == context[self.agreed]:
            self.agreed += 1
        return self.agreed

    def write(self, start: int, tokens: Sequence[int]) -> None:
        """Rows behind the written ones were computed from other rows: they are void."""
        self.tokens[start:] = tokens


@dataclass(slots=True, eq=False)
class DraftJob:
    wake: Callable[[], object]
    tenant: str = ""  # as in coordinator.requests.Request
    context: list[int] = field(default_factory=list)
    thought: Thought | None = None
    lane: DraftLane | None = None

    @property
    def waited_for(self) -> bool:
        return self.thought is not None and self.thought.limit > 0

    def unseat(self) -> None:
        if self.lane is not None:
            self.lane.owner, self.lane = None, None

    def behind(self) -> int | None:
        """Rows of the context that its lane lacks; None without a lane."""
        return None if self.lane is None else len(self.context) - self.lane.agree(self.context)

    def next_part(self, most: int | None) -> DraftPart | None:
        """At most so many of the rows that its thought needs next; None when it needs none."""
        thought, lane = self.thought, self.lane
        assert thought is not None
        assert lane is not None
        start = lane.agree(self.context)
        if start >= thought.base:
            start = thought.base + common_prefix(lane.tokens[thought.base :], thought.tail)
        if thought.limit:
            # What follows is read off the last row, so that one is computed again.
            start = min(start, thought.length - 1)
        end = thought.length if most is None else min(thought.length, start + most)
        if start >= end:
            return None
        asks = thought.limit > 0 and end == thought.length
        return DraftPart(self, thought, lane, start, self._text(thought, start, end), asks)

    def _text(self, thought: Thought, start: int, end: int) -> tuple[int, ...]:
        base = thought.base
        behind = thought.tail[max(start - base, 0) : max(end - base, 0)]
        return (*self.context[start : min(base, end)], *behind)


@dataclass(frozen=True, slots=True)
class DraftPart:
    """A job's rows in one call; `asks`: its last row says what comes next."""

    job: DraftJob
    thought: Thought
    lane: DraftLane
    start: int
    tokens: tuple[int, ...]
    asks: bool


class DraftLanes:
    """Who holds which lane. A lane that a job gave back keeps its rows for the next turn."""

    def __init__(self, lanes: int) -> None:
        self._lanes = [DraftLane(number) for number in range(lanes)]
        self._asks = 0

    @property
    def idle(self) -> int:
        return sum(lane.owner is None for lane in self._lanes)

    def note_ask(self, job: DraftJob) -> None:
        self._asks += 1
        if job.lane is not None:
            job.lane.used_at = self._asks

    def seat(self, job: DraftJob, busy: Container[DraftJob]) -> bool:
        """Finds it a lane: the free one with most of its rows, or that of a job that has not asked for long."""
        if job.lane is not None:
            return True
        free = [lane for lane in self._lanes if lane.owner is None] or self._vacate(busy)
        if not free:
            return False
        rated = [(lane.holds_of(job), -lane.used_at, lane) for lane in free]
        depth, _, lane = max(rated, key=lambda each: each[:2])
        if lane.tenant != job.tenant:
            lane.tenant = job.tenant
            lane.tokens.clear()
        lane.owner, lane.agreed, lane.used_at, job.lane = job, depth, self._asks, lane
        return True

    def _vacate(self, busy: Container[DraftJob]) -> list[DraftLane]:
        lane = min(
            (lane for lane in self._lanes if lane.owner not in busy),
            key=lambda lane: lane.used_at,
            default=None,
        )
        if lane is None or lane.owner is None or self._asks - lane.used_at <= PATIENCE:
            return []
        lane.owner.unseat()
        return [lane]


class Pace:
    """How many rows of catching up one call takes, so that it takes about _CALL_S."""

    def __init__(self) -> None:
        self.rows = _FIRST_ROWS

    def took(self, rows: int, seconds: float) -> None:
        if seconds > _CALL_S:
            self.rows = max(self.rows // 2, _LEAST_ROWS)
        elif rows >= self.rows and seconds < _CALL_S / 2:
            self.rows = min(self.rows * 2, _MOST_ROWS)
