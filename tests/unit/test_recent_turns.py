"""The turns of late are remembered with figures and words: bounded, in order, and without a session's name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from coordinator.errors import ContextTooLong
from coordinator.requests import FinishReason, Miss, MissKind, SessionId, Timings, Usage
from gateway.observing.recent_turns import RecentTurns
from gateway.turns import TextPrompt, TurnDelta, TurnFinished, TurnRequest, TurnStarted

if TYPE_CHECKING:
    from gateway.observing.observers import TurnWatch

TURN = TurnRequest(TextPrompt("a secret"), session=SessionId("alice@example.org"))
MISS = Miss(MissKind.DIVERGED, 7, 1)
STARTED = TurnStarted(10, 6, MISS, "ring-0", 2, seed=0)


def finished(reason: FinishReason = FinishReason.STOP, calls: int = 0) -> TurnFinished:
    timings = Timings(drafted=5, accepted=3)
    return TurnFinished(reason, None, Usage(10, 6, 4), timings, calls=calls)


def run(watch: TurnWatch) -> None:
    """Asked for at 100 s, first token at 102 s, three more by 103.5 s."""
    watch.told(STARTED, 101.0)
    watch.told(TurnDelta((1,), "x"), 102.0)
    watch.told(TurnDelta((2, 3), "y"), 103.0)
    watch.told(TurnDelta((4,), "z"), 103.5)
    watch.told(TurnDelta(text="held back"), 110.0)


def test_a_turn_is_told_with_its_figures_while_it_runs_and_after() -> None:
    turns = RecentTurns(wall=lambda: 5000.0)
    watch = turns.opened(TURN, 100.0)
    (waiting,) = turns.last()
    assert (waiting.prompt_tokens, waiting.ttft_s, waiting.outcome) == (None, None, None)
    run(watch)
    (running,) = turns.last()
    assert running.outcome is None
    assert running.drafted is None
    watch.told(finished(), 103.6)
    watch.ended(None, 103.6)
    (record,) = turns.last()
    assert (record.asked_at, record.ring, record.lane) == (5000.0, "ring-0", 2)
    assert (record.prompt_tokens, record.cached_prefix, record.miss) == (10, 6, MISS)
    assert record.ttft_s == 2.0
    assert record.generated_tokens == 4
    assert record.tokens_per_s == pytest.approx(3 / 1.5), "the first one is prefill's"
    assert (record.drafted, record.accepted, record.outcome) == (5, 3, "complete")


@pytest.mark.parametrize(
    ("end", "error", "said"),
    [
        (finished(), None, "complete"),
        # The front need not read on behind the last event.
        (finished(), GeneratorExit(), "complete"),
        (finished(FinishReason.LENGTH), None, "length limit"),
        (finished(calls=2), None, "tool calls"),
        (None, GeneratorExit(), "client left"),
        (None, ContextTooLong(prompt_tokens=9, limit=8), "context length exceeded"),
        (None, KeyError("text of a bug"), "internal error"),
    ],
)
def test_how_a_turn_ended_is_said_in_words(
    end: TurnFinished | None, error: BaseException | None, said: str
) -> None:
    turns = RecentTurns()
    watch = turns.opened(TURN, 0.0)
    if end is not None:
        watch.told(end, 1.0)
    watch.ended(error, 1.0)
    assert turns.last()[0].outcome == said


def test_the_last_ones_are_kept_and_none_that_runs_is_dropped() -> None:
    turns = RecentTurns(kept=3)
    first = turns.opened(TURN, 0.0)
    for at in range(5):
        turns.opened(TURN, float(at)).ended(None, float(at))
    assert [turn.number for turn in turns.last()] == [6, 5, 1], "in the order of their asking"
    first.ended(None, 9.0)
    assert [turn.number for turn in turns.last()] == [6, 5, 1]
    turns.opened(TURN, 9.0).ended(None, 9.0)
    assert [turn.number for turn in turns.last()] == [7, 6, 1], "what ended last is kept longest"
    for _ in range(4):
        turns.opened(TURN, 10.0)
    assert [turn.number for turn in turns.last()] == [11, 10, 9]


def test_a_session_is_known_by_a_digest_that_another_process_does_not_make() -> None:
    one, same, other = RecentTurns(key=b"1"), RecentTurns(key=b"1"), RecentTurns(key=b"2")
    name = SessionId("alice@example.org")
    assert one.digest(name) == same.digest(name) != other.digest(name)
    assert one.digest(name) != one.digest(SessionId("bob@example.org"))
    assert len(one.digest(name)) == 6
    one.opened(TURN, 0.0)
    one.opened(TurnRequest(TextPrompt("x")), 0.0)
    assert [turn.session for turn in one.last()] == [None, one.digest(name)]
    assert RecentTurns().digest(SessionId("\ud800"))
