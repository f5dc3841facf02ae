"""Room on disk and in memory: budgets hold, a slow or full disk holds nobody up, and what is given up is told."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from stage.kv import disk as disk_module


def test_a_dropped_node_has_no_file_however_far_its_writing_had_come(rig) -> None:
    nodes = rig.chain(*range(0, 400, 10))
    with rig.disk() as shelf:
        store = rig.store(shelf)
        for _ in range(3):
            store.store(0, nodes)
            store.drop(rig.ids(nodes[::2]))
        assert shelf.flush(10)
        assert len(rig.files()) == len(nodes) // 2
        assert store.missing(rig.ids(nodes)) == tuple(rig.ids(nodes[::2]))
        store.drop(rig.ids(nodes))
        assert shelf.flush(10)
        assert (rig.files(), shelf.tier.nbytes) == ([], 0)


def test_the_budget_holds_and_what_was_used_longest_ago_goes(rig) -> None:
    nodes = rig.chain(0, 64, 128, 192)
    size = rig.file_bytes(nodes[1])
    with rig.disk(budget=2 * size + 64) as shelf:
        store = rig.store(shelf)
        store.store(0, nodes[:2])
        assert shelf.flush(10)
        store.drop(rig.ids(nodes[:2]))
    rig.written(nodes[:2])
    with rig.disk(budget=2 * size + 64) as shelf:
        assert rig.read(shelf, nodes[0])
        rig.store(shelf).store(0, nodes[2:])
        assert shelf.flush(10)
        on_disk = sum(path.stat().st_size for path in rig.files())
        assert on_disk == shelf.tier.nbytes <= 2 * size + 64
        assert [id_ in shelf for id_ in rig.ids(nodes)] == [True, False, True]
        assert (shelf.take_removed(), shelf.take_removed()) == ((nodes[1].id,), ())
    with rig.disk(budget=size + 64) as shelf:  # the order of use outlives the process
        assert shelf.nodes() == (nodes[2],)
    assert rig.files() == [rig.file_of(nodes[2])]


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
    rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "_QUEUE", 3)
    nodes = rig.chain(*range(0, 400, 50))
    with rig.disk() as shelf, writing_held_up(monkeypatch) as (go, _):
        store = rig.store(shelf)
        assert store.store(0, nodes) == ()  # returns while nothing can be written
        assert not any(id_ in shelf for id_ in rig.ids(nodes))
        go.set()
        assert shelf.flush(10)
        assert [id_ in shelf for id_ in rig.ids(nodes)] == [True] * 3 + [False] * (len(nodes) - 3)
        assert store.missing(rig.ids(nodes)) == ()


def test_a_node_that_is_dropped_and_stored_while_it_is_being_written_has_its_file(
    rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = rig.chain(0, 64)
    with rig.disk() as shelf, writing_held_up(monkeypatch) as (go, begun):
        store = rig.store(shelf)
        store.store(0, nodes)
        assert begun.wait(10)
        store.drop(rig.ids(nodes))
        store.store(0, nodes)
        go.set()
        assert shelf.flush(10)
        assert rig.read(shelf, nodes[0])


def test_a_node_that_is_safe_on_disk_gives_its_memory_up(
    rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = rig.chain(0, 64, 128, 192)
    with rig.disk() as shelf, writing_held_up(monkeypatch) as (go, _):
        store = rig.store(shelf, 128 * rig.row_bytes)
        assert store.store(0, nodes) == (nodes[2].id,)  # nothing is safe yet
        go.set()
        assert shelf.flush(10)
        assert store.store(0, nodes[2:]) == ()
        assert (len(store), store.nbytes) == (2, 128 * rig.row_bytes)
        assert store.missing(rig.ids(nodes)) == ()
        assert store.fetch(rig.ids(nodes)) == ()
        store.load(1, 0, 192, rig.ids(nodes))
        store.release()
        assert rig.same_rows(192)
        assert store.nbytes <= store.budget


def test_a_node_that_found_the_queue_full_gets_to_the_disk_when_memory_is_short(
    rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = rig.chain(0, 64, 128)
    with rig.disk() as shelf:
        store = rig.store(shelf, 64 * rig.row_bytes)
        with monkeypatch.context() as full:
            full.setattr(disk_module, "_QUEUE", 0)
            assert store.store(0, nodes[:1]) == ()
        assert store.store(0, nodes[1:]) == (nodes[1].id,)
        assert shelf.flush(10)
        assert store.store(0, nodes[1:]) == ()


class FullDisk:
    """Every write fails as on a full disk, until there is space."""

    total = 2**40
    free = property(lambda self: 0 if self.is_full else 2**30)

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
    rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = rig.chain(*range(0, 400, 50))
    full = FullDisk(monkeypatch)
    with rig.disk() as shelf:
        store = rig.store(shelf)
        assert store.store(0, nodes[:5]) == ()
        assert shelf.flush(10)
        assert (full.tries, len(caplog.records), rig.files()) == (1, 1, [])
        assert shelf.tier.is_failing
        assert store.missing(rig.ids(nodes[:5])) == ()
        full.is_full = False
        assert store.store(0, nodes[5:]) == ()
        assert shelf.flush(10)
        assert [id_ in shelf for id_ in rig.ids(nodes)] == [False] * 5 + [True] * (len(nodes) - 5)
        assert len(caplog.records) == 2


def test_a_small_disk_is_written_to_again_as_soon_as_two_files_fit(
    rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For as many as the queue holds it would never be large enough."""
    nodes = rig.chain(0, 50, 100)
    size = rig.file_bytes(nodes[0])
    full = FullDisk(monkeypatch)
    full.total = 4 * size
    with rig.disk() as shelf:
        store = rig.store(shelf)
        store.store(0, nodes[:1])
        assert shelf.flush(10)
        told = f"it goes on once {2 * size / 2**20:.1f} MiB are free there"
        assert [told in record.getMessage() for record in caplog.records] == [True]
        full.is_full = False
        monkeypatch.setattr(FullDisk, "free", 2 * rig.file_bytes(nodes[1]))
        store.store(0, nodes[1:])
        assert shelf.flush(10)
        assert rig.files() == [rig.file_of(nodes[1])]


def test_while_the_disk_fails_the_oldest_node_in_memory_goes_and_is_told(
    rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = rig.chain(0, 64, 128)
    FullDisk(monkeypatch)
    with rig.disk() as shelf:
        store = rig.store(shelf, 64 * rig.row_bytes)
        store.store(0, nodes[:1])
        assert shelf.flush(10)
        assert store.store(0, nodes[1:]) == ()
        assert (store.take_gone(), store.take_gone()) == ((nodes[0].id,), ())
        assert store.nbytes == store.budget


def test_a_node_whose_file_went_for_the_budget_is_told_unless_it_is_in_memory(rig) -> None:
    nodes = rig.chain(0, 64, 128, 192)
    size = rig.file_bytes(nodes[1])
    with rig.disk(budget=2 * size + 64) as shelf:
        store = rig.store(shelf, 64 * rig.row_bytes)
        for node in nodes:
            assert store.store(0, [node]) == ()
            assert shelf.flush(10)
        assert store.take_gone() == (nodes[0].id,)
        assert store.missing(rig.ids(nodes)) == (nodes[0].id,)


def test_room_on_disk_counts_and_a_store_without_memory_has_none(rig) -> None:
    with rig.disk(budget=1000 * rig.row_bytes) as shelf:
        capacity = rig.store(shelf, 64 * rig.row_bytes).capacity_rows
        assert capacity > 900
        assert rig.store(shelf, 2000 * rig.row_bytes).capacity_rows == 2000
        assert rig.store(shelf, 0).capacity_rows == 0
        nodes = rig.chain(*range(0, 400, 64))
        whole = sum(rig.file_bytes(n) for n in nodes)
        assert whole <= nodes[-1].end * (1000 * rig.row_bytes / capacity)


def test_files_of_another_split_count_and_go_first_and_siblings_are_left_alone(rig) -> None:
    """Else each new number of stages would leave the disk full of files that nobody reads or removes."""
    old, sibling = rig.chain(0, 64, 128), replace(rig.kind, first=2, last=4)
    rig.written(old)
    size = sum(path.stat().st_size for path in rig.files())
    with rig.disk(kind=sibling) as shelf:
        assert shelf.tier.nbytes == 0, (
            "layers 2 to 4 are another stage's, whose files these are not"
        )
    wider = replace(rig.kind, last=3)
    with rig.disk(kind=wider) as shelf:
        assert (shelf.tier.nbytes, shelf.nodes()) == (size, ())
    with rig.disk(kind=wider, budget=size - 1) as shelf:
        assert shelf.tier.nbytes < size
        assert len(rig.files()) == len(old) - 1


def test_a_folder_that_was_removed_is_made_again(rig) -> None:
    nodes = rig.chain(0, 64, 128)
    with rig.disk() as shelf:
        shutil.rmtree(rig.folder)
        store = rig.store(shelf)
        store.store(0, nodes[:1])
        assert shelf.flush(10)
        store.store(0, nodes[1:])
        assert shelf.flush(10)
        assert rig.files() == [rig.file_of(nodes[1])]


def test_a_file_that_is_only_nearly_named_like_a_node_is_none(rig) -> None:
    """What is counted by one name and removed by another would outlive the budget."""
    (node,) = rig.chain(0, 64)
    rig.written([node])
    path = rig.file_of(node)
    path.rename(path.with_name(path.name.replace(node.id.hex(), node.id.hex().upper())))
    with rig.disk() as shelf:
        assert (shelf.nodes(), shelf.tier.nbytes) == ((), 0)
