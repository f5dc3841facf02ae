"""What several unit tests use: the built-in model's tokenizer, loaded once, and a small stage's rows beside a disk."""

from __future__ import annotations

from array import array
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from coordinator.nodes import Node, node_id, root_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from coordinator.frames import NodeId
    from gateway.chat.tokenizer import ChatTokenizer
    from stage.kv.kept import DiskShelf
    from stage.kv.node_file import FileKind
    from stage.kv.store import HostStore

PLENTY = 2**30


@pytest.fixture(scope="session")
def smollm2(smollm2_dir: Path) -> ChatTokenizer:
    from gateway.chat.tokenizer import load_tokenizer

    return load_tokenizer(smollm2_dir)


class DiskRig:
    """Lane 0 of a small stage holds noise; its rows become nodes, whose files lie in a folder."""

    plenty = PLENTY
    row_bytes = 4 * (2 * 16 + 10)

    def __init__(self, folder: Path) -> None:
        # Here, so that tests of the coordinator alone do without torch.
        import torch

        from stage.kv.node_file import FileKind
        from stage.kv.records import RowRecords
        from stage.kv.rows import KvRows, LayerShape

        self.folder = folder
        self.kind = FileKind("model", 0, 2, "float32", ((2, 8, 8), (1, 4, 6)), "test")
        shapes, cpu = (LayerShape(2, 8, 8), LayerShape(1, 4, 6)), torch.device("cpu")
        self.rows = KvRows(shapes, lanes=2, max_rows=400, dtype=torch.float32, device=cpu)
        for layer, shape in enumerate(shapes):
            key = torch.randn(shape.kv_heads, 400, shape.key_dim)
            value = torch.randn(shape.kv_heads, 400, shape.value_dim)
            self.rows.write(layer, 0, 0, key, value)
        self.records = RowRecords(self.rows, torch.float32, cpu)

    @contextmanager
    def disk(
        self, budget: int = PLENTY, kind: FileKind | None = None, others: Sequence[FileKind] = ()
    ) -> Iterator[DiskShelf]:
        """The folder as one process sees it: its files of rows; `others`: kinds that it also looks after."""
        from stage.kv.disk import DiskTier
        from stage.kv.kept import DiskShelf

        kind = kind or self.kind
        tier = DiskTier(self.folder, (kind, *others), budget)
        try:
            yield DiskShelf(tier, kind, budget)
        finally:
            tier.close()

    def store(self, shelf: DiskShelf | None, budget: int = PLENTY) -> HostStore:
        from stage.kv.store import HostStore

        return HostStore(self.records, budget, shelf)

    def read(self, shelf: DiskShelf, node: Node) -> bool:
        return shelf.read(node.id, lambda found: self.records.empty(found.rows)) is not None

    def written(self, nodes: list[Node]) -> None:
        """Leaves the nodes' files of lane 0 in the folder."""
        with self.disk() as shelf:
            assert self.store(shelf).store(0, nodes) == ()
            assert shelf.flush(10)
            assert all(node.id in shelf for node in nodes)

    def files(self) -> list[Path]:
        return sorted(self.folder.iterdir())

    def file_of(self, node: Node) -> Path:
        return self.folder / f"{node.id.hex()}.0-2.kv"

    def file_bytes(self, node: Node) -> int:
        from stage.kv.node_file import file_bytes

        return file_bytes(node, node.rows * self.row_bytes, self.kind)

    def same_rows(self, end: int) -> bool:
        """Whether lane 1 holds what lane 0 does."""
        return all(
            left.equal(right)
            for layer in range(self.rows.layers)
            for left, right in zip(
                self.rows.view(layer, 0, end), self.rows.view(layer, 1, end), strict=True
            )
        )

    def chain(self, *cuts: int, seed: int = 0) -> list[Node]:
        nodes, parent = [], root_of("model")
        for start, end in pairwise(cuts):
            tokens = array("i", range(seed + start, seed + end))
            nodes.append(Node(node_id(parent, tokens), parent, start, tokens))
            parent = nodes[-1].id
        return nodes

    def ids(self, nodes: list[Node]) -> list[NodeId]:
        return [node.id for node in nodes]


@pytest.fixture
def rig(tmp_path: Path) -> DiskRig:
    return DiskRig(tmp_path)
