"""Rows that go from a GPU to host memory and back are the same, bit for bit."""

from __future__ import annotations

from array import array

import pytest
import torch

from coordinator.nodes import Node, node_id, root_of
from stage.kv import store as store_module
from stage.kv.records import RowRecords
from stage.kv.rows import KvRows, LayerShape
from stage.kv.store import HostStore

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

SHAPES = (LayerShape(2, 64, 64), LayerShape(1, 32, 48))


@pytest.mark.parametrize("staged_rows", [50, 10_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_come_back_to_the_device_as_they_left_it(
    dtype: torch.dtype, staged_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda:0")
    rows = KvRows(SHAPES, lanes=2, max_rows=256, dtype=dtype, device=device)
    for layer, shape in enumerate(SHAPES):
        key = torch.randn(shape.kv_heads, 256, shape.key_dim, device=device).to(dtype)
        value = torch.randn(shape.kv_heads, 256, shape.value_dim, device=device).to(dtype)
        rows.write(layer, 0, 0, key, value)
    records = RowRecords(rows, dtype, device)
    monkeypatch.setattr(store_module, "_STAGING_BYTES", staged_rows * records.row_bytes)
    store = HostStore(records, 2**30)
    nodes, parent = [], root_of("model")
    for start in range(0, 256, 64):
        tokens = array("i", range(start, start + 64))
        nodes.append(Node(node_id(parent, tokens), parent, start, tokens))
        parent = nodes[-1].id
    ids = [node.id for node in nodes]
    assert store.store(0, nodes) == ()
    before = [part.clone() for layer in range(2) for part in rows.view(layer, 0, 256)]
    rows.clear(0, 0)
    assert store.fetch(ids) == ()
    store.load(1, 0, 250, ids)
    after = [part for layer in range(2) for part in rows.view(layer, 1, 256)]
    for left, right in zip(before, after, strict=True):
        assert torch.equal(left[:, :250], right[:, :250])
        assert not right[:, 250:].any()
    assert store.nbytes == 256 * records.row_bytes
