"""The numerics probe says what is true of a slice, and touches no user's rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from stage.attention import Numerics, RowSegment
from stage.cores import Cores
from stage.model.activations import SteadyActivation
from stage.model.packed import can_pack
from stage.model.slice import ModelSlice, RowBatch, load_slice
from stage.numerics import NumericsReport, probe_cores, probe_numerics

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


def save_llama(folder: Path, **settings: Any) -> Path:
    transformers.set_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.1,
        **settings,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load(
    folder: Path, first: int = 0, last: int = 3, numerics: Numerics = Numerics.EXACT
) -> ModelSlice:
    sizes = {"lanes": 2, "max_rows": 64}
    return load_slice(
        folder, first, last, **sizes, dtype=torch.float32, device=CPU, numerics=numerics
    )


@pytest.mark.parametrize("span", [(0, 3), (0, 1), (1, 2), (1, 3)])
def test_padded_calls_are_found_exact_on_every_kind_of_slice(
    folder: Path, span: tuple[int, int]
) -> None:
    report = probe_numerics(load(folder, *span))
    assert report == NumericsReport(exact=True, max_difference=0.0)
    assert str(report) == "exact (bit-identical)"


@pytest.mark.parametrize("span", [(0, 3), (0, 1), (1, 2), (1, 3)])
def test_without_paddings_the_probe_sees_that_rows_depend_on_the_shape(
    folder: Path, span: tuple[int, int]
) -> None:
    report = probe_numerics(load(folder, *span, numerics=Numerics.FAST))
    assert not report.exact
    assert 0.0 < report.max_difference < 1e-3


def test_a_report_names_the_largest_difference() -> None:
    report = NumericsReport(exact=False, max_difference=3.1e-05)
    assert str(report) == "shape-dependent (max difference 3.1e-05)"


def test_the_probe_notices_a_call_whose_rows_mix(folder: Path) -> None:
    model = load(folder)
    layer = model.decoder.causal_lm.base_model.layers[1]
    # A fault that no padding hides: each row gets a trace of its call's mean.
    layer.register_forward_hook(lambda _module, _args, out: out + 1e-6 * out.mean(1, keepdim=True))
    assert not probe_numerics(model).exact


def test_the_probe_notices_rows_that_become_nan(folder: Path) -> None:
    model = load(folder)
    layer = model.decoder.causal_lm.base_model.layers[1]
    layer.register_forward_hook(lambda _module, _args, out: out * float("nan"))
    assert probe_numerics(model) == NumericsReport(exact=False, max_difference=math.inf)


def test_the_probe_leaves_users_lanes_alone_and_its_own_empty(folder: Path) -> None:
    model = load(folder)
    rows = model.rows
    for lane in (0, 1):
        model.forward(RowBatch(tuple(range(20)), (RowSegment(lane, 0, 20),)))
    before = [rows.view(layer, lane, 64)[0].clone() for layer in range(3) for lane in (0, 1)]
    probe_numerics(model)
    after = [rows.view(layer, lane, 64)[0] for layer in range(3) for lane in (0, 1)]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert not any(rows.view(layer, rows.scratch_lane, 1024)[0].any() for layer in range(3))


def test_positions_that_depend_on_the_longest_row_are_never_called_exact(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    model = load(save_llama(tmp_path, rope_parameters=rope, max_position_embeddings=64))
    assert not probe_numerics(model).exact


@pytest.mark.parametrize("threads", [3, 5, 7])
def test_an_activations_rows_do_not_depend_on_their_number_with_many_threads(threads: int) -> None:
    rows = torch.randn(1, 512, 1536) * 2
    steady = SteadyActivation(torch.nn.SiLU())
    torch.set_num_threads(threads)
    assert torch.equal(steady(rows[:, :97]), steady(rows)[:, :97])
    assert torch.equal(steady(rows[:, :1]), steady(rows)[:, :1])
    torch.set_num_threads(1)
    assert torch.allclose(steady(rows), torch.nn.functional.silu(rows), atol=1e-6)


@pytest.mark.skipif(not can_pack(torch.float32, CPU), reason="torch was built without oneDNN")
def test_packed_linears_agree_with_the_layers_they_are_made_of() -> None:
    from stage.model.packed import PackedLinear

    linear = torch.nn.Linear(96, 40)
    rows = torch.randn(1, 7, 96)
    with torch.inference_mode():
        assert (PackedLinear(linear)(rows) - linear(rows)).abs().max() < 1e-5


def test_rows_that_lent_cores_computed_are_those_of_the_stages_own(folder: Path) -> None:
    slice_ = load(folder)
    assert probe_cores(slice_, Cores(shared=1, alone=2))
    assert torch.get_num_threads() == 1


def test_cores_that_change_a_row_are_not_lent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slice_ = load(folder)
    forward = slice_.decoder.causal_lm.base_model.norm.forward

    def rounds_by_threads(rows: torch.Tensor) -> torch.Tensor:
        return forward(rows) * (1.0 + 1e-6 * torch.get_num_threads())

    monkeypatch.setattr(slice_.decoder.causal_lm.base_model.norm, "forward", rounds_by_threads)
    assert not probe_cores(slice_, Cores(shared=1, alone=2))
