"""What a draft model reuses, drops and shares: bookkeeping, over rows whose every token shows in what is proposed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from coordinator.drafters import Drafter
from coordinator.drafters.first_of import first_of
from coordinator.frames import JobId
from stage.draft_lanes import PATIENCE, Pace
from stage.draft_model import DraftModel
from stage.model.slice import ModelSlice, RowBatch, SliceOutput

_VOCABULARY = 199


def _prompt(n: int, length: int = 40) -> tuple[int, ...]:
    return tuple((7 + 31 * n + 13 * k * k) % _VOCABULARY for k in range(length))


@dataclass
class _Call:
    lanes: list[int]
    widths: list[int]


class _HashSlice:
    """Proposes a hash of the tokens in the rows it reads. Holds each call until it is let through."""

    def __init__(self, lanes: int, max_rows: int = 4096) -> None:
        self.rows = SimpleNamespace(lanes=lanes, max_rows=max_rows)
        self.calls: list[_Call] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self._held: list[list[int]] = [[] for _ in range(lanes)]

    def forward(self, batch: RowBatch) -> SliceOutput:
        self.calls.append(
            _Call([s.lane for s in batch.segments], [s.width for s in batch.segments])
        )
        self.entered.release()
        assert self.gate.wait(30)
        said, offset = [], 0
        for segment in batch.segments:
            rows = self._held[segment.lane]
            assert segment.start <= len(rows), "a gap"
            rows[segment.start :] = batch.token_ids[offset : offset + segment.width]
            offset += segment.width
            if offset - 1 in batch.asked:
                said.append(_next(rows))
        logits = torch.zeros((len(said), _VOCABULARY))
        for row, token in enumerate(said):
            logits[row, token] = 1.0
        return SliceOutput(logits=logits)


def _next(text: Sequence[int]) -> int:
    return hash(tuple(text)) % _VOCABULARY


def _line(text: Sequence[int], count: int) -> tuple[int, ...]:
    rows = list(text)
    for _ in range(count):
        rows.append(_next(rows))
    return tuple(rows[len(text) :])


class _Watched(DraftModel):
    """Counts its steps. A job that was told to wait without being woken is looked after by one more step."""

    def __init__(self, model: ModelSlice) -> None:
        self.stepped = threading.Semaphore(0)
        super().__init__(model)

    def _step(self) -> bool:
        going_on = super()._step()
        self.stepped.release()
        return going_on


class _Asker:
    """A job's drafter, and what its driver would do: wait to be woken, then ask again."""

    def __init__(self, model: _Watched, prompt: Sequence[int], tenant: str = "") -> None:
        self.model = model
        self.woken = threading.Semaphore(0)
        self.drafter: Drafter = model.drafter(JobId(0), self.woken.release, tenant)
        self.drafter.extend(prompt)

    def draft(self, guess: Sequence[int], limit: int) -> tuple[int, ...]:
        answer = self.drafter.draft(guess, limit)
        while answer is None:
            assert self.woken.acquire(timeout=30)
            answer = self.drafter.draft(guess, limit)
        return answer

    def caught_up(self, limit: int = 4) -> tuple[int, ...]:
        """Asks once more after each step of the model, until it proposes."""
        while not (answer := self.draft((), limit)):
            assert self.model.stepped.acquire(timeout=30)
        return answer


@contextmanager
def _hashing(lanes: int, max_rows: int = 4096) -> Iterator[tuple[_HashSlice, _Watched]]:
    slice_ = _HashSlice(lanes, max_rows)
    model = _Watched(slice_)  # type: ignore[arg-type]
    try:
        yield slice_, model
    finally:
        slice_.gate.set()
        model.close()


def test_proposals_continue_the_context_and_the_guess_whatever_was_rejected() -> None:
    with _hashing(1) as (slice_, model):
        text = list(_prompt(0))
        job = _Asker(model, text)
        assert job.caught_up() == _line(text, 4)
        right = _line(text, 6)
        assert job.draft(right[:4], 5) == _line([*text, *right[:4]], 5)
        for wrong in (1, 3, 0):
            confirmed = [*_line(text, wrong), 5]
            job.drafter.extend(confirmed)
            text += confirmed
            assert job.draft((), 3) == _line(text, 3)
            assert job.draft((9, 8), 3) == _line([*text, 9, 8], 3)


def test_a_thought_goes_on_when_its_own_guess_is_confirmed() -> None:
    with _hashing(1) as (slice_, model):
        text = list(_prompt(0))
        job = _Asker(model, text)
        job.caught_up()
        ahead = _line(text, 8)
        assert job.draft(ahead[:4], 4) == ahead[4:]
        before = len(slice_.calls)
        job.drafter.extend(ahead[:2])
        assert job.drafter.draft(ahead[2:4], 4) == ahead[4:]
        assert job.drafter.draft(ahead[2:6], 2) == ahead[6:]
        assert len(slice_.calls) == before
        job.drafter.extend(ahead[2:])
        assert job.draft((), 3) == _line([*text, *ahead], 3)


def test_rows_behind_a_rewritten_one_are_not_taken_for_good() -> None:
    with _hashing(1) as (_, model):
        text = list(_prompt(0))
        job = _Asker(model, text)
        job.caught_up()
        assert job.draft((1, 2, 3), 1)
        job.drafter.extend((9,))
        assert job.draft((), 1)
        job.drafter.extend((2, 3))
        assert job.draft((), 1) == _line([*text, 9, 2, 3], 1)


def test_a_stale_answer_is_dropped() -> None:
    with _hashing(1) as (slice_, model):
        text = list(_prompt(0))
        job = _Asker(model, text)
        job.caught_up()
        slice_.gate.clear()
        assert job.drafter.draft((1, 2), 4) is None
        job.drafter.extend((3,))
        assert job.drafter.draft((), 4) is None
        slice_.gate.set()
        assert job.draft((), 4) == _line([*text, 3], 4)


def test_a_long_context_is_caught_up_in_chunks_and_holds_nobody_up() -> None:
    with _hashing(2) as (slice_, model):
        quick, long = _Asker(model, _prompt(0)), _Asker(model, _prompt(1, 2000))
        quick.caught_up()
        slice_.gate.clear()
        before = len(slice_.calls)
        assert long.drafter.draft((), 4) == ()
        assert slice_.entered.acquire(timeout=30)
        assert quick.drafter.draft((1,), 4) is None
        slice_.gate.set()
        assert quick.draft((1,), 4) == _line([*_prompt(0), 1], 4)
        assert long.caught_up() == _line(_prompt(1, 2000), 4)
    chunks = [max(call.widths) for call in slice_.calls[before:]]
    assert max(chunks) <= 512
    assert any(len(call.lanes) == 2 for call in slice_.calls[before:])


@pytest.mark.parametrize("lanes", [1, 2])
def test_rows_of_one_tenants_jobs_are_nothing_to_anothers(lanes: int) -> None:
    """How soon drafts come, and how many, would tell him what the other asked."""
    rows = []
    with _hashing(lanes) as (slice_, model):
        for tenant in ("a", "a", "b", "", "b", "a"):
            before = len(slice_.calls)
            job = _Asker(model, _prompt(0), tenant)
            assert job.caught_up() == _line(_prompt(0), 4)
            job.drafter.close()
            rows.append(sum(slice_.calls[before].widths))
    whole = len(_prompt(0))
    kept = 1 if lanes == 2 else whole
    assert rows == [whole, 1, whole, whole, kept, whole]


def test_a_slow_model_catches_up_in_smaller_chunks() -> None:
    pace = Pace()
    first = pace.rows
    pace.took(first, 1.0)
    assert pace.rows < first
    for _ in range(9):
        pace.took(pace.rows, 1.0)
    assert pace.rows >= 16
    for _ in range(9):
        pace.took(pace.rows, 0.001)
    assert pace.rows > first


def test_the_next_turn_finds_its_rows_where_the_last_one_left_them() -> None:
    with _hashing(2) as (slice_, model):
        text = _prompt(0, 300)
        for prompt in (text, _prompt(1, 300)):
            job = _Asker(model, prompt)
            job.caught_up()
            job.drafter.close()
        before = len(slice_.calls)
        turn = _Asker(model, (*text, 4, 4))
        assert turn.caught_up() == _line((*text, 4, 4), 4)
    assert sum(sum(call.widths) for call in slice_.calls[before:]) < 20


def test_without_a_free_lane_a_job_goes_without_until_another_has_been_quiet_for_long() -> None:
    with _hashing(1) as (slice_, model):
        first, second = _Asker(model, _prompt(0)), _Asker(model, _prompt(1))
        first.caught_up()
        for _ in range(PATIENCE):
            assert second.drafter.draft((), 4) == ()
            assert model.stepped.acquire(timeout=30)
        assert first.draft((), 4) == _line(_prompt(0), 4)
        for _ in range(PATIENCE):
            assert second.drafter.draft((), 4) == ()
        assert second.caught_up() == _line(_prompt(1), 4)
        # Robbed of its lane, it starts over once the other one has ended.
        second.drafter.close()
        assert first.caught_up() == _line(_prompt(0), 4)


def test_nothing_is_proposed_beyond_the_draft_models_rows() -> None:
    with _hashing(1, max_rows=42) as (slice_, model):
        job = _Asker(model, _prompt(0, 40))
        assert job.caught_up(9) == _line(_prompt(0, 40), 3)
        assert job.drafter.draft((1, 2, 3), 9) == ()


def test_whoever_waits_when_the_model_is_closed_is_woken() -> None:
    with _hashing(1) as (slice_, model):
        job = _Asker(model, _prompt(0))
        job.caught_up()
        slice_.gate.clear()
        assert job.drafter.draft((1,), 4) is None
        closing = threading.Thread(target=model.close)
        closing.start()
        slice_.gate.set()
        closing.join()
        assert job.woken.acquire(timeout=30)
        assert job.drafter.draft((1,), 4) == ()


# Several drafters as one


class _Scripted:
    def __init__(self, answer: tuple[int, ...] | None) -> None:
        self.answer = answer
        self.told: list[object] = []

    def extend(self, tokens: Sequence[int]) -> None:
        self.told.append(tuple(tokens))

    def draft(self, guess: Sequence[int], limit: int) -> tuple[int, ...] | None:
        self.told.append((tuple(guess), limit))
        return self.answer

    def close(self) -> None:
        self.told.append("closed")


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [((1,), (2,), (1,)), ((), (2,), (2,)), ((), None, None), (None, (2,), None), ((), (), ())],
)
def test_the_first_drafter_with_an_idea_is_heard(first, second, said) -> None:
    drafters = [_Scripted(first), _Scripted(second)]
    made = iter(drafters)
    both = first_of(*[lambda *_: next(made)] * 2)(JobId(1), lambda: None, "")
    both.extend((4, 5))
    assert both.draft((6,), 3) == said
    both.close()
    assert drafters[0].told == [(4, 5), ((6,), 3), "closed"]
    assert drafters[1].told == [(4, 5), *([((6,), 3)] if first == () else []), "closed"]
