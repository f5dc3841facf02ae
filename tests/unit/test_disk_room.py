"""Room on disk and in memory: budgets hold, a slow or full disk holds nobody up, and what is given up is told."""

from __future__ import annotations

import errno
import os
import threading
from array import array
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from coordinator.frames import NodeId
from coordinator.nodes import Node, node_id, root_of
from stage.kv import disk as disk_module
from stage.kv.disk import DiskTier
from stage.kv.node_file import RowKind, file_bytes
from stage.kv.records import RowRecords
from stage.kv.rows import KvRows, LayerShape
from stage.kv.store import HostStore

ROOT = root_of("model")
SHAPES = (LayerShape(2, 8, 8), LayerShape(1, 4, 6))
ROW_BYTES = 4 * (2 * 16 + 10)
KIND = RowKind("model", 0, 2, "float32", ((2, 8, 8), (1, 4, 6)), "test")
PLENTY = 2**30


def kv_rows() -> KvRows:
    rows = KvRows(SHAPES, lanes=2, max_rows=400, dtype=torch.float32, device=torch.device("cpu"))
    for layer, shape in enumerate(SHAPES):
        key = torch.randn(shape.kv_heads, 400, shape.key_dim)
        rows.write(layer, 0, 0, key, torch.randn(shape.kv_heads, 400, shape.value_dim))
    return rows


def records_of(rows: KvRows) -> RowRecords:
    return RowRecords(rows, torch.float32, torch.device("cpu"))


def disk(
    folder: Path, rows: KvRows, budget: int = PLENTY, kind: RowKind = KIND
) -> closing[DiskTier]:
    return closing(DiskTier(folder, records_of(rows), kind, budget))


def chain(*cuts: int, seed: int = 0) -> list[Node]:
    nodes, parent = [], ROOT
    for start, end in pairwise(cuts):
        tokens = array("i", range(seed + start, seed + end))
        nodes.append(Node(node_id(parent, tokens), parent, start, tokens))
        parent = nodes[-1].id
    return nodes


def ids(nodes: list[Node]) -> list[NodeId]:
    return [node.id for node in nodes]


def written(folder: Path, rows: KvRows, nodes: list[Node]) -> None:
    """Leaves the nodes' files of lane 0 in the folder."""
    with disk(folder, rows) as tier:
        assert HostStore(records_of(rows), PLENTY, tier).store(0, nodes) == ()
        assert tier.flush(10)
        assert all(id_ in tier for id_ in ids(nodes))


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def file_of(folder: Path, node: Node) -> Path:
    return folder / f"{node.id.hex()}.0-2.kv"


def same_rows(rows: KvRows, end: int) -> bool:
    return all(
        torch.equal(left, right)
        for layer in range(rows.layers)
        for left, right in zip(rows.view(layer, 0, end), rows.view(layer, 1, end), strict=True)
    )


def test_a_dropped_node_has_no_file_however_far_its_writing_had_come(tmp_path: Path) -> None:
    rows, nodes = kv_rows(), chain(*range(0, 400, 10))
    with disk(tmp_path, rows) as tier:
        store = HostStore(records_of(rows), PLENTY, tier)
        for _ in range(3):
            store.store(0, nodes)
            store.drop(ids(nodes[::2]))
        assert tier.flush(10)
        assert len(files(tmp_path)) == len(nodes) // 2
        assert store.missing(ids(nodes)) == tuple(ids(nodes[::2]))
        store.drop(ids(nodes))
        assert tier.flush(10)
        assert (files(tmp_path), tier.nbytes) == ([], 0)


def test_the_budget_holds_and_what_was_used_longest_ago_goes(tmp_path: Path) -> None:
    rows, nodes = kv_rows(), chain(0, 64, 128, 192)
    size = file_bytes(nodes[1], records_of(rows).gather(0, 64, 128), KIND)
    with disk(tmp_path, rows, budget=2 * size + 64) as tier:
        store = HostStore(records_of(rows), PLENTY, tier)
        store.store(0, nodes[:2])
        assert tier.flush(10)
        store.drop(ids(nodes[:2]))
    written(tmp_path, rows, nodes[:2])
    with disk(tmp_path, rows, budget=2 * size + 64) as tier:
        assert tier.read(nodes[0].id) is not None
        HostStore(records_of(rows), PLENTY, tier).store(0, nodes[2:])
        assert tier.flush(10)
        assert sum(path.stat().st_size for path in files(tmp_path)) == tier.nbytes <= 2 * size + 64
        assert [id_ in tier for id_ in ids(nodes)] == [True, False, True]
        assert (tier.take_removed(), tier.take_removed()) == ((nodes[1].id,), ())
    with disk(tmp_path, rows, budget=size + 64) as tier:  # the order of use outlives the process
        assert tier.nodes() == (nodes[2],)
    assert files(tmp_path) == [file_of(tmp_path, nodes[2])]


@contextmanager
def writing_held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, ...]]:
    """The disk takes nothing until the first event is set; the second one tells that it was asked to."""
    go, begun = threading.Event(), threading.Event()
    write = disk_module.write_node

    def late(*args) -> None:
        begun.set()
        assert go.wait(10)
        write(*args)

    monkeypatch.setattr(disk_module, "write_node", late)
    yield go, begun
    go.set()


def test_a_slow_disk_holds_nobody_up_and_takes_what_its_queue_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "_QUEUE", 3)
    rows, nodes = kv_rows(), chain(*range(0, 400, 50))
    with disk(tmp_path, rows) as tier, writing_held_up(monkeypatch) as (go, _):
        store = HostStore(records_of(rows), PLENTY, tier)
        assert store.store(0, nodes) == ()  # returns while nothing can be written
        assert not any(id_ in tier for id_ in ids(nodes))
        go.set()
        assert tier.flush(10)
        assert [id_ in tier for id_ in ids(nodes)] == [True] * 3 + [False] * (len(nodes) - 3)
        assert store.missing(ids(nodes)) == ()


def test_a_node_that_is_dropped_and_stored_while_it_is_being_written_has_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, nodes = kv_rows(), chain(0, 64)
    with disk(tmp_path, rows) as tier, writing_held_up(monkeypatch) as (go, begun):
        store = HostStore(records_of(rows), PLENTY, tier)
        store.store(0, nodes)
        assert begun.wait(10)
        store.drop(ids(nodes))
        store.store(0, nodes)
        go.set()
        assert tier.flush(10)
        assert tier.read(nodes[0].id) is not None


def test_a_node_that_is_safe_on_disk_gives_its_memory_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, nodes = kv_rows(), chain(0, 64, 128, 192)
    with disk(tmp_path, rows) as tier, writing_held_up(monkeypatch) as (go, _):
        store = HostStore(records_of(rows), 128 * ROW_BYTES, tier)
        assert store.store(0, nodes) == (nodes[2].id,)  # nothing is safe yet
        go.set()
        assert tier.flush(10)
        assert store.store(0, nodes[2:]) == ()
        assert (len(store), store.nbytes) == (2, 128 * ROW_BYTES)
        assert store.missing(ids(nodes)) == ()
        assert store.fetch(ids(nodes)) == ()
        store.load(1, 0, 192, ids(nodes))
        store.release()
        assert same_rows(rows, 192)
        assert store.nbytes <= store.budget


def test_a_node_that_found_the_queue_full_gets_to_the_disk_when_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, nodes = kv_rows(), chain(0, 64, 128)
    with disk(tmp_path, rows) as tier:
        store = HostStore(records_of(rows), 64 * ROW_BYTES, tier)
        with monkeypatch.context() as full:
            full.setattr(disk_module, "_QUEUE", 0)
            assert store.store(0, nodes[:1]) == ()
        assert store.store(0, nodes[1:]) == (nodes[1].id,)
        assert tier.flush(10)
        assert store.store(0, nodes[1:]) == ()


class FullDisk:
    """Every write fails as on a full disk, until there is space."""

    free = property(lambda self: 0 if self.is_full else PLENTY)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full, self.tries = True, 0
        write = disk_module.write_node

        def write_node(*args) -> None:
            self.tries += 1
            if self.is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            write(*args)

        monkeypatch.setattr(disk_module, "write_node", write_node)
        monkeypatch.setattr(disk_module.shutil, "disk_usage", lambda _: self)


def test_a_full_disk_is_one_log_line_and_is_left_alone_until_there_is_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows, nodes = kv_rows(), chain(*range(0, 400, 50))
    full = FullDisk(monkeypatch)
    with disk(tmp_path, rows) as tier:
        store = HostStore(records_of(rows), PLENTY, tier)
        assert store.store(0, nodes[:5]) == ()
        assert tier.flush(10)
        assert (full.tries, len(caplog.records), files(tmp_path)) == (1, 1, [])
        assert tier.is_failing
        assert store.missing(ids(nodes[:5])) == ()
        full.is_full = False
        assert store.store(0, nodes[5:]) == ()
        assert tier.flush(10)
        assert [id_ in tier for id_ in ids(nodes)] == [False] * 5 + [True] * (len(nodes) - 5)
        assert len(caplog.records) == 2


def test_while_the_disk_fails_the_oldest_node_in_memory_goes_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, nodes = kv_rows(), chain(0, 64, 128)
    FullDisk(monkeypatch)
    with disk(tmp_path, rows) as tier:
        store = HostStore(records_of(rows), 64 * ROW_BYTES, tier)
        store.store(0, nodes[:1])
        assert tier.flush(10)
        assert store.store(0, nodes[1:]) == ()
        assert (store.take_gone(), store.take_gone()) == ((nodes[0].id,), ())
        assert store.nbytes == store.budget


def test_a_node_whose_file_went_for_the_budget_is_told_unless_it_is_in_memory(
    tmp_path: Path,
) -> None:
    rows, nodes = kv_rows(), chain(0, 64, 128, 192)
    size = file_bytes(nodes[1], records_of(rows).gather(0, 64, 128), KIND)
    with disk(tmp_path, rows, budget=2 * size + 64) as tier:
        store = HostStore(records_of(rows), 64 * ROW_BYTES, tier)
        for node in nodes:
            assert store.store(0, [node]) == ()
            assert tier.flush(10)
        assert store.take_gone() == (nodes[0].id,)
        assert store.missing(ids(nodes)) == (nodes[0].id,)


def test_room_on_disk_counts_and_a_store_without_memory_has_none(tmp_path: Path) -> None:
    rows = kv_rows()
    with disk(tmp_path, rows, budget=1000 * ROW_BYTES) as tier:
        assert HostStore(records_of(rows), 64 * ROW_BYTES, tier).capacity_rows > 900
        assert HostStore(records_of(rows), 2000 * ROW_BYTES, tier).capacity_rows == 2000
        assert HostStore(records_of(rows), 0, tier).capacity_rows == 0
        nodes = chain(*range(0, 400, 64))
        whole = sum(file_bytes(n, records_of(rows).gather(0, n.start, n.end), KIND) for n in nodes)
        assert whole <= nodes[-1].end * (1000 * ROW_BYTES / tier.capacity_rows)
