"""Rows on disk: they outlive the process, and whatever happens to a file costs a miss and a log line, no more."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest


def test_rows_outlive_the_process_and_are_read_when_they_are_loaded(rig) -> None:
    nodes = rig.chain(0, 64, 128, 150)
    rig.written(nodes)
    assert [path.name for path in rig.files()] == sorted(f"{n.id.hex()}.0-2.kv" for n in nodes)
    with rig.disk() as shelf:
        store = rig.store(shelf)
        assert store.on_disk() == tuple(nodes)
        assert (store.nbytes, store.missing(rig.ids(nodes))) == (0, ())
        assert store.fetch(rig.ids(nodes)) == ()
        store.load(1, 0, 150, rig.ids(nodes))
        assert rig.same_rows(150)
        assert store.nbytes == 150 * rig.row_bytes


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


def beside(path: Path) -> Path:
    return next(each for each in path.parent.iterdir() if each != path)


def hold_another_node(path: Path) -> None:
    path.write_bytes(beside(path).read_bytes())


def shift(path: Path) -> None:
    """Another first row, behind the parent's id: neither the node's id nor its rows tell."""
    data = path.read_bytes()
    at = data.index(bytes.fromhex(beside(path).name[:32])) + 16
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
    rig, damage, caplog: pytest.LogCaptureFixture
) -> None:
    """Damaged while the process runs, after it read the headers."""
    nodes = rig.chain(0, 64, 128)
    rig.written(nodes)
    with rig.disk() as shelf:
        store = rig.store(shelf)
        damage(rig.file_of(nodes[1]))
        assert store.fetch(rig.ids(nodes)) == (nodes[1].id,)
        assert len(caplog.records) == 1
        assert store.fetch(rig.ids(nodes)) == (nodes[1].id,)
        assert len(caplog.records) == 1
        assert store.missing(rig.ids(nodes)) == (nodes[1].id,)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_file_that_was_damaged_before_the_start_is_never_a_wrong_row(
    rig, damage, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = rig.chain(0, 64, 128)
    rig.written(nodes)
    damage(rig.file_of(nodes[1]))
    with rig.disk() as shelf:
        store = rig.store(shelf)
        assert nodes[0] in store.on_disk()
        assert store.fetch(rig.ids(nodes)) == (nodes[1].id,)
        assert store.missing(rig.ids(nodes)) == (nodes[1].id,)
        assert len(caplog.records) == (0 if damage is Path.unlink else 1)
        # It can be stored anew, unless something that is no file stands in its place.
        assert store.store(0, nodes) == ()
        assert shelf.flush(10)
        assert (nodes[1].id in shelf) is (damage is not become_a_folder)


OTHERS = {"fingerprint": "x", "dtype": "bfloat16", "shapes": ((2, 8, 8), (2, 2, 3)), "recipe": "x"}


@pytest.mark.parametrize(("name", "value"), OTHERS.items(), ids=OTHERS.keys())
def test_rows_of_another_kind_are_ignored_and_go_first(
    rig, name: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    nodes, others = rig.chain(0, 64, 128), rig.chain(0, 64, 128, seed=1000)
    rig.written(nodes)
    kind = replace(rig.kind, **{name: value})
    budget = sum(path.stat().st_size for path in rig.files()) + 64
    with rig.disk(budget, kind) as shelf:
        assert shelf.nodes() == ()
        assert not any(rig.read(shelf, node) for node in nodes)
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        rig.store(shelf).store(0, others)
        assert shelf.flush(10)
    assert [path.name[:32] for path in rig.files()] == sorted(n.id.hex() for n in others)


def test_stages_share_a_folder(rig) -> None:
    nodes = rig.chain(0, 64)
    rig.written(nodes)
    with rig.disk(kind=replace(rig.kind, first=2, last=4)) as second:
        assert second.nodes() == ()
        rig.store(second).store(0, nodes)
        assert second.flush(10)
        assert len(rig.files()) == 2
        second.drop(nodes[0].id)
        assert second.flush(10)
    assert rig.files() == [rig.file_of(nodes[0])]


def test_a_partial_file_of_a_crash_is_removed(rig) -> None:
    nodes = rig.chain(0, 64)
    rig.written(nodes)
    path = rig.file_of(nodes[0])
    path.rename(path.with_name(path.name + ".part"))
    (rig.folder / "notes.txt").write_text("not ours")
    with rig.disk() as shelf:
        assert shelf.nodes() == ()
    assert [path.name for path in rig.files()] == ["notes.txt"]
