"""A lane's recurrent state can be taken up at every row that it is said to be held at, and at no other."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from coordinator.errors import BrokenInvariant
from stage.attention import RowSegment
from stage.kv.states import (
    STATE_ROWS,
    LaneStates,
    SavedState,
    StatePart,
    StateShape,
    states_nbytes,
)

CPU = torch.device("cpu")
BLOCK = 4
SHAPES = (
    StateShape((StatePart((1, 3, 2), torch.float32),), 5),
    StateShape((StatePart((1, 2), torch.bfloat16), StatePart((1, 2, 2), torch.float32)), 3),
)


def make(state_rows: int = 8, shapes: tuple[StateShape, ...] = SHAPES) -> LaneStates:
    return LaneStates(
        shapes, lanes=3, block=BLOCK, dtype=torch.bfloat16, device=CPU, state_rows=state_rows
    )


def compute(states: LaneStates, lane: int, start: int, tokens: list[int]) -> None:
    """What a recurrent layer does, with sums for a recurrence: the state is the sum of all tokens before a block."""
    end = start + len(tokens)
    states.begin([RowSegment(lane, start, len(tokens))])
    for layer in range(states.layers):
        for row, token in zip(range(start, end), tokens, strict=True):
            base = row - row % BLOCK
            rows = states.block_rows(layer, lane, base)
            rows[row - base] = token
            if row + 1 == base + BLOCK:
                added = rows[:, 0].float().sum()
                before = states.state(layer, lane, base)
                after = [part.float() + added for part in before]
                states.put_state(layer, lane, row + 1, [part.to(before[0].dtype) for part in after])


def total(states: LaneStates, layer: int, lane: int, rows: int) -> float:
    """The sum of the lane's tokens before `rows`, from its state and the rows since."""
    base = rows - rows % BLOCK
    part = states.state(layer, lane, base)[-1]
    return float(part.flatten()[0] + states.block_rows(layer, lane, base)[: rows - base, 0].sum())


def totals(states: LaneStates, lane: int, rows: int) -> list[float]:
    return [total(states, layer, lane, rows) for layer in range(states.layers)]


@pytest.mark.parametrize("seed", range(20))
def test_every_row_that_is_held_gives_the_state_of_the_tokens_before_it(seed: int) -> None:
    """Random segments, rewinds, copies, clears and restores against plain lists of tokens."""
    source, states = random.Random(seed), make()
    lanes: dict[int, list[int]] = {lane: [] for lane in range(3)}
    saved: list[tuple[SavedState, list[int]]] = []
    for _ in range(120):
        lane, other = source.sample(range(3), 2)
        rows = source.choice(states.held(lane))
        what = source.choice(["rows", "rows", "rows", "one", "copy", "clear", "save", "load"])
        if what in ("rows", "one"):
            new = [source.randrange(4) for _ in range(1 if what == "one" else source.randrange(14))]
            if new:
                compute(states, lane, rows, new)
                lanes[lane][rows:] = new
        elif what == "copy":
            states.copy(lane, other, rows)
            lanes[other] = lanes[lane][:rows]
        elif what == "clear" and source.random() < 0.3:
            states.clear(lane)
            lanes[lane] = []
        elif what == "save":
            saved.append((states.save(lane, rows), lanes[lane][:rows]))
        elif what == "load" and saved:
            state, tokens = source.choice(saved)
            states.load(lane, state.rows, state)
            lanes[lane] = list(tokens)
        for number, expected in lanes.items():
            assert states.held(number)[-1] == len(expected)
            for row in states.held(number):
                assert totals(states, number, row) == [sum(expected[:row])] * 2


def test_the_last_rows_can_be_taken_up_however_they_were_written() -> None:
    for widths in ([40], [1] * 40, [13, 27], [37, 1, 1, 1]):
        states, done = make(state_rows=8), 0
        for width in widths:
            compute(states, 0, done, [1] * width)
            done += width
            assert set(range(max(0, done - 8), done + 1)) <= set(states.held(0))


def test_a_segment_drops_what_was_held_behind_its_start() -> None:
    states = make()
    compute(states, 0, 0, [1] * 11)
    compute(states, 0, 9, [2])
    assert states.held(0)[-1] == 10
    with pytest.raises(BrokenInvariant):
        states.begin([RowSegment(0, 11, 1)])
    assert totals(states, 0, 10) == [11.0, 11.0]


@pytest.mark.parametrize("start", [3, 21, 40])
def test_a_segment_that_starts_where_no_state_is_held_changes_nothing(start: int) -> None:
    states = make()
    compute(states, 0, 0, [1] * 20)
    with pytest.raises(BrokenInvariant, match="no recurrent state"):
        states.begin([RowSegment(1, 0, 5), RowSegment(0, start, 1)])
    assert states.held(0)[-1] == 20
    assert states.held(1) == range(1)


def test_a_lane_can_always_start_again_at_row_0() -> None:
    states = make()
    compute(states, 0, 0, [3] * 30)
    compute(states, 0, 0, [1] * 6)
    assert states.held(0) == range(7)
    assert totals(states, 0, 6) == [6.0, 6.0]


def test_a_saved_state_is_a_copy_of_its_own_in_the_states_own_dtypes() -> None:
    states = make()
    compute(states, 0, 0, [1] * 10)
    saved = states.save(0, 10)
    assert [(tuple(t.shape), t.dtype) for t in saved.tensors] == list(states.layout(10))
    assert all(tensor.is_contiguous() for tensor in saved.tensors)
    assert saved.nbytes <= states.state_nbytes
    compute(states, 0, 10, [3] * 20)
    states.load(2, 10, saved)
    assert totals(states, 2, 10) == [10.0, 10.0]
    assert list(states.held(2)) == [8, 9, 10]


def test_a_state_of_another_row_or_model_is_not_loaded() -> None:
    states, others = make(), make(shapes=SHAPES[:1])
    compute(states, 0, 0, [1] * 10)
    saved = states.save(0, 10)
    with pytest.raises(ValueError, match="is not one"):
        states.load(1, 9, saved)
    with pytest.raises(ValueError, match="is not one"):
        others.load(1, 10, saved)
    assert states.held(1) == range(1)
    with pytest.raises(BrokenInvariant):
        states.save(0, 11)
    with pytest.raises(BrokenInvariant):
        states.copy(0, 1, 11)


def test_what_one_conversation_left_in_a_lane_is_gone_for_the_next_one() -> None:
    states = make()
    compute(states, 0, 0, [1] * 7)
    for layer in range(2):
        states.block_rows(layer, 0, 4).fill_(float("nan"))
    states.clear(0)
    assert totals(states, 0, 0) == [0.0, 0.0]
    compute(states, 0, 0, [1])
    for tensor in all_tensors(states, 0):
        assert tensor.isfinite().all()


def all_tensors(states: LaneStates, lane: int) -> list[Tensor]:
    bases = [0, 4, 8]
    rows = [states.block_rows(layer, lane, base) for layer in range(2) for base in bases]
    parts = [states.state(layer, lane, base) for layer in range(2) for base in bases]
    return [*rows, *(part for group in parts for part in group)]


def test_a_stage_without_recurrent_layers_holds_every_row_and_keeps_nothing() -> None:
    states = make(shapes=())
    states.begin([RowSegment(0, 5000, 3)])
    assert 123_456 in states.held(0)
    states.copy(0, 1, 300)
    states.clear(0)
    saved = states.save(0, 77)
    assert saved == SavedState(77, ())
    states.load(1, 77, saved)
    assert states.state_nbytes == 0


@pytest.mark.parametrize("state_rows", [0, 3, 4, 5, STATE_ROWS])
def test_the_predicted_size_is_the_allocated_one(state_rows: int) -> None:
    states = make(state_rows=state_rows)
    allocated = sum(t.nbytes for group in (states._rows, *states._parts) for t in group)
    sizes = {"lanes": 3, "block": BLOCK, "state_rows": state_rows}
    assert allocated == states_nbytes(SHAPES, dtype=torch.bfloat16, **sizes)
