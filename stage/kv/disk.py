"""Chain nodes' rows on disk: a folder of content-addressed files that outlives the process.

Decides what is written, what is removed for the budget, and what of an earlier run may be used. Files are written and
removed by a thread of its own, behind a bounded queue, so that no frame waits for it; a node that finds no place in
the queue is not on disk, that is all. Whatever is wrong with a file, or with the whole disk, costs a log line and a
miss. Several processes should not share a folder: each would remove what the other one counts on, and read a miss.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from coordinator.frames import NodeId
from coordinator.nodes import Node
from stage.kv.node_file import (
    PARTIAL,
    Damaged,
    Foreign,
    RowKind,
    file_bytes,
    read_head,
    read_node,
    write_node,
)
from stage.kv.records import RowRecords

log = logging.getLogger(__name__)

# Nodes that wait to be written: 200 MB of a small model's in float32, which a disk takes in a second.
_QUEUE = 128
# Bytes of a file that are not rows, by row of a node: 4 of its token, and its share of a header of some 300 bytes.
_ROW_OVERHEAD = 16
# What the last files may take to be written when the stage ends.
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class _File:
    size: int
    node: Node | None  # None: it cannot be used, and goes when room is wanted


class DiskTier:
    """One thread calls it; another one, which it owns, writes. Which nodes there are is in memory: asking is free."""

    def __init__(self, folder: Path, records: RowRecords, kind: RowKind, budget: int) -> None:
        """Reads the headers of what lies there. Raises OSError when the folder cannot be used at all."""
        self._folder = folder
        self._records = records
        self._kind = kind
        self._budget = budget
        self._changed = threading.Condition()
        # Guarded by _changed, from here on.
        self._files: OrderedDict[NodeId, _File] = OrderedDict()  # used longest ago first
        self._size = 0
        self._waiting: OrderedDict[NodeId, tuple[Node, Tensor]] = OrderedDict()
        self._doomed: dict[NodeId, None] = {}
        self._removed: list[NodeId] = []
        self._closed = False
        self._busy = False
        self._failing = False
        self._writer: threading.Thread | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._scan()

    @property
    def capacity_rows(self) -> int:
        return self._budget // (self._records.row_bytes + _ROW_OVERHEAD)

    @property
    def is_failing(self) -> bool:
        """The last write went wrong."""
        return self._failing

    @property
    def nbytes(self) -> int:
        with self._changed:
            return self._size

    def __contains__(self, id_: NodeId) -> bool:
        with self._changed:
            return self._is_usable(id_)

    def nodes(self) -> tuple[Node, ...]:
        """What can be read, parents first."""
        with self._changed:
            found = [file.node for file in self._files.values() if file.node is not None]
        return tuple(sorted(found, key=lambda node: node.start))

    def read(self, id_: NodeId) -> tuple[Node, Tensor] | None:
        """A node and its rows; None, and the file is gone, when they are not what was written."""
        with self._changed:
            file = self._files.get(id_)
        if file is None or file.node is None:
            return None
        records = self._records.empty(file.node.rows)
        path = self._path(id_)
        try:
            node = read_node(path, self._kind, records)
            if node != file.node:
                raise Damaged("it holds another node")
        except (OSError, Damaged, Foreign) as error:
            log.warning("missed a node file=%s reason=%s", path, error)
            self.drop(id_)
            return None
        self._touch(id_)
        return node, records

    def write(self, node: Node, records: Tensor) -> bool:
        """Has it written some time; False when the queue is full. Nobody may write to `records` any more."""
        with self._changed:
            if self._closed or len(self._waiting) >= _QUEUE:
                return False
            if not self._is_usable(node.id):
                self._waiting.setdefault(node.id, (node, records))
                self._doomed.pop(node.id, None)
                self._wake()
            return True

    def drop(self, id_: NodeId) -> None:
        with self._changed:
            waited = self._waiting.pop(id_, None) is not None
            if self._forget(id_) or waited:
                self._doomed[id_] = None
                self._wake()

    def take_removed(self) -> tuple[NodeId, ...]:
        """Nodes whose files went for the budget since this was asked last."""
        with self._changed:
            removed, self._removed = tuple(self._removed), []
        return removed

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits until nothing waits to be written or removed."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._jobs_left or self._busy), timeout_s)

    def close(self) -> None:
        """Ends the thread, once it has written what it can within seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.flush(_CLOSE_S if self._writer is not None else 0)
        with self._changed:
            self._waiting.clear()
            self._doomed.clear()
            self._changed.notify_all()
        if self._writer is not None:
            self._writer.join(_CLOSE_S)

    # What lies there

    def _scan(self) -> None:
        foreign = 0
        for path, size in self._found():
            id_ = _id_of(path)
            if id_ is None:
                continue
            try:
                node = read_head(path, self._kind)
                if node.id != id_:
                    raise Damaged("it holds another node than its name says")
            except Foreign:
                foreign += 1
                self._add(id_, _File(size, None))
            except (OSError, Damaged) as error:
                log.warning("removed a node file=%s reason=%s", path, error)
                _unlink(path)
            else:
                self._add(id_, _File(size, node))
        if foreign:
            log.warning("ignored %d files of other rows in folder=%s", foreign, self._folder)
        for id_ in self._make_room(0):
            _unlink(self._path(id_))
        self._removed.clear()  # nobody counted on them yet

    def _found(self) -> list[tuple[Path, int]]:
        """This stage's files and their sizes, the one used longest ago first."""
        for rest in self._folder.glob(f"*{self._kind.suffix}{PARTIAL}"):
            _unlink(rest)
        dated = []
        for path in self._folder.glob(f"*{self._kind.suffix}"):
            with contextlib.suppress(OSError):
                status = path.stat()
                dated.append((status.st_mtime_ns, path, status.st_size))
        return [(path, size) for _, path, size in sorted(dated)]

    def _path(self, id_: NodeId) -> Path:
        return self._folder / f"{id_.hex()}{self._kind.suffix}"

    def _touch(self, id_: NodeId) -> None:
        with self._changed:
            if id_ in self._files:
                self._files.move_to_end(id_)
        with contextlib.suppress(OSError):
            os.utime(self._path(id_))

    # Guarded by _changed

    def _is_usable(self, id_: NodeId) -> bool:
        file = self._files.get(id_)
        return file is not None and file.node is not None

    def _add(self, id_: NodeId, file: _File) -> None:
        self._forget(id_)
        self._files[id_] = file
        self._size += file.size

    def _forget(self, id_: NodeId) -> bool:
        file = self._files.pop(id_, None)
        self._size -= 0 if file is None else file.size
        return file is not None

    def _make_room(self, size: int) -> list[NodeId]:
        """Forgets the files used longest ago; the caller removes them."""
        gone = []
        while self._files and self._size + size > self._budget:
            gone.append(next(iter(self._files)))
            self._forget(gone[-1])
        self._removed += gone
        return gone

    def _wake(self) -> None:
        if self._writer is None:
            # Here, not at the start: a stage that never serves has no thread to end.
            self._writer = threading.Thread(target=self._work, name="kv-disk", daemon=True)
            self._writer.start()
        self._changed.notify_all()

    @property
    def _jobs_left(self) -> bool:
        return bool(self._waiting or self._doomed)

    # The thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._jobs_left or self._closed)
                if not self._jobs_left:
                    return
                self._busy = True
                # Removals first: what is stored again must not be removed after it was written.
                doomed, self._doomed = tuple(self._doomed), {}
                job = next(iter(self._waiting.values()), None)
            for id_ in doomed:
                _unlink(self._path(id_))
            if job is not None:
                self._write(*job)

    def _write(self, node: Node, records: Tensor) -> None:
        path, size = self._path(node.id), file_bytes(node, records, self._kind)
        written = size <= self._budget and self._has_space(size)
        if written:
            with self._changed:
                gone = self._make_room(size)
            for id_ in gone:
                _unlink(self._path(id_))
            written = self._try(path, node, records)
        with self._changed:
            if self._waiting.pop(node.id, None) is not None and written:
                self._add(node.id, _File(size, node))
            # Dropped meanwhile, it is among the doomed now.

    def _has_space(self, size: int) -> bool:
        """A full disk is not written to before there is room for some more files."""
        if not self._failing:
            return True
        with contextlib.suppress(OSError):
            return shutil.disk_usage(self._folder).free > _QUEUE * size
        return False

    def _try(self, path: Path, node: Node, records: Tensor) -> bool:
        try:
            write_node(path, node, records, self._kind)
        except OSError as error:
            if not self._failing:
                log.warning("stopped writing folder=%s reason=%s", self._folder, error)
            self._failing = True
            return False
        if self._failing:
            log.warning("writing again folder=%s", self._folder)
        self._failing = False
        return True


def _id_of(path: Path) -> NodeId | None:
    with contextlib.suppress(ValueError):
        return NodeId(bytes.fromhex(path.name.partition(".")[0]))
    return None


def _unlink(path: Path) -> None:
    """A file that cannot be removed is left to the operator: its name stays out of use until it is written anew."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
