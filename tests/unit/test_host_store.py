"""Rows in host memory: what is loaded is what was stored, bit for bit, and the budget holds."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest
import torch

from coordinator.frames import NodeId
from coordinator.nodes import Node, node_id, root_of
from stage.kv import store as store_module
from stage.kv.records import RowRecords
from stage.kv.rows import KvRows, LayerShape
from stage.kv.store import HostStore, _batches

ROOT = root_of("model")
ALIKE = (LayerShape(2, 8, 8),) * 3
UNLIKE = (LayerShape(2, 8, 8), LayerShape(1, 4, 6), LayerShape(3, 2, 5))
WIDTH = 3 * 2 * 16  # of ALIKE


def kv_rows(shapes=ALIKE, dtype: torch.dtype = torch.float32, max_rows: int = 200) -> KvRows:
    """Lanes 0 and 2 hold noise up to their last row."""
    rows = KvRows(shapes, lanes=3, max_rows=max_rows, dtype=dtype, device=torch.device("cpu"))
    for layer, shape in enumerate(shapes):
        for lane in (0, 2):
            key = torch.randn(shape.kv_heads, max_rows, shape.key_dim).to(dtype)
            value = torch.randn(shape.kv_heads, max_rows, shape.value_dim).to(dtype)
            rows.write(layer, lane, 0, key, value)
    return rows


def host_store(rows: KvRows, budget: int = 2**30, dtype: torch.dtype = torch.float32) -> HostStore:
    return HostStore(RowRecords(rows, dtype, torch.device("cpu")), budget)


def chain(*cuts: int, seed: int = 0) -> list[Node]:
    """Nodes over rows [cuts[0], cuts[1]), [cuts[1], cuts[2]), ..."""
    nodes, parent = [], ROOT
    for start, end in pairwise(cuts):
        tokens = array("i", range(seed + start, seed + end))
        nodes.append(Node(node_id(parent, tokens), parent, start, tokens))
        parent = nodes[-1].id
    return nodes


def ids(nodes: list[Node]) -> list[NodeId]:
    return [node.id for node in nodes]


def load(store: HostStore, lane: int, start: int, end: int, nodes: list[Node]) -> None:
    assert store.fetch(ids(nodes)) == ()
    store.load(lane, start, end, ids(nodes))
    store.release()


def taken(rows: KvRows, lane: int, start: int, end: int) -> list[torch.Tensor]:
    """Copies of the rows' keys and values, layer by layer."""
    return [
        part[:, start:].clone()
        for layer in range(rows.layers)
        for part in rows.view(layer, lane, end)
    ]


@pytest.mark.parametrize("shapes", [ALIKE, UNLIKE], ids=["alike", "unlike"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("start", "end"), [(0, 150), (0, 64), (10, 100), (64, 128), (70, 71)])
def test_loaded_rows_are_the_stored_ones_and_no_other_row_changes(
    shapes: tuple[LayerShape, ...], dtype: torch.dtype, start: int, end: int
) -> None:
    rows = kv_rows(shapes, dtype)
    store = host_store(rows, dtype=dtype)
    nodes = chain(0, 64, 128, 150)
    stored = taken(rows, 0, start, end)
    assert store.store(0, nodes) == ()
    rows.clear(0, 0)  # nodes are copies: their lane goes on without them
    rows.copy_rows(2, 1, 200)
    load(store, 1, start, end, [n for n in nodes if n.start < end and n.end > start])
    assert all(map(torch.equal, taken(rows, 1, start, end), stored))
    assert not any(map(torch.equal, taken(rows, 2, start, end), stored))
    for first, last in ((0, start), (end, 200)):
        assert all(map(torch.equal, taken(rows, 1, first, last), taken(rows, 2, first, last)))


def test_rows_are_kept_bit_for_bit_even_where_they_are_not_numbers() -> None:
    rows = kv_rows()
    keys, _ = rows.view(0, 0, 64)
    keys.view(torch.int32)[:, 3] = 0x7FC01234  # a NaN with a payload
    keys[:, 4] = -0.0
    store = host_store(rows)
    before = taken(rows, 0, 0, 64)
    store.store(0, chain(0, 64))
    load(store, 1, 0, 64, chain(0, 64))
    for left, right in zip(before, taken(rows, 1, 0, 64), strict=True):
        assert torch.equal(left.view(torch.int32), right.view(torch.int32))


def test_what_was_loaded_is_cleared_behind_an_opening_like_what_was_computed() -> None:
    rows = kv_rows()
    store = host_store(rows)
    nodes = chain(0, 64, 128)
    store.store(0, nodes)
    load(store, 1, 0, 128, nodes)
    rows.clear(1, 100)
    assert all(map(torch.equal, taken(rows, 1, 0, 100), taken(rows, 0, 0, 100)))
    assert not any(part.any() for part in taken(rows, 1, 100, 128))


def test_bytes_are_counted_and_what_does_not_fit_is_lost() -> None:
    row_bytes = 4 * WIDTH
    store = host_store(kv_rows(), budget=100 * row_bytes)
    nodes = chain(0, 64, 128)
    assert store.capacity_rows == 100
    assert store.store(0, nodes) == (nodes[1].id,)
    assert store.nbytes == 64 * row_bytes
    assert store.missing(ids(nodes)) == (nodes[1].id,)
    assert store.fetch(ids(nodes)) == (nodes[1].id,)
    small = chain(0, 36, seed=500)
    assert store.store(0, small) == ()
    assert store.nbytes == store.budget
    store.drop([nodes[0].id, NodeId(bytes(16))])
    assert store.nbytes == 36 * row_bytes
    assert store.missing(ids(nodes)) == tuple(ids(nodes))
    assert store.store(0, [nodes[1]]) == ()
    assert len(store) == 2


def test_a_node_stored_twice_is_counted_once() -> None:
    store = host_store(kv_rows())
    for _ in range(2):
        store.store(0, chain(0, 64))
    assert store.nbytes == 64 * 4 * WIDTH


class NoLayers(KvRows):
    """Of a stage whose layers keep no rows."""

    def __init__(self) -> None:
        self.layers = 0
        self.scratch_lane = 1


def test_a_stage_without_attention_layers_keeps_nodes_of_no_bytes() -> None:
    store = host_store(NoLayers(), budget=1)
    nodes = chain(0, 64, 100)
    assert store.store(0, nodes) == ()
    assert (store.nbytes, store.missing(ids(nodes))) == (0, ())
    assert store.capacity_rows >= 2**30
    load(store, 0, 10, 90, nodes)
    store.drop(ids(nodes[:1]))
    assert store.missing(ids(nodes)) == (nodes[0].id,)


def test_a_store_without_a_budget_promises_nothing() -> None:
    for rows in (kv_rows(), NoLayers()):
        assert host_store(rows, budget=0).capacity_rows == 0


def test_rows_go_through_staging_in_order_and_in_few_parts() -> None:
    parts = [torch.arange(n)[:, None] for n in (3, 4, 1, 9)]
    batches = list(_batches(parts, 8))
    assert [sum(map(len, batch)) for batch in batches] == [8, 8, 1]
    assert torch.equal(torch.cat([part for batch in batches for part in batch]), torch.cat(parts))
    assert len(list(_batches(parts, 17))) == 1


class FarRecords(RowRecords):
    """Acts as if the rows lay on a device that is not the CPU."""

    def empty(self, rows: int, *, pinned: bool = False) -> torch.Tensor:
        return super().empty(rows)


def test_rows_that_pass_through_staging_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_STAGING_BYTES", 50 * 4 * WIDTH)
    rows = kv_rows()
    records = FarRecords(rows, torch.float32, torch.device("cpu"))
    store = HostStore(records, 2**30)
    nodes = chain(0, 64, 128)
    store.store(0, nodes)
    records.device = torch.device("meta")
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_: self.clone())
    load(store, 1, 5, 120, nodes)
    monkeypatch.undo()
    assert all(map(torch.equal, taken(rows, 1, 5, 120), taken(rows, 0, 5, 120)))
