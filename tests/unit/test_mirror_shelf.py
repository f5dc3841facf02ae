"""What a neighbour keeps is what the stage keeps, whatever it stores and drops, and never more bytes than it may."""

from __future__ import annotations

import gc
import logging
import weakref
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stage.kv.mirror import Key, MirrorShelf, Record
from stage.kv.node_file import ROWS, STATE, FileKind
from stage.kv.outbox import Outbox
from tests.unit.mirror_rig import (
    KINDS,
    PLENTY,
    ROW_BYTES,
    KeepingStage,
    chain,
    empty,
    hear,
    shelved,
    told,
)

BUDGET = 12 * ROW_BYTES
NODES = [*chain((1, 2, 3)), *chain((2, 2), first=50)]
HOLDS = st.sampled_from([ROWS, STATE])


class Mirroring(RuleBasedStateMachine):
    """A stage, its neighbour, and the way between them: a queue that a new wiring empties."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = BUDGET
        self.begin_stage()
        self.shelf = MirrorShelf(BUDGET)
        self.way: list[Record | tuple[Key, ...]] = []
        self.wire()

    def begin_stage(self) -> None:
        self.stage = KeepingStage(Outbox(), BUDGET)

    def wire(self) -> None:
        self.way.clear()
        self.stage.outbox.reconcile(self.shelf.for_giving())

    @rule(node=st.sampled_from(NODES), holds=HOLDS)
    def keep(self, node, holds: str) -> None:
        self.stage.keep(node, holds)

    @rule(node=st.sampled_from(NODES), holds=HOLDS)
    def drop(self, node, holds: str) -> None:
        self.stage.drop(node, holds)

    @rule(node=st.sampled_from(NODES), holds=HOLDS)
    def forget(self, node, holds: str) -> None:
        self.stage.stores[holds].forget([node.id])

    @rule(count=st.integers(1, 4))
    def send(self, count: int) -> None:
        self.way.extend(islice(told(self.stage.outbox), count))

    @precondition(lambda self: self.way)
    @rule(count=st.integers(1, 4))
    def arrive(self, count: int) -> None:
        for said in self.way[:count]:
            hear(self.shelf, said)
        del self.way[:count]

    @rule()
    def wire_anew(self) -> None:
        """What was on its way is lost."""
        self.wire()

    @rule()
    def replace_the_neighbour(self) -> None:
        self.shelf = MirrorShelf(BUDGET)
        self.wire()

    @rule()
    def replace_the_stage(self) -> None:
        """The new one has what the neighbour had, and nothing else."""
        mirrored = shelved(self.shelf)
        self.begin_stage()
        for key in self.shelf.for_giving():
            record = self.shelf.get(key)
            assert record is not None
            assert self.stage.lacks(key)
            assert self.stage.take_back(record)
            self.stage.outbox.came_from_there(record)
        assert self.stage.contents == mirrored
        # Its numbers go on behind those of the one before it.
        self.stage.kept = 10**6 + len(mirrored)
        self.wire()

    @rule()
    def come_to_rest(self) -> None:
        self.way.extend(told(self.stage.outbox))
        for said in self.way:
            hear(self.shelf, said)
            self.never_too_much()
        self.way.clear()
        assert shelved(self.shelf) == self.stage.contents

    @invariant()
    def never_too_much(self) -> None:
        assert self.shelf.nbytes == sum(map(len, shelved(self.shelf).values())) <= BUDGET


TestMirroring = Mirroring.TestCase
TestMirroring.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def mirrored(*nodes, holds: str = ROWS) -> tuple[KeepingStage, MirrorShelf]:
    stage, shelf = KeepingStage(Outbox()), MirrorShelf(PLENTY)
    for node in nodes:
        assert stage.keep(node, holds)
    for said in told(stage.outbox):
        hear(shelf, said)
    return stage, shelf


def given(shelf: MirrorShelf, key: Key) -> Record:
    record = shelf.get(key)
    assert record is not None
    return record


def flipped(data: bytes | bytearray | memoryview, place: int) -> bytes:
    out = bytearray(data)
    out[place] ^= 1
    return bytes(out)


@pytest.mark.parametrize("holds", [ROWS, STATE])
def test_no_damaged_byte_is_taken_back(holds: str, caplog: pytest.LogCaptureFixture) -> None:
    node = NODES[2]
    _, shelf = mirrored(node, holds=holds)
    record = given(shelf, (node.id, holds))
    caplog.set_level(logging.ERROR)  # a line for each would be many
    new = KeepingStage(Outbox())
    for place in range(len(record.head)):
        assert not new.take_back(replace(record, head=flipped(record.head, place)))
    for place in range(len(record.payload)):
        assert not new.take_back(replace(record, payload=flipped(record.payload, place)))
    for short in (replace(record, head=record.head[:-1]), replace(record, payload=b"")):
        assert not new.take_back(short)
    assert new.contents == {}
    assert new.take_back(record)


OTHERS = {
    "another model": {"fingerprint": "other"},
    "other layers": {"first": 1},
    "another dtype": {"dtype": "bfloat16"},
    "other heads": {"shapes": ((2, 2, 2),)},
    "another way of computing": {"recipe": "fast"},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_what_another_stage_would_have_computed_is_not_taken_back(
    other: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    _, shelf = mirrored(NODES[0])
    kinds: list[FileKind] = [replace(kind, **other) for kind in KINDS]
    new = KeepingStage(Outbox(), kinds=kinds)
    assert not new.take_back(given(shelf, (NODES[0].id, ROWS)))
    assert new.contents == {}
    assert "missed a mirrored node" in caplog.text


def test_a_record_under_another_nodes_name_is_not_taken_back() -> None:
    _, shelf = mirrored(*NODES[:2])
    record = given(shelf, (NODES[0].id, ROWS))
    new = KeepingStage(Outbox())
    assert not new.take_back(replace(record, node=NODES[1].id))
    assert new.contents == {}


def test_what_finds_no_room_is_not_taken_back_and_the_rest_is() -> None:
    _, shelf = mirrored(*NODES)
    new = KeepingStage(Outbox(), budget=BUDGET)
    taken = [new.take_back(given(shelf, key)) for key in shelf.for_giving()]
    assert 0 < sum(taken) < len(NODES)
    assert sum(map(len, new.contents.values())) <= BUDGET // 2


def test_a_neighbour_with_less_room_keeps_what_came_first() -> None:
    stage, shelf = KeepingStage(Outbox()), MirrorShelf(4 * ROW_BYTES)
    for node in NODES[:3]:  # of 1, 2 and 3 rows
        stage.keep(node)
    for said in told(stage.outbox):
        hear(shelf, said)
    assert list(shelved(shelf)) == [(NODES[0].id, ROWS), (NODES[1].id, ROWS)]
    stage.drop(NODES[1])
    stage.keep(NODES[2])
    for said in told(stage.outbox):
        hear(shelf, said)
    assert shelved(shelf) == {
        key: data for key, data in stage.contents.items() if key[0] != NODES[1].id
    }


def test_the_chain_that_came_last_is_given_first_and_from_its_beginning() -> None:
    old, new = chain((1, 2, 3)), chain((2, 2), first=50)
    branch = chain((1, 2, 9))[2]
    assert branch.parent == old[1].id
    stage, shelf = KeepingStage(Outbox()), MirrorShelf(PLENTY)
    order = [
        *((node, ROWS) for node in (*old, *new)),
        (old[1], STATE),
        (new[1], STATE),
        (branch, ROWS),
    ]
    for node, holds in order:
        stage.keep(node, holds)
    for said in told(stage.outbox):
        hear(shelf, said)
    assert tuple(shelf.for_giving()) == (
        (old[0].id, ROWS),
        (old[1].id, ROWS),
        (old[1].id, STATE),
        (branch.id, ROWS),
        (new[0].id, ROWS),
        (new[1].id, ROWS),
        (new[1].id, STATE),
        (old[2].id, ROWS),
    )


def test_what_is_given_up_before_it_was_sent_costs_no_memory_and_is_never_sent() -> None:
    stage = KeepingStage(Outbox())
    node = NODES[0]
    stage.keep(node)
    kept = stage.stores[ROWS].get(node.id)
    assert kept is not None
    data = weakref.ref(kept.data)
    del kept
    stage.drop(node)
    gc.collect()
    assert data() is None
    assert list(told(stage.outbox)) == []


def test_a_node_kept_again_with_other_bytes_replaces_what_the_neighbour_had() -> None:
    stage, shelf = mirrored(NODES[0])
    first = shelved(shelf)
    stage.drop(NODES[0])
    stage.keep(NODES[0])
    for said in told(stage.outbox):
        hear(shelf, said)
    assert shelved(shelf) == stage.contents != first


@pytest.mark.parametrize("lost_on_the_way", [False, True])
def test_other_bytes_under_the_same_name_are_told_from_what_the_neighbour_has(
    lost_on_the_way: bool,
) -> None:
    stage, shelf = mirrored(NODES[0])
    stage.drop(NODES[0])
    stage.keep(NODES[0])
    if lost_on_the_way:
        assert len(list(told(stage.outbox))) == 2
    stage.outbox.reconcile(shelf.for_giving())
    for said in told(stage.outbox):
        hear(shelf, said)
    assert shelved(shelf) == stage.contents


def test_what_a_new_stage_computed_itself_is_not_taken_for_what_the_one_before_it_had() -> None:
    _, shelf = mirrored(NODES[0])
    new = KeepingStage(Outbox())
    new.kept = 7
    new.keep(NODES[0])
    new.outbox.reconcile(shelf.for_giving())
    for said in told(new.outbox):
        hear(shelf, said)
    assert shelved(shelf) == new.contents


def test_rows_of_no_bytes_are_kept_and_taken_back() -> None:
    """Of a stage without attention layers."""
    outbox, node = Outbox(), NODES[0]
    none = empty(node, ROWS)[:, :0]
    outbox.of(KINDS[0]).kept(node, none)
    (record,) = told(outbox)
    assert isinstance(record, Record)
    found = outbox.of(KINDS[0]).read(record, lambda node: none)
    assert found is not None
    assert found[0] == node
