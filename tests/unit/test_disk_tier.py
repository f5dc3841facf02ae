"""Rows on disk: they outlive the process, and whatever happens to a file costs a miss and a log line, no more."""

from __future__ import annotations

import logging
from array import array
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from coordinator.frames import NodeId
from coordinator.nodes import Node, node_id, root_of
from stage.kv.disk import DiskTier
from stage.kv.node_file import RowKind
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


def test_rows_outlive_the_process_and_are_read_when_they_are_loaded(tmp_path: Path) -> None:
    rows, nodes = kv_rows(), chain(0, 64, 128, 150)
    written(tmp_path, rows, nodes)
    assert [path.name for path in files(tmp_path)] == sorted(f"{n.id.hex()}.0-2.kv" for n in nodes)
    with disk(tmp_path, rows) as tier:
        store = HostStore(records_of(rows), PLENTY, tier)
        assert store.on_disk() == tuple(nodes)
        assert (store.nbytes, store.missing(ids(nodes))) == (0, ())
        assert store.fetch(ids(nodes)) == ()
        store.load(1, 0, 150, ids(nodes))
        assert same_rows(rows, 150)
        assert store.nbytes == 150 * ROW_BYTES


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
    other = next(each for each in files(path.parent) if each != path)
    path.write_bytes(other.read_bytes())


def shift(path: Path) -> None:
    """Another first row, behind the parent's id: neither the node's id nor its rows tell."""
    data = path.read_bytes()
    at = data.index(chain(0, 64)[0].id) + 16
    assert data[at] == 64
    flip(at)(path)


DAMAGES = {
    "the first row": shift,
    "cut": cut(-1),
    "cut in the header": cut(40),
    "empty": cut(0),
    "last byte": flip(-1),
    "a byte of the rows": flip(-1000),
    "a byte of the header": flip(60),
    "a byte of the magic": flip(0),
    "vanished": Path.unlink,
    "a folder": become_a_folder,
    "another node": hold_another_node,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_is_a_miss_with_one_log_line(
    tmp_path: Path, damage, caplog: pytest.LogCaptureFixture
) -> None:
    """Damaged while the process runs, after it read the headers."""
    rows, nodes = kv_rows(), chain(0, 64, 128)
    written(tmp_path, rows, nodes)
    with disk(tmp_path, rows) as tier:
        store = HostStore(records_of(rows), PLENTY, tier)
        damage(file_of(tmp_path, nodes[1]))
        assert store.fetch(ids(nodes)) == (nodes[1].id,)
        assert len(caplog.records) == 1
        assert store.fetch(ids(nodes)) == (nodes[1].id,)
        assert len(caplog.records) == 1
        assert store.missing(ids(nodes)) == (nodes[1].id,)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_file_that_was_damaged_before_the_start_is_never_a_wrong_row(
    tmp_path: Path, damage, caplog: pytest.LogCaptureFixture
) -> None:
    rows, nodes = kv_rows(), chain(0, 64, 128)
    written(tmp_path, rows, nodes)
    damage(file_of(tmp_path, nodes[1]))
    with disk(tmp_path, rows) as tier:
        store = HostStore(records_of(rows), PLENTY, tier)
        assert nodes[0] in store.on_disk()
        assert store.fetch(ids(nodes)) == (nodes[1].id,)
        assert store.missing(ids(nodes)) == (nodes[1].id,)
        assert len(caplog.records) == (0 if damage is Path.unlink else 1)
        # It can be stored anew, unless something that is no file stands in its place.
        assert store.store(0, nodes) == ()
        assert tier.flush(10)
        assert (nodes[1].id in tier) is (damage is not become_a_folder)


OTHERS = {"fingerprint": "x", "dtype": "bfloat16", "shapes": ((2, 8, 8), (2, 2, 3)), "recipe": "x"}


@pytest.mark.parametrize(("name", "value"), OTHERS.items(), ids=OTHERS.keys())
def test_rows_of_another_kind_are_ignored_and_go_first(
    tmp_path: Path, name: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    rows, nodes, others = kv_rows(), chain(0, 64, 128), chain(0, 64, 128, seed=1000)
    written(tmp_path, rows, nodes)
    kind = replace(KIND, **{name: value})
    budget = sum(path.stat().st_size for path in files(tmp_path)) + 64
    with disk(tmp_path, rows, budget, kind) as tier:
        assert tier.nodes() == ()
        assert all(tier.read(id_) is None for id_ in ids(nodes))
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        HostStore(records_of(rows), PLENTY, tier).store(0, others)
        assert tier.flush(10)
    assert [path.name[:32] for path in files(tmp_path)] == sorted(n.id.hex() for n in others)


def test_stages_share_a_folder(tmp_path: Path) -> None:
    rows, nodes = kv_rows(), chain(0, 64)
    written(tmp_path, rows, nodes)
    with disk(tmp_path, rows, kind=replace(KIND, first=2, last=4)) as second:
        assert second.nodes() == ()
        HostStore(records_of(rows), PLENTY, second).store(0, nodes)
        assert second.flush(10)
        assert len(files(tmp_path)) == 2
        second.drop(nodes[0].id)
        assert second.flush(10)
    assert files(tmp_path) == [file_of(tmp_path, nodes[0])]


def test_a_partial_file_of_a_crash_is_removed(tmp_path: Path) -> None:
    rows, nodes = kv_rows(), chain(0, 64)
    written(tmp_path, rows, nodes)
    path = file_of(tmp_path, nodes[0])
    path.rename(path.with_name(path.name + ".part"))
    (tmp_path / "notes.txt").write_text("not ours")
    with disk(tmp_path, rows) as tier:
        assert tier.nodes() == ()
    assert [path.name for path in files(tmp_path)] == ["notes.txt"]
