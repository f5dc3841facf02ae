"""Recurrent states on disk: they outlive the process beside the rows, and whatever happens to a file costs a miss."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from coordinator.frames import Epoch, Frame, LaneId, LoadNodes, RefusalCode, Seq
from coordinator.ledger import Ledger
from coordinator.nodes import Node
from stage.attention import RowSegment
from stage.kv.checkpoints import Checkpoints
from stage.kv.kept import DiskShelf
from stage.kv.node_file import FileKind
from stage.kv.states import LaneStates, SavedState, StatePart, StateShape
from stage.kv.store import HostStore
from stage.ops import FrameOps
from stage.stores import kind_of_states

# Odd numbers of two-byte elements before four-byte ones.
SHAPES = (
    StateShape((StatePart((1, 3), torch.bfloat16), StatePart((2, 2), torch.float32)), 5),
    StateShape((StatePart((70, 10), torch.float32),), 3),
)
KIND = FileKind("model", 0, 2, "mixed", ((1, 3), (2, 2), (70, 10)), "test", "state")
ENDS = (64, 128, 133)


class States:
    """Lane 0 has run through noise; its states at nodes' ends become checkpoints."""

    def __init__(self, rig, shapes: tuple[StateShape, ...] = SHAPES) -> None:
        cpu = torch.device("cpu")
        self.rig = rig
        self.lanes = LaneStates(shapes, lanes=2, block=4, dtype=torch.bfloat16, device=cpu)
        self.nodes: list[Node] = rig.chain(0, *ENDS)
        self.expected: dict[int, SavedState] = {}

    def run_to(self, end: int) -> None:
        self.lanes.clear(0)
        self.lanes.begin([RowSegment(0, 0, end)])
        base = end - end % 4
        for layer in range(self.lanes.layers):
            for tensor in self.lanes.state(layer, 0, base):
                tensor.copy_(torch.randn(tensor.shape))
            rows = self.lanes.block_rows(layer, 0, base)
            rows.copy_(torch.randn(rows.shape))
        self.expected[end] = self.lanes.save(0, end)

    def save_all(self, checkpoints: Checkpoints) -> list[bool]:
        saved = []
        for node in self.nodes:
            self.run_to(node.end)
            saved.append(checkpoints.save(0, node))
        return saved

    @contextmanager
    def opened(
        self, budget: int = 2**30, kind: FileKind = KIND, memory: int = 2**30
    ) -> Iterator[tuple[Checkpoints, DiskShelf]]:
        with self.rig.disk(budget, kind, (self.rig.kind,)) as shelf:
            yield Checkpoints(self.lanes, memory, shelf), shelf

    def written(self) -> None:
        """Leaves all nodes' checkpoints in the folder."""
        with self.opened() as (checkpoints, shelf):
            assert self.save_all(checkpoints) == [True] * len(self.nodes)
            assert shelf.flush(10)
            assert all(node.id in shelf for node in self.nodes)

    def file_of(self, node: Node) -> Path:
        return self.rig.folder / f"{node.id.hex()}.0-2.state"

    def comes_back(self, checkpoints: Checkpoints, node: Node) -> bool:
        """Lane 1 is taken up at the node's end, and holds what lane 0 held there."""
        self.lanes.clear(1)
        if not checkpoints.fetch(node.id):
            return False
        checkpoints.load(1, node.end, node.id)
        checkpoints.release()
        assert self.is_same(node.end)
        return True

    def is_same(self, end: int) -> bool:
        pairs = zip(self.lanes.save(1, end).tensors, self.expected[end].tensors, strict=True)
        return all(torch.equal(left, right) for left, right in pairs)


@pytest.fixture
def states(rig) -> States:
    return States(rig)


def test_states_outlive_the_process_and_are_read_when_they_are_loaded(states: States) -> None:
    states.written()
    assert states.rig.files() == sorted(states.file_of(node) for node in states.nodes)
    with states.opened() as (checkpoints, _):
        assert checkpoints.on_disk() == tuple(node.id for node in states.nodes)
        assert (len(checkpoints), checkpoints.nbytes) == (0, 0)
        assert all(states.comes_back(checkpoints, node) for node in states.nodes)
        assert len(checkpoints) == len(states.nodes)


def cut(end: int):
    return lambda path: path.write_bytes(path.read_bytes()[:end])


def flip(offset: int):
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)

    return change


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def hold_another_node(path: Path) -> None:
    other = next(each for each in path.parent.iterdir() if each != path)
    path.write_bytes(other.read_bytes())


DAMAGES = {
    "cut": cut(-1),
    "empty": cut(0),
    "last byte": flip(-1),
    "a byte of the state": flip(-1000),
    "a byte of the header": flip(60),
    "a byte of the magic": flip(0),
    "vanished": Path.unlink,
    "a folder": become_a_folder,
    "another node": hold_another_node,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
@pytest.mark.parametrize("is_running", [True, False], ids=["while it runs", "before the start"])
def test_a_damaged_state_is_a_miss_with_one_log_line(
    states: States, damage, is_running: bool, caplog: pytest.LogCaptureFixture
) -> None:
    states.written()
    _, bad, good = states.nodes
    if not is_running:
        damage(states.file_of(bad))
    with states.opened() as (checkpoints, shelf):
        if is_running:
            damage(states.file_of(bad))
        assert not states.comes_back(checkpoints, bad)
        assert not states.comes_back(checkpoints, bad)
        assert len(caplog.records) == (not (damage is Path.unlink and not is_running))
        assert states.comes_back(checkpoints, good)
        # It can be saved anew, unless something that is no file stands in its place.
        states.run_to(bad.end)
        assert checkpoints.save(0, bad)
        assert shelf.flush(10)
        assert (bad.id in shelf) is (damage is not become_a_folder)
        assert states.comes_back(checkpoints, bad)


OTHERS = {"fingerprint": "x", "dtype": "x", "shapes": ((1, 3),), "recipe": "x", "holds": "kv"}


@pytest.mark.parametrize(("name", "value"), OTHERS.items(), ids=OTHERS.keys())
def test_states_of_another_kind_are_ignored(
    states: States, name: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    states.written()
    kind = replace(KIND, **{name: value})
    for node in states.nodes:  # also under the other kind's name
        path = states.file_of(node)
        path.rename(path.with_name(f"{node.id.hex()}{kind.suffix}"))
    with states.rig.disk(kind=kind) as shelf:
        checkpoints = Checkpoints(states.lanes, 2**30, shelf)
        assert checkpoints.on_disk() == ()
        assert not any(states.comes_back(checkpoints, node) for node in states.nodes)
        assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_states_of_other_layouts_are_of_other_kinds(rig) -> None:
    def kind(part: StatePart, width: int = 5, block: int = 4, dtype=torch.bfloat16) -> FileKind:
        shapes, cpu = (StateShape((part,), width),), torch.device("cpu")
        lanes = LaneStates(shapes, lanes=1, block=block, dtype=dtype, device=cpu)
        return kind_of_states(lanes, rig.kind)

    wide, narrow = StatePart((2, 3), torch.float32), StatePart((2, 3), torch.bfloat16)
    kinds = [
        kind(wide),
        kind(narrow),
        kind(StatePart((3, 2), torch.float32)),
        kind(wide, width=6),
        kind(wide, block=8),
        kind(wide, dtype=torch.float32),
    ]
    assert len(set(kinds)) == len(kinds)
    assert kind(wide) == kinds[0] != rig.kind
    assert {each.suffix for each in kinds} == {".0-2.state"}


def test_rows_and_states_share_one_budget_and_what_was_used_longest_ago_goes(
    states: States,
) -> None:
    states.written()
    states.rig.written(states.nodes)
    whole = sum(path.stat().st_size for path in states.rig.files())
    with states.opened(budget=whole) as (checkpoints, shelf):
        store = states.rig.store(replace(shelf, kind=states.rig.kind))
        assert states.comes_back(checkpoints, states.nodes[0])
        assert store.store(0, states.rig.chain(0, 12, 24, seed=1000)) == ()
        assert shelf.flush(10)
        assert sum(path.stat().st_size for path in states.rig.files()) <= whole
        # The states were written before the rows, and the first one was read again.
        assert checkpoints.take_gone() == (states.nodes[1].id, states.nodes[2].id)
        assert store.missing(node.id for node in states.nodes[1:]) == ()
        held = tuple(checkpoints.held(node.id for node in states.nodes))
        assert held == (states.nodes[0].id,)
        assert not states.comes_back(checkpoints, states.nodes[1])


@contextmanager
def staged(states: States, budget: int = 2**30) -> Iterator[tuple[Ledger, FrameOps, HostStore]]:
    """What a stage does beside computing, behind a restart."""
    states.written()
    states.rig.written(states.nodes)
    with states.opened(budget) as (checkpoints, shelf):
        store = states.rig.store(replace(shelf, kind=states.rig.kind))
        ledger = Ledger(2, 400, state_rows=16)
        model = SimpleNamespace(rows=states.rig.rows, states=states.lanes)
        yield ledger, FrameOps(ledger, model, store, checkpoints), store


def test_a_stage_loads_rows_and_states_from_before_and_says_which_it_cannot_have(
    states: States,
) -> None:
    first, second, _ = states.nodes
    with staged(states) as (ledger, ops, _):
        assert ledger.nodes.checkpoints == set(states.rig.ids(states.nodes))
        load = LoadNodes(LaneId(1), 0, 64, (first.id,))
        frame = Frame(Epoch(0), Seq(0), (load,))
        assert ops.prepare(frame) == ()
        ops.run(frame, ledger.apply(frame), ())
        assert states.rig.same_rows(64)
        assert states.is_same(64)
        assert not ops._checkpoints._fetched
        states.file_of(second).unlink()
        load = LoadNodes(LaneId(1), 0, 128, (first.id, second.id))
        frame = Frame(Epoch(0), Seq(1), (load,))
        assert ops.prepare(frame) == (second.id,)
        (refusal,) = ledger.apply(frame).refusals
        assert refusal.code is RefusalCode.KV_GAP


def test_a_node_whose_state_went_for_the_budget_stays_with_its_rows(states: States) -> None:
    states.written()
    states.rig.written(states.nodes)
    whole = sum(path.stat().st_size for path in states.rig.files())
    with staged(states, whole) as (ledger, ops, store):
        store.store(0, states.rig.chain(0, 12, seed=1000))
        assert store._disk is not None
        assert store._disk.flush(10)
        assert ops.prepare(Frame(Epoch(0), Seq(0))) == ()
        assert ledger.nodes.checkpoints == {node.id for node in states.nodes[1:]}
        assert all(node.id in ledger.nodes for node in states.nodes)


def test_a_state_that_is_safe_on_disk_gives_its_memory_up(states: States) -> None:
    size = 4096
    with states.opened(memory=size) as (checkpoints, shelf):
        for node in states.nodes:
            states.run_to(node.end)
            assert checkpoints.save(0, node)
            assert shelf.flush(10)
            assert (len(checkpoints), checkpoints.nbytes <= size) == (1, True)
        assert all(states.comes_back(checkpoints, node) for node in states.nodes)
        assert checkpoints.nbytes <= size
        assert checkpoints.take_gone() == ()


def test_without_a_disk_or_before_it_is_safe_there_is_room_in_memory_only(states: States) -> None:
    assert states.save_all(Checkpoints(states.lanes, 4096)) == [True, False, False]


def test_a_dropped_state_has_no_file_and_its_rows_stay(states: States) -> None:
    states.rig.written(states.nodes)
    with states.opened() as (checkpoints, shelf):
        for _ in range(3):
            states.save_all(checkpoints)
            checkpoints.drop(node.id for node in states.nodes[:2])
        assert shelf.flush(10)
        kept = [states.rig.file_of(node) for node in states.nodes]
        assert states.rig.files() == sorted([*kept, states.file_of(states.nodes[2])])
        assert not checkpoints.fetch(states.nodes[0].id)
        checkpoints.drop([states.nodes[2].id])
        assert shelf.flush(10)
    assert states.rig.files() == sorted(kept)


def test_room_on_disk_counts_and_a_store_without_memory_has_none(states: States) -> None:
    states.written()
    biggest = max(path.stat().st_size for path in states.rig.files())
    with states.opened() as (_, shelf):
        for budget in (10 * biggest, 1000 * biggest):
            part = replace(shelf, budget=budget)
            capacity = Checkpoints(states.lanes, 4096, part).capacity
            assert 0.5 < capacity * biggest / budget <= 1
        assert Checkpoints(states.lanes, 100 * biggest, part).capacity == capacity
        assert Checkpoints(states.lanes, 0, part).capacity == 0


def test_a_stage_without_recurrent_layers_has_all_and_writes_nothing(rig) -> None:
    states = States(rig, ())
    with states.opened() as (checkpoints, shelf):
        assert all(checkpoints.save(0, node) for node in states.nodes)
        assert all(checkpoints.fetch(node.id) for node in states.nodes)
        assert list(checkpoints.held(node.id for node in states.nodes)) == rig.ids(states.nodes)
        assert shelf.flush(10)
        assert (rig.files(), checkpoints.capacity > 10**6) == ([], True)
