"""A folder of content-addressed files that outlives the process: chain nodes' rows, and recurrent states at their ends.

Decides what is written, what is removed for the one budget of all kinds, and what of an earlier run may be used. Files
are written and removed by a thread of its own, behind a bounded queue, so that no frame waits for it; what finds no
place in the queue is not on disk, that is all. Whatever is wrong with a file, or with the whole disk, costs a log line
and a miss. Several processes should not share a folder: each would remove what the other one counts on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from coordinator.frames import NodeId
from coordinator.nodes import Node
from stage.kv.node_file import (
    PARTIAL,
    Damaged,
    FileKind,
    Foreign,
    file_bytes,
    read_head,
    read_node,
    write_node,
)

log = logging.getLogger(__name__)

# Files that wait to be written: 200 MB of a small model's nodes in float32, which a disk takes in a second.
_QUEUE = 128
# A disk that was full is written to again when so many files fit, or this part of it is free, where that is less.
_PART = 4
_AT_LEAST = 2  # files
# What the last files may take to be written when the stage ends.
_CLOSE_S = 5.0

# A node, and the suffix of its kind: the file's name.
_Key = tuple[NodeId, str]


@dataclass(frozen=True, slots=True)
class _File:
    size: int
    node: Node | None  # None: it cannot be used, and goes when room is wanted


@dataclass(frozen=True, slots=True)
class _Job:
    node: Node
    data: Tensor
    kind: FileKind

    @property
    def key(self) -> _Key:
        return self.node.id, self.kind.suffix


class DiskTier:
    """One thread calls it; another one, which it owns, writes. Which files there are is in memory: asking is free."""

    def __init__(self, folder: Path, kinds: Sequence[FileKind], budget: int) -> None:
        """Reads the headers of what lies there. Raises OSError when the folder cannot be used at all."""
        self._folder = folder
        self._kinds = {kind.suffix: kind for kind in kinds}
        self._budget = budget
        self._changed = threading.Condition()
        # Guarded by _changed, from here on.
        self._files: OrderedDict[_Key, _File] = OrderedDict()  # used longest ago first
        self._size = 0
        self._waiting: OrderedDict[_Key, _Job] = OrderedDict()
        self._doomed: dict[_Key, None] = {}
        self._removed: list[_Key] = []
        self._closed = False
        self._busy = False
        self._failing = False
        self._writer: threading.Thread | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self._scan()

    @property
    def is_failing(self) -> bool:
        """The last write went wrong."""
        return self._failing

    @property
    def nbytes(self) -> int:
        with self._changed:
            return self._size

    def holds(self, id_: NodeId, kind: FileKind) -> bool:
        with self._changed:
            return self._is_usable((id_, kind.suffix))

    def nodes(self, kind: FileKind) -> tuple[Node, ...]:
        """What can be read, parents first."""
        with self._changed:
            found = [
                file.node
                for (_, suffix), file in self._files.items()
                if suffix == kind.suffix and file.node is not None
            ]
        return tuple(sorted(found, key=lambda node: node.start))

    def node(self, id_: NodeId, kind: FileKind) -> Node | None:
        with self._changed:
            file = self._files.get((id_, kind.suffix))
        return None if file is None else file.node

    def read(self, node: Node, kind: FileKind, into: Tensor) -> bool:
        """Fills `into` with what was written; False, and the file is gone, when it is not that."""
        path = self._path((node.id, kind.suffix))
        try:
            if read_node(path, kind, into) != node:
                raise Damaged("it holds another node")
        except (OSError, Damaged, Foreign) as error:
            log.warning("missed a node file=%s reason=%s", path, error)
            self.drop(node.id, kind)
            return False
        self._touch((node.id, kind.suffix))
        return True

    def write(self, node: Node, kind: FileKind, data: Tensor) -> bool:
        """Has it written some time; False when the queue is full. Nobody may write to `data` any more."""
        job = _Job(node, data, kind)
        with self._changed:
            if self._closed or len(self._waiting) >= _QUEUE:
                return False
            if not self._is_usable(job.key):
                self._waiting.setdefault(job.key, job)
                self._doomed.pop(job.key, None)
                self._wake()
            return True

    def drop(self, id_: NodeId, kind: FileKind) -> None:
        key = (id_, kind.suffix)
        with self._changed:
            waited = self._waiting.pop(key, None) is not None
            if self._forget(key) or waited:
                self._doomed[key] = None
                self._wake()

    def take_removed(self, kind: FileKind) -> tuple[NodeId, ...]:
        """Nodes whose files of this kind went for the budget since this was asked last."""
        with self._changed:
            mine = tuple(id_ for id_, suffix in self._removed if suffix == kind.suffix)
            self._removed = [key for key in self._removed if key[1] != kind.suffix]
        return mine

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
        foreign = self._take_in_other_splits()
        for path, size, kind in self._found():
            id_ = _id_of(path)
            if id_ is None:
                continue
            key = (id_, kind.suffix)
            try:
                node = read_head(path, kind)
                if node.id != id_:
                    raise Damaged("it holds another node than its name says")
            except Foreign:
                foreign += 1
                self._add(key, _File(size, None))
            except (OSError, Damaged) as error:
                done = "removed" if _unlink(path) else "cannot remove"
                log.warning("%s a node file=%s reason=%s", done, path, error)
            else:
                self._add(key, _File(size, node))
        if foreign:
            log.warning("ignored %d files of other rows in folder=%s", foreign, self._folder)
        for key in self._make_room(0):
            _unlink(self._path(key))
        self._removed.clear()  # nobody counted on them yet

    def _take_in_other_splits(self) -> int:
        """Files of other splits of the layers count, and go first: else each new split would leave a disk full."""
        taken = 0
        for path in sorted(self._folder.iterdir()):
            id_, suffix = _id_of(path), path.name[path.name.find(".") :]
            if id_ is None or not any(k.is_of_another_split(suffix) for k in self._kinds.values()):
                continue
            with contextlib.suppress(OSError):
                self._add((id_, suffix), _File(path.stat().st_size, None))
                taken += 1
        return taken

    def _found(self) -> list[tuple[Path, int, FileKind]]:
        """This stage's files and their sizes, the one used longest ago first."""
        dated = []
        for path, kind in self._names():
            with contextlib.suppress(OSError):
                status = path.stat()
                dated.append((status.st_mtime_ns, path, status.st_size, kind))
        return [(path, size, kind) for _, path, size, kind in sorted(dated, key=lambda d: d[:2])]

    def _names(self) -> Iterator[tuple[Path, FileKind]]:
        for suffix, kind in self._kinds.items():
            for rest in self._folder.glob(f"*{suffix}{PARTIAL}"):
                _unlink(rest)
            yield from ((path, kind) for path in self._folder.glob(f"*{suffix}"))

    def _path(self, key: _Key) -> Path:
        id_, suffix = key
        return self._folder / f"{id_.hex()}{suffix}"

    def _touch(self, key: _Key) -> None:
        with self._changed:
            if key in self._files:
                self._files.move_to_end(key)
        with contextlib.suppress(OSError):
            os.utime(self._path(key))

    # Guarded by _changed

    def _is_usable(self, key: _Key) -> bool:
        file = self._files.get(key)
        return file is not None and file.node is not None

    def _add(self, key: _Key, file: _File) -> None:
        self._forget(key)
        self._files[key] = file
        self._size += file.size

    def _forget(self, key: _Key) -> bool:
        file = self._files.pop(key, None)
        self._size -= 0 if file is None else file.size
        return file is not None

    def _make_room(self, size: int) -> list[_Key]:
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
            for key in doomed:
                _unlink(self._path(key))
            if job is not None:
                self._write(job)

    def _write(self, job: _Job) -> None:
        path, size = self._path(job.key), file_bytes(job.node, job.data.nbytes, job.kind)
        written = size <= self._budget and self._has_space(size)
        if written:
            with self._changed:
                gone = self._make_room(size)
            for key in gone:
                _unlink(self._path(key))
            written = self._try(path, job)
        with self._changed:
            if self._waiting.pop(job.key, None) is not None and written:
                self._add(job.key, _File(size, job.node))
            # Dropped meanwhile, it is among the doomed now.

    def _has_space(self, size: int) -> bool:
        """A full disk is not written to before there is room for some more files."""
        if not self._failing:
            return True
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(self._folder)
            return usage.free >= _space_for_more(size, usage.total)
        return False

    def _try(self, path: Path, job: _Job) -> bool:
        try:
            write_node(path, job.node, job.data, job.kind)
        except IsADirectoryError as error:  # somebody made it there; all other files can be written
            log.warning("cannot write a node file=%s reason=%s", path, error.strerror)
            return False
        except OSError as error:
            with contextlib.suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True)  # somebody may have removed it
            if not self._failing:
                self._tell_failing(job, error)
            self._failing = True
            return False
        if self._failing:
            log.warning("writing again folder=%s", self._folder)
        self._failing = False
        return True

    def _tell_failing(self, job: _Job, error: OSError) -> None:
        wanted = 0
        with contextlib.suppress(OSError):
            size = file_bytes(job.node, job.data.nbytes, job.kind)
            wanted = _space_for_more(size, shutil.disk_usage(self._folder).total)
        log.warning(
            "stopped writing folder=%s reason=%s: it goes on once %.1f MiB are free there",
            self._folder,
            error,
            wanted / 2**20,
        )


def _space_for_more(size: int, total: int) -> int:
    """Bytes that are to be free again, by those of a file and of the whole disk."""
    return max(_AT_LEAST * size, min(_QUEUE * size, total // _PART))


def _id_of(path: Path) -> NodeId | None:
    name = path.name.partition(".")[0]
    with contextlib.suppress(ValueError):
        id_ = NodeId(bytes.fromhex(name))
        return id_ if id_.hex() == name else None  # others are no names of ours
    return None


def _unlink(path: Path) -> bool:
    """A file that cannot be removed is left to the operator: its name stays out of use until it is written anew."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True
