"""How many rows a job's verify frames have and how many of them are in flight.

Decides by two figures: how often the job's drafts were right lately, and what rows cost. Drafting must never make
a stream slower than plain decoding by more than noise, so a job whose drafts fail sends its anchor alone.
The rate is that of a geometric run of right drafts (Leviathan et al. 2023, eq. 1 and theorem 3.8), extended to
frames in flight behind one another.
"""

from __future__ import annotations

from dataclasses import dataclass

# A job begins with this rate, worth this many drafts of evidence: a first proposal is worth a try.
_PRIOR_RATE, _PRIOR_WEIGHT = 0.5, 2.0
# A rate of 1 would promise runs without end.
_BEST_RATE = 0.995
# Evidence fades, so that a change of text shows within about 20 drafts.
_FORGET = 0.95
# What a step without drafts gives back to the prior: after some 60 of them a failed drafter is tried again.
_HEAL = 0.002
# A second frame in flight must promise this much: it shares caches and memory with the first.
_LEAST_GAIN = 1.1


@dataclass(frozen=True, slots=True)
class Speculation:
    """`width` rows a frame, the anchor among them, and at most `depth` frames in flight."""

    width: int
    depth: int


class DraftTime:
    """What a drafted token costs in time: nothing where drafts are looked up, more where a model thinks."""

    def __init__(self) -> None:
        self.per_token_s = 0.0
        self._asked_at: float | None = None

    def asked(self, now: float) -> None:
        """The drafter has to think about it."""
        if self._asked_at is None:
            self._asked_at = now

    def answered(self, tokens: int, now: float) -> None:
        spent = 0.0 if self._asked_at is None else now - self._asked_at
        self._asked_at = None
        self.per_token_s += (spent / max(tokens, 1) - self.per_token_s) * (1.0 - _FORGET)


class DraftRate:
    """The chance that a job's next draft is right, given that those before it were."""

    def __init__(self) -> None:
        self._right = _PRIOR_RATE * _PRIOR_WEIGHT
        self._seen = _PRIOR_WEIGHT

    @property
    def rate(self) -> float:
        return min(self._right / self._seen, _BEST_RATE)

    def observe(self, right: int, wrong: int) -> None:
        for _ in range(right + wrong):
            self._right *= _FORGET
            self._seen *= _FORGET
        self._right += right
        self._seen += right + wrong

    def rest(self) -> None:
        """A step went by without a draft."""
        self._right += (_PRIOR_RATE * self._seen - self._right) * _HEAL


def plan_speculation(
    rate: float,
    *,
    call_rows: float,
    jobs: int,
    stages: int,
    max_width: int,
    draft_rows: float = 0.0,
) -> Speculation:
    """The best width for `jobs` decoding jobs, and depth where one job has the ring to itself.

    `rate` is below 1; `call_rows` is a frame's fixed cost in rows (costs.CostModel), `draft_rows` the
    time to draft one token, in rows that a stage computes meanwhile.
    """
    beside = max(1, -(-jobs // stages))  # jobs that share a frame
    depth = stages if jobs == 1 else 1

    def speed(width: int, depth: int) -> float:
        """Tokens in the time of one row; only ratios matter."""
        # The anchor needs no drafter; frames sent ahead of it have none.
        drafts = width - 1 if depth == 1 else width
        frame = call_rows + beside * width + draft_rows * drafts
        all_right = rate**width
        run = 1.0 / (1.0 - rate)
        confirmed = all_right / (1.0 - all_right)
        # Frames of one run: each confirmed one takes a step, or a whole round when none follows behind it.
        steps = confirmed * (stages / min(depth, stages)) + stages
        return run / (frame * steps)

    width = max(range(1, max_width + 1), key=lambda width: speed(width, depth))
    if depth > 1 and speed(width, depth) < _LEAST_GAIN * speed(width, 1):
        depth = 1
        width = max(range(1, max_width + 1), key=lambda width: speed(width, 1))
    return Speculation(width, depth)
