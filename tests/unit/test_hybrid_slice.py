"""Slices of models with recurrent layers: rows as exact as attention's, rewound, saved and split at any row."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from coordinator.errors import BrokenInvariant, ModelUnusable
from stage.attention import Numerics, RowSegment
from stage.kv.states import CPU_BLOCK, DEVICE_BLOCK, STATE_ROWS, blocks_kept, states_nbytes
from stage.model.footprint import read_footprint
from stage.model.layer_kinds import BLOCK_ROWS, BLOCKS_KEPT, layer_kinds
from stage.model.recurrent import RecurrentMixer
from stage.model.slice import ModelSlice, RowBatch, load_slice
from stage.numerics import probe_numerics
from stage.plan import plan_footprint

SMALL = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DELTA_NET = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("Qwen3NextConfig", {**DELTA_NET, **EXPERTS, "decoder_sparse_step": 2}),
    "qwen3.5": ("Qwen3_5TextConfig", DELTA_NET),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", {**DELTA_NET, **EXPERTS}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv", "conv"]}),
    "granite-hybrid": (
        "GraniteMoeHybridConfig",
        {
            **MAMBA,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 64,
            "embedding_multiplier": 2.0,
            "logits_scaling": 2.0,
        },
    ),
    "bamba": ("BambaConfig", {**MAMBA, "attn_layer_indices": [1]}),
    "nemotron-h": (
        "NemotronHConfig",
        {
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
        },
    ),
}
SOME = ["qwen3-next", "lfm2", "granite-hybrid"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small random model of each kind."""
    return {name: save_model(tmp_path_factory.mktemp(name), name) for name in MODELS}


def save_model(folder: Path, name: str) -> Path:
    kind, settings = MODELS[name]
    transformers.set_seed(3)
    config = getattr(transformers, kind)(**{**SMALL, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for part in model.modules():
        if isinstance(part, nn.Conv1d):  # contexts that weigh nothing would hide a lost one
            nn.init.normal_(part.weight, std=0.5)
    model.save_pretrained(folder)
    return folder


def load_ring(folder: Path, cuts: Sequence[int], **changes: Any) -> list[ModelSlice]:
    settings = {
        "lanes": 3,
        "max_rows": 700,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        **changes,
    }
    return [load_slice(folder, first, last, **settings) for first, last in pairwise(cuts)]


def run(ring: Sequence[ModelSlice], tokens: Sequence[int], *segments: RowSegment) -> Tensor:
    """All rows' logits of one frame."""
    batch = RowBatch(tuple(tokens), segments, asked=tuple(range(len(tokens))))
    hidden: Tensor | None = None
    for stage in ring[:-1]:
        hidden = stage.forward(batch, hidden).hidden
    logits = ring[-1].forward(batch, hidden).logits
    assert logits is not None
    return logits


def random_tokens(seed: int, count: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, 160) for _ in range(count)]


def whole_model(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_the_whole_models_and_bit_identical_however_cut_drafted_and_split(
    name: str, folders: dict[str, Path]
) -> None:
    n_rows, source = 150, random.Random(4)
    tokens, other = random_tokens(1, n_rows), random_tokens(2, n_rows)
    expected = run(load_ring(folders[name], [0, 4]), tokens, RowSegment(0, 0, n_rows))
    with torch.inference_mode():
        theirs = whole_model(folders[name])(torch.tensor([tokens])).logits[0]
    assert (expected - theirs).abs().max() < 1e-3 * theirs.abs().max()
    for cuts in ([0, 4], [0, 2, 4], [0, 1, 2, 4]):
        ring, done, beside = load_ring(folders[name], cuts), 0, 0
        while done < n_rows:
            width = min(source.choice([1, 1, 1, 2, 3, 5, 16, 33, 40]), n_rows - done)
            if source.random() < 0.3 and done + STATE_ROWS <= n_rows:
                drafts = [5] * source.randrange(1, STATE_ROWS + 1)  # all rejected
                run(ring, drafts, RowSegment(1, done, len(drafts)))
            extra = min(source.choice([0, 1, 7]), n_rows - beside)
            mine, its = RowSegment(1, done, width), RowSegment(2, beside, extra)
            ours, theirs = tokens[done : done + width], other[beside : beside + extra]
            if extra == 0:
                got = run(ring, ours, mine)
            elif done % 2:
                got = run(ring, ours + theirs, mine, its)[:width]
            else:
                got = run(ring, theirs + ours, its, mine)[extra:]
            assert torch.equal(got, expected[done : done + width]), (cuts, done, width, extra)
            done, beside = done + width, beside + extra


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_with_and_without_drafts_are_those_of_transformers(
    name: str, folders: dict[str, Path]
) -> None:
    prompt, count = random_tokens(5, 37), 24
    with torch.inference_mode():
        theirs = whole_model(folders[name]).generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False
        )
    expected = theirs[0, len(prompt) :].tolist()
    ring = load_ring(folders[name], [0, 2, 4])
    for drafts in (0, 4):
        rows = list(prompt)
        last = run(ring, prompt, RowSegment(0, 0, len(prompt)))[-1]
        while len(rows) < len(prompt) + count:
            rows.append(int(last.argmax()))
            wrong = [3] * drafts
            start = len(rows) - 1
            last = run(ring, [rows[-1], *wrong], RowSegment(0, start, 1 + drafts))[0]
        assert rows[len(prompt) :] == expected


@pytest.mark.parametrize("name", SOME)
def test_a_saved_and_a_copied_state_go_on_like_the_lane_they_came_from(
    name: str, folders: dict[str, Path]
) -> None:
    ring = load_ring(folders[name], [0, 1, 4])
    tokens = random_tokens(6, 90)
    at = 2 * CPU_BLOCK + 5
    run(ring, tokens[:at], RowSegment(0, 0, at))
    saved = [stage.states.save(0, at) for stage in ring]
    expected = run(ring, tokens[at:], RowSegment(0, at, 90 - at))
    run(ring, random_tokens(7, 60), RowSegment(1, 0, 60))  # another conversation, then a restore
    for stage, state in zip(ring, saved, strict=True):
        stage.rows.copy_rows(0, 1, at)
        stage.states.load(1, at, state)
        stage.rows.copy_rows(1, 2, at)
        stage.states.copy(1, 2, at)
    for lane in (1, 2):
        got = run(ring, tokens[at:], RowSegment(lane, at, 90 - at))
        assert torch.equal(got, expected)


def test_a_stage_of_recurrent_layers_only_works_and_keeps_no_rows(
    folders: dict[str, Path],
) -> None:
    ring = load_ring(folders["qwen3.5"], [0, 3, 4])
    head, tail = ring
    assert (head.rows.layers, head.states.layers) == (0, 3)
    assert (tail.rows.layers, tail.states.layers) == (1, 0)
    assert head.states.state_nbytes > 0 == tail.states.state_nbytes
    assert probe_numerics(head).exact
    head.rows.copy_rows(0, 1, 100)
    head.rows.clear(0, 0)


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_counts_what_the_slices_allocate(name: str, folders: dict[str, Path]) -> None:
    (stage,) = load_ring(folders[name], [0, 4])
    planned = read_footprint(folders[name], "float32")
    sizes = {"lanes": 0, "block": stage.states.block, "dtype": torch.float32}
    assert sum(planned.state_bytes) == states_nbytes(stage.states.shapes, **sizes)
    assert sum(map(bool, planned.kv_row_bytes)) == stage.rows.layers
    ring = plan_footprint(planned, 2, 3, 600, (2**34, 2**34))
    per_lane = [part.state_bytes_per_lane for part in ring.stages]
    assert sum(per_lane) == sum(planned.state_bytes)
    more = plan_footprint(planned, 2, 4, 600, (2**34, 2**34))
    for few, many, states in zip(ring.stages, more.stages, per_lane, strict=True):
        assert many.needed_bytes - few.needed_bytes == few.kv_bytes_per_lane + states


def test_layers_that_neither_attend_nor_recur_keep_nothing(folders: dict[str, Path]) -> None:
    (stage,) = load_ring(folders["nemotron-h"], [2, 3])
    assert (stage.rows.layers, stage.states.layers) == (0, 0)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("span", [(0, 4), (1, 3)])
def test_the_probe_finds_hybrid_slices_exact_and_touches_the_scratch_lane_only(
    name: str, span: tuple[int, int], folders: dict[str, Path]
) -> None:
    (stage,) = load_ring(folders[name], span)
    hidden = None if span[0] == 0 else torch.randn(20, 64)
    stage.forward(RowBatch(tuple(range(20)), (RowSegment(0, 0, 20),)), hidden)
    before = stage.states.save(0, 20)
    assert probe_numerics(stage).exact
    after = stage.states.save(0, 20)
    pairs = zip(before.tensors, after.tensors, strict=True)
    assert all(torch.equal(old, new) for old, new in pairs)
    assert stage.states.held(stage.states.scratch_lane) == range(1)


def test_the_probe_sees_a_recurrence_that_depends_on_the_call(folders: dict[str, Path]) -> None:
    (stage,) = load_ring(folders["qwen3.5"], [0, 4], numerics=Numerics.FAST)
    report = probe_numerics(stage)
    assert not report.exact
    assert math.isfinite(report.max_difference)


def test_the_probe_sees_a_state_that_goes_wrong(folders: dict[str, Path]) -> None:
    (stage,) = load_ring(folders["lfm2"], [0, 4])
    put = stage.states.put_state
    calls: list[int] = []

    def put_wrongly(layer: int, lane: int, base: int, parts: Sequence[Tensor]) -> None:
        calls.append(base)
        put(layer, lane, base, [part + 1e-6 * len(calls) for part in parts])

    stage.states.put_state = put_wrongly  # type: ignore[method-assign]
    assert not probe_numerics(stage).exact


def test_a_segment_that_starts_where_no_state_is_held_is_a_bug_of_the_caller(
    folders: dict[str, Path],
) -> None:
    ring = load_ring(folders["lfm2"], [0, 4])
    run(ring, random_tokens(8, 100), RowSegment(0, 0, 100))
    with pytest.raises(BrokenInvariant, match="no recurrent state"):
        run(ring, [4], RowSegment(0, 30, 1))
    run(ring, [4], RowSegment(0, 100 - STATE_ROWS, 1))


def test_a_nan_in_one_conversation_reaches_neither_its_neighbour_nor_the_next_one(
    folders: dict[str, Path],
) -> None:
    (tail,) = load_ring(folders["qwen3.5"], [1, 4])
    hidden = torch.randn(10, 64)
    sick = torch.cat((hidden, torch.full((3, 64), float("nan"))))
    batch = RowBatch((4,) * 10, (RowSegment(0, 0, 10),), asked=tuple(range(10)))
    expected = tail.forward(batch, hidden).logits
    assert expected is not None
    both = (RowSegment(1, 0, 10), RowSegment(2, 0, 3))
    got = tail.forward(RowBatch((4,) * 13, both, asked=tuple(range(13))), sick).logits
    assert got is not None
    assert torch.equal(got[:10], expected)
    assert got[10:].isnan().all()
    tail.rows.clear(2, 0)
    tail.states.clear(2)
    again = tail.forward(RowBatch((4,) * 10, (RowSegment(2, 0, 10),), batch.asked), hidden).logits
    assert again is not None
    assert torch.equal(again, expected)


def test_plans_know_blocks_as_slices_do() -> None:
    assert BLOCK_ROWS == {"cpu": CPU_BLOCK, "cuda": DEVICE_BLOCK}
    assert {blocks_kept(block, STATE_ROWS) for block in BLOCK_ROWS.values()} == {BLOCKS_KEPT}


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({}, ("full_attention",) * 3),
        ({"layer_types": ["conv", "mamba", "moe"]}, ("conv", "mamba", "moe")),
        ({"full_attention_interval": 3}, (*["linear_attention"] * 2, "full_attention")),
        ({"attn_layer_indices": [0]}, ("full_attention", "mamba", "mamba")),
        ({"full_attn_idxs": [1]}, ("conv", "full_attention", "conv")),
    ],
)
def test_older_configs_say_in_other_words_which_layers_recur(
    config: dict[str, Any], kinds: tuple[str, ...]
) -> None:
    assert layer_kinds(config, 3) == kinds


def test_a_rejected_draft_leaves_nothing_behind_not_even_a_nan(folders: dict[str, Path]) -> None:
    (middle,) = load_ring(folders["qwen3.5"], [1, 3])
    hidden = torch.randn(12, 64)

    def rows(lane: int, start: int, values: Tensor) -> Tensor | None:
        segment = RowSegment(lane, start, len(values))
        return middle.forward(RowBatch((4,) * len(values), (segment,)), values).hidden

    rows(0, 0, hidden[:10])
    expected = rows(0, 10, hidden[10:])
    rows(1, 0, hidden[:10])
    rows(1, 10, torch.full((5, 64), float("nan")))
    got = rows(1, 10, hidden[10:])
    assert expected is not None
    assert got is not None
    assert torch.equal(got, expected)


class Forgetful(nn.Module):
    """A mixer that starts from nothing in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_idx = 0

    def forward(self, hidden_states: Tensor, cache: Any = None, **_: Any) -> Tensor:
        state = hidden_states.cumsum(1)
        cache.update_recurrent_state(state[:, -1], self.layer_idx)
        return state


def test_a_mixer_that_cannot_be_taken_up_again_is_refused() -> None:
    with pytest.raises(ModelUnusable, match="cannot be taken up"):
        RecurrentMixer(Forgetful(), 4).learn(torch.ones(1, 4, 8))
