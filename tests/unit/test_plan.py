"""A ring is cut and refused by arithmetic alone, before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from coordinator.errors import InvalidSetting, ModelDoesNotFit, ModelUnusable
from stage.host_memory import available_bytes
from stage.kv.rows import BLOCK_ROWS, LayerShape, rows_nbytes
from stage.kv.rows import SCRATCH_ROWS as KV_SCRATCH_ROWS
from stage.model.footprint import DTYPE_BYTES, Footprint, read_footprint
from stage.plan import ROW_STEP, SCRATCH_ROWS, Plan, balance, plan, plan_footprint

GIB = 2**30
PLENTY = 64 * GIB
CONFIG = {
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 2048,
}


def footprint(layers: int = 8, **changes: object) -> Footprint:
    """A model of a few GiB whose parts are easy to add up."""
    model = Footprint(
        name="model",
        dtype="float32",
        layer_bytes=(GIB // 4,) * layers,
        kv_row_bytes=(1024,) * layers,
        embedding_bytes=GIB // 8,
        head_bytes=GIB // 8,
        norm_bytes=64,
        tied=False,
        hidden=64,
        intermediate=256,
        vocabulary=1000,
        max_positions=65_536,
    )
    return dataclasses.replace(model, **changes)


def write_model(folder: Path, *, head: bool, config: dict[str, object] | None = None) -> Path:
    tensors = {
        "model.embed_tokens.weight": np.zeros((100, 16), np.float16),
        "model.norm.weight": np.zeros(16, np.float16),
        "model.visual.patch.weight": np.zeros((64, 64), np.float16),
    }
    for layer in range(4):
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = np.zeros((32, 16), np.float16)
        tensors[f"model.layers.{layer}.packed"] = np.zeros(10, np.int8)
    if head:
        tensors["lm_head.weight"] = np.zeros((100, 16), np.float16)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or CONFIG), encoding="utf-8")
    return folder


def test_weights_are_counted_in_the_dtype_they_are_loaded_in(tmp_path: Path) -> None:
    model = read_footprint(write_model(tmp_path, head=True), "float32")
    assert model.layer_bytes == (32 * 16 * 4 + 10,) * 4
    assert (model.embedding_bytes, model.head_bytes, model.norm_bytes) == (6400, 6400, 64)
    half = read_footprint(tmp_path, "bfloat16")
    assert half.layer_bytes == (32 * 16 * 2 + 10,) * 4


def test_a_tied_head_is_counted_on_the_first_stage_and_on_the_tail(tmp_path: Path) -> None:
    ring = plan(write_model(tmp_path, head=False), 2, 1, 512, "float32", (PLENTY, PLENTY))
    layers = 2 * (32 * 16 * 4 + 10)
    assert [stage.weight_bytes for stage in ring.stages] == [layers + 6400, layers + 6400 + 64]


@pytest.mark.parametrize(
    ("device", "dtype", "copies"),
    [("cpu", "float32", 2), ("cpu", "float16", 1), ("cuda", "float32", 1)],
)
def test_a_single_stage_holds_a_tied_head_twice_where_matrices_are_laid_out_anew(
    tmp_path: Path, device: str, dtype: str, copies: int
) -> None:
    folder = write_model(tmp_path, head=False)
    ring = plan(folder, 1, 1, 512, dtype, (PLENTY,), device=device)
    size = DTYPE_BYTES[dtype]
    layers = 4 * (32 * 16 * size + 10)
    assert ring.stages[0].weight_bytes == layers + copies * 1600 * size + 16 * size


@pytest.mark.parametrize("rows", [1, 512, 513, 2048])
def test_rows_take_what_the_stages_really_allocate(tmp_path: Path, rows: int) -> None:
    ring = plan(write_model(tmp_path, head=True), 2, 3, rows, "float32", (PLENTY, PLENTY))
    shape = LayerShape(kv_heads=2, key_dim=4, value_dim=4)
    allocated = rows_nbytes([shape] * 2, lanes=3, max_rows=rows, dtype=torch.float32)
    scratch = rows_nbytes([shape] * 2, lanes=0, max_rows=rows, dtype=torch.float32)
    assert 3 * ring.stages[0].kv_bytes_per_lane == allocated - scratch
    assert (ROW_STEP, SCRATCH_ROWS) == (BLOCK_ROWS, KV_SCRATCH_ROWS)


def test_layers_without_attention_keep_no_rows(tmp_path: Path) -> None:
    kinds = ["linear_attention", "sliding_attention", "conv", "full_attention"]
    folder = write_model(tmp_path, head=True, config={**CONFIG, "layer_types": kinds})
    assert [bool(row) for row in read_footprint(folder, "float32").kv_row_bytes] == [0, 1, 0, 1]


def test_the_plan_says_how_many_rows_a_gib_of_the_store_holds() -> None:
    # Eight layers of 1 KiB a row on two stages: the store of either holds 4 KiB for each row.
    planned = plan_footprint(footprint(8), 2, 4, 1000, (PLENTY, PLENTY))
    assert planned.store_rows_per_gib == GIB // 4096
    recurrent = plan_footprint(footprint(8, kv_row_bytes=(0,) * 8), 2, 4, 1000, (PLENTY, PLENTY))
    assert recurrent.store_rows_per_gib == 0


def test_the_text_part_of_a_multimodal_config_is_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path, head=True, config={"text_config": CONFIG})
    assert read_footprint(folder, "float32").n_layers == 4


def test_equal_layers_are_split_evenly_and_the_tail_gets_the_smaller_part() -> None:
    assert balance(footprint(8), 1, 512, (PLENTY,) * 2) == (0, 4, 8)
    assert balance(footprint(7), 1, 512, (PLENTY,) * 2) == (0, 4, 7)
    assert balance(footprint(8), 1, 512, (PLENTY,) * 8) == tuple(range(9))


def test_a_smaller_stage_gets_fewer_layers() -> None:
    assert balance(footprint(8), 1, 512, (PLENTY, 5 * GIB // 4)) == (0, 6, 8)


@settings(max_examples=60, deadline=None)
@given(
    layers=st.lists(st.integers(1, 50), min_size=3, max_size=9),
    stages=st.integers(1, 3),
    head=st.integers(0, 60),
)
def test_no_other_contiguous_split_is_better_balanced(
    layers: list[int], stages: int, head: int
) -> None:
    model = footprint(
        len(layers),
        layer_bytes=tuple(n * 2**20 for n in layers),
        head_bytes=head * 2**20,
    )

    def load(cuts: tuple[int, ...]) -> tuple[int, int]:
        parts = [sum(layers[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
        return max(parts), max([*parts[:-1], parts[-1] + head])

    all_cuts = [
        (0, *inner, len(layers)) for inner in combinations(range(1, len(layers)), stages - 1)
    ]
    assert load(balance(model, 1, 512, (PLENTY,) * stages)) == min(load(cuts) for cuts in all_cuts)


def test_a_ring_that_fits_passes_and_says_what_is_free() -> None:
    ring = plan_footprint(footprint(), 2, 4, 8192, (4 * GIB, 4 * GIB))
    ring.check()
    assert all(stage.free_bytes == 4 * GIB - stage.needed_bytes > 0 for stage in ring.stages)


def test_a_ring_that_does_not_fit_is_refused_in_one_line_that_names_what_would() -> None:
    ring = plan_footprint(footprint(), 2, 4, 65_536, (2 * GIB, 2 * GIB))
    with pytest.raises(ModelDoesNotFit) as caught:
        ring.check()
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "stage ",
        "has 2.0 GiB",
        "4 x 65536 rows",
        f"{ring.rows_that_fit} rows in 4 lanes",
    ):
        assert part in message


def test_weights_alone_that_do_not_fit_are_told_so() -> None:
    ring = plan_footprint(footprint(), 2, 1, 512, (GIB, GIB))
    assert (ring.rows_that_fit, ring.lanes_that_fit, ring.largest_context) == (0, 0, 0)
    with pytest.raises(ModelDoesNotFit, match="no context fits"):
        ring.check()


def test_more_rows_than_the_model_has_positions_are_refused() -> None:
    ring = plan_footprint(footprint(max_positions=2048), 2, 1, 4096, (PLENTY, PLENTY))
    with pytest.raises(ModelDoesNotFit, match="at most 2048 rows"):
        ring.check()


def _replanned(ring: Plan, *, lanes: int, rows: int) -> Plan:
    memory = tuple(stage.memory_bytes for stage in ring.stages)
    return plan_footprint(footprint(), len(ring.stages), lanes, rows, memory)


def test_what_the_plan_says_fits_does_fit_and_one_step_more_does_not() -> None:
    ring = plan_footprint(footprint(), 2, 4, 8192, (2 * GIB, 2 * GIB))
    assert _replanned(ring, lanes=4, rows=ring.rows_that_fit).fits
    assert not _replanned(ring, lanes=4, rows=ring.rows_that_fit + ROW_STEP).fits
    assert _replanned(ring, lanes=ring.lanes_that_fit, rows=8192).fits
    assert not _replanned(ring, lanes=ring.lanes_that_fit + 1, rows=8192).fits
    assert _replanned(ring, lanes=1, rows=ring.largest_context).fits


def test_unasked_rows_are_what_the_model_the_limit_and_the_memory_allow() -> None:
    assert plan_footprint(footprint(), 2, 1, None, (PLENTY,) * 2).max_rows == 8192
    assert plan_footprint(footprint(max_positions=900), 2, 1, None, (PLENTY,) * 2).max_rows == 900
    assert (
        plan_footprint(footprint(), 2, 1, None, (PLENTY,) * 2, rows_limit=32_768).max_rows == 32_768
    )
    tight = plan_footprint(footprint(), 2, 64, None, (2 * GIB,) * 2)
    assert tight.max_rows == tight.rows_that_fit < 8192
    tight.check()


@pytest.mark.parametrize(
    ("stages", "lanes", "rows", "memory", "setting"),
    [
        (0, 1, 512, (), "stages"),
        (9, 1, 512, (PLENTY,) * 9, "stages"),
        (2, 0, 512, (PLENTY,) * 2, "lanes"),
        (2, 1, 0, (PLENTY,) * 2, "max_rows"),
        (2, 1, 512, (PLENTY,), "memory_per_stage"),
    ],
)
def test_impossible_settings_are_named(
    stages: int, lanes: int, rows: int, memory: tuple[int, ...], setting: str
) -> None:
    with pytest.raises(InvalidSetting) as caught:
        plan_footprint(footprint(), stages, lanes, rows, memory)
    assert caught.value.setting == setting


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="int3"):
        read_footprint(tmp_path, "int3")


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable, match=r"config\.json"):
        read_footprint(tmp_path, "float32")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    with pytest.raises(ModelUnusable, match="safetensors"):
        read_footprint(tmp_path, "float32")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ModelUnusable, match="damaged"):
        read_footprint(tmp_path, "float32")


def test_a_model_with_a_missing_layer_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, head=True, config={**CONFIG, "num_hidden_layers": 5})
    with pytest.raises(ModelUnusable, match="layer 4 of 5"):
        read_footprint(folder, "float32")


def test_a_container_with_less_memory_than_its_machine_is_believed(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(
        "MemTotal: 9 kB\nMemAvailable:    4096 kB\n", encoding="ascii"
    )
    assert available_bytes(tmp_path / "meminfo", tmp_path) == 4096 * 1024
    for name, text in (
        ("max", "1000000"),
        ("current", "700000"),
        ("stat", "anon 9\ninactive_file 50"),
    ):
        (tmp_path / f"memory.{name}").write_text(text, encoding="ascii")
    assert available_bytes(tmp_path / "meminfo", tmp_path) == 300_050
    (tmp_path / "memory.max").write_text("max\n", encoding="ascii")
    assert available_bytes(tmp_path / "meminfo", tmp_path) == 4096 * 1024
