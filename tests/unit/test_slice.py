"""A slice computes what the whole model of transformers computes, whatever shares its calls."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from coordinator.errors import BrokenInvariant, ModelUnusable
from stage.attention import Numerics, RowSegment, padded_rows
from stage.kv.rows import SCRATCH_ROWS, KvRows, LayerShape, rows_nbytes, whole_blocks
from stage.model.load import load_decoder
from stage.model.packed import packed_rows
from stage.model.slice import ModelSlice, RowBatch, load_slice

CPU = torch.device("cpu")
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
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama3-rope": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 7}),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 6, "layer_types": ALTERNATING, "query_pre_attn_scalar": 16},
    ),
    "gemma2": ("Gemma2Config", {"sliding_window": 6, "query_pre_attn_scalar": 16}),
    "granite": ("GraniteConfig", {"embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gpt-oss": (
        "GptOssConfig",
        {"num_local_experts": 4, "sliding_window": 6, "rope_parameters": PLAIN_ROPE},
    ),
}
# Row counts fall into classes that depend on a model's sizes, so one model has those of SmolLM2.
SMOLLM2_SHAPE = {
    "vocab_size": 2000,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "initializer_range": 0.05,
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def save_model(folder: Path, kind: str, settings: dict[str, Any], **how: Any) -> Path:
    transformers.set_seed(3)
    config = getattr(transformers, kind)(**{**SMALL, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms of exactly 1 and biases of 0 would hide a missing one
            torch.nn.init.normal_(parameter, mean=0.3, std=0.2)
    model.save_pretrained(folder, **how)
    return folder


def load(folder: Path, first: int, last: int, **changes: Any) -> ModelSlice:
    settings = {"lanes": 3, "max_rows": 700, "dtype": torch.float32, "device": CPU, **changes}
    return load_slice(folder, first, last, **settings)


def load_ring(folder: Path, cuts: Sequence[int]) -> list[ModelSlice]:
    return [load(folder, first, last) for first, last in pairwise(cuts)]


def run(ring: Sequence[ModelSlice], tokens: Sequence[int], *segments: RowSegment) -> Tensor:
    """All rows' logits of one frame."""
    batch = RowBatch(tuple(tokens), segments, asked=tuple(range(len(tokens))))
    hidden: Tensor | None = None
    for stage in ring[:-1]:
        hidden = stage.forward(batch, hidden).hidden
    logits = ring[-1].forward(batch, hidden).logits
    assert logits is not None
    return logits


def entries(stage: ModelSlice, lane: int, rows: int) -> list[Tensor]:
    views = [stage.rows.view(layer, lane, rows) for layer in range(stage.rows.layers)]
    return [tensor.clone() for pair in views for tensor in pair]


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(torch.equal(mine, its) for mine, its in zip(left, right, strict=True))


def random_tokens(seed: int, count: int, vocab_size: int = 160) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, vocab_size) for _ in range(count)]


@pytest.mark.parametrize("name", MODELS)
def test_a_split_model_gives_the_whole_models_logits(name: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, *MODELS[name])
    tokens = random_tokens(1, 40)
    whole = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    with torch.inference_mode():
        expected = whole(torch.tensor([tokens])).logits[0]
    for cuts in ([0, 2, 4], [0, 1, 3, 4]):
        ring = load_ring(folder, cuts)
        parts = [run(ring, tokens[:20], RowSegment(1, 0, 20))]
        run(ring, [5] * 5, RowSegment(1, 20, 5))  # drafts that are all rejected
        parts += [run(ring, tokens[20:21], RowSegment(1, 20, 1))]
        parts += [run(ring, tokens[21:27], RowSegment(1, 21, 6))]
        parts += [run(ring, tokens[27:], RowSegment(1, 27, 13))]
        assert (torch.cat(parts) - expected).abs().max() < 1e-4


@pytest.fixture(scope="module")
def smollm2_shaped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2-shaped")
    return save_model(folder, "LlamaConfig", SMOLLM2_SHAPE)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), "LlamaConfig", {})


@pytest.mark.parametrize("name", ["smollm2", "gemma2", "qwen3-moe", "gpt-oss", "mistral"])
def test_rows_are_bit_identical_however_they_are_cut_and_packed(name: str, tmp_path: Path) -> None:
    smollm2 = ("LlamaConfig", SMOLLM2_SHAPE)
    folder = save_model(tmp_path, *(smollm2 if name == "smollm2" else MODELS[name]))
    n_rows = 560  # past the first block of keys
    whole, split = load_ring(folder, [0, 4]), load_ring(folder, [0, 1, 4])
    tokens, other = random_tokens(2, n_rows), random_tokens(3, n_rows)
    expected = run(whole, tokens, RowSegment(0, 0, n_rows))
    expected_entries = entries(whole[0], 0, n_rows)
    source = random.Random(4)
    for lane, ring in ((1, whole), (2, whole), (0, split)):
        done = neighbour = 0
        while done < n_rows:
            width = min(source.choice([1, 2, 3, 5, 9, 33, 35, 64, 97, 129, 257]), n_rows - done)
            beside = min(source.choice([0, 1, 2, 30]), n_rows - neighbour)
            mine, its = RowSegment(lane, done, width), RowSegment((lane + 1) % 3, neighbour, beside)
            ours, theirs = tokens[done : done + width], other[neighbour : neighbour + beside]
            if beside == 0:
                got = run(ring, ours, mine)
            elif done % 2:
                got = run(ring, ours + theirs, mine, its)[:width]
            else:
                got = run(ring, theirs + ours, its, mine)[beside:]
            assert torch.equal(got, expected[done : done + width]), (lane, done, width, beside)
            done, neighbour = done + width, neighbour + beside
        held = [tensor for stage in ring for tensor in entries(stage, lane, n_rows)]
        assert same(held, expected_entries)


def test_single_rows_are_bit_identical_to_one_prefill(smollm2_shaped: Path) -> None:
    ring = load_ring(smollm2_shaped, [0, 4])
    tokens = random_tokens(5, 40)
    expected = run(ring, tokens, RowSegment(0, 0, 40))
    single = [run(ring, tokens[row : row + 1], RowSegment(1, row, 1)) for row in range(40)]
    assert torch.equal(torch.cat(single), expected)
    assert same(entries(ring[0], 1, 40), entries(ring[0], 0, 40))


def test_a_call_leaves_other_lanes_and_later_rows_alone(llama: Path) -> None:
    ring = load_ring(llama, [0, 4])
    run(ring, random_tokens(6, 30), RowSegment(0, 0, 30))
    before = entries(ring[0], 0, 30)
    run(ring, [7], RowSegment(1, 10, 1))
    run(ring, [7], RowSegment(2, 0, 1))
    assert same(before, entries(ring[0], 0, 30))
    for tensor in entries(ring[0], 1, 20):
        assert tensor[:, 10].any()
        assert not tensor[:, 11:].any()


def test_copied_rows_continue_like_the_rows_they_were_copied_from(llama: Path) -> None:
    ring = load_ring(llama, [0, 4])
    tokens = random_tokens(7, 30)
    run(ring, tokens, RowSegment(0, 0, 30))
    ring[0].rows.copy_rows(0, 2, 20)
    again = run(ring, tokens[20:], RowSegment(2, 20, 10))
    assert torch.equal(again, run(ring, tokens[20:], RowSegment(0, 20, 10)))


def test_what_a_lane_held_before_it_was_cleared_is_never_read(llama: Path) -> None:
    ring = load_ring(llama, [0, 4])
    rows, tokens = ring[0].rows, random_tokens(8, 12)
    expected = run(ring, tokens, RowSegment(0, 0, 12))
    poison = torch.full((2, 40, 16), float("nan"))
    for layer in range(rows.layers):
        rows.write(layer, 1, 0, poison, poison)
    assert run(ring, tokens, RowSegment(1, 0, 12)).isnan().any()  # why lanes are cleared at all
    for layer in range(rows.layers):
        rows.write(layer, 1, 0, poison, poison)
    rows.clear(1, 0)
    assert torch.equal(run(ring, tokens, RowSegment(1, 0, 12)), expected)


def test_only_asked_rows_get_logits(llama: Path) -> None:
    tail = load(llama, 0, 4)
    batch = RowBatch((4, 5, 6), (RowSegment(0, 0, 2), RowSegment(1, 0, 1)), asked=(1,))
    every = run([tail], (4, 5, 6), *batch.segments)
    logits = tail.forward(batch).logits
    assert logits is not None
    assert logits.dtype == torch.float32
    assert torch.equal(logits, every[1:2])
    none = tail.forward(RowBatch((4,), (RowSegment(0, 0, 1),))).logits
    assert none is not None
    assert none.shape == (0, 160)


def test_a_slice_reads_only_the_files_of_its_own_layers(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "LlamaConfig", {}, max_shard_size="60KB")
    whole = load(folder, 0, 4)
    expected = run([whole], [4, 5, 6], RowSegment(0, 0, 3))
    head = load(folder, 0, 2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    mine = ("model.layers.2.", "model.layers.3.", "model.norm.", "lm_head.")
    kept = {file for name, file in index.items() if name.startswith(mine)}
    foreign = set(index.values()) - kept
    assert foreign
    for file in foreign:
        (folder / file).unlink()
    assert torch.equal(run([head, load(folder, 2, 4)], [4, 5, 6], RowSegment(0, 0, 3)), expected)
    with pytest.raises(ModelUnusable):
        load(folder, 0, 2)


def test_loading_reports_progress_up_to_the_slices_own_bytes(llama: Path) -> None:
    seen: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        seen.append((done, total))

    load(llama, 1, 3, progress=note)
    done = [bytes_done for bytes_done, _ in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1][1]
    per_layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
    assert done[-1] == 2 * per_layer * 4


def test_a_slice_in_bfloat16_is_loaded_and_computes_in_it(llama: Path) -> None:
    head, tail = (load(llama, *span, dtype=torch.bfloat16) for span in ((0, 2), (2, 4)))
    hidden = head.forward(RowBatch((4, 5), (RowSegment(0, 0, 2),))).hidden
    assert hidden is not None
    assert hidden.dtype == torch.bfloat16
    logits = tail.forward(RowBatch((4, 5), (RowSegment(0, 0, 2),), asked=(0, 1)), hidden).logits
    assert logits is not None
    assert logits.dtype == torch.float32
    exact = run(load_ring(llama, [0, 4]), [4, 5], RowSegment(0, 0, 2))
    assert (logits - exact).abs().max() < 0.1 * exact.abs().max()


def test_a_missing_tensor_is_named(llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(llama / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    load(tmp_path, 0, 3)
    with pytest.raises(ModelUnusable, match=r"model\.layers\.3\.mlp\.up_proj\.weight"):
        load(tmp_path, 3, 4)


def test_a_tensor_of_a_wrong_shape_is_refused(llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 80}))
    (tmp_path / "model.safetensors").symlink_to(llama / "model.safetensors")
    with pytest.raises(ModelUnusable, match="shape"):
        load(tmp_path, 0, 4)


@pytest.mark.parametrize("span", [(0, 5), (2, 2), (-1, 2), (3, 1)])
def test_layers_that_the_model_lacks_are_refused(llama: Path, span: tuple[int, int]) -> None:
    with pytest.raises(ModelUnusable):
        load_decoder(llama, *span, dtype=torch.float32, device=CPU)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnusable):
        load(tmp_path, 0, 1)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("GPT2Config", {"n_layer": 2, "n_embd": 64, "n_head": 4}),  # learnt positions
        ("JambaConfig", {"num_experts": 2}),  # its recurrence cannot be taken up at a later row
    ],
)
def test_an_architecture_that_no_slice_can_be_made_of_is_refused(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    save_model(tmp_path, kind, settings)
    with pytest.raises(ModelUnusable):
        load(tmp_path, 0, 2)


def test_a_batch_that_its_segments_do_not_cover_does_not_construct() -> None:
    with pytest.raises(ValueError, match="cover"):
        RowBatch((1, 2, 3), (RowSegment(0, 0, 2),))
    with pytest.raises(ValueError, match="outside"):
        RowBatch((1, 2), (RowSegment(0, 0, 2),), asked=(2,))


def test_rows_past_a_lanes_end_are_a_bug_of_the_caller(llama: Path) -> None:
    stage = load(llama, 0, 4, max_rows=10)
    run([stage], [4] * 10, RowSegment(0, 0, 10))
    with pytest.raises(BrokenInvariant):
        run([stage], [4, 4], RowSegment(0, 9, 2))


def test_the_predicted_size_of_the_rows_is_the_allocated_one() -> None:
    same_shapes = [LayerShape(2, 16, 16)] * 3
    mixed = [LayerShape(2, 16, 16), LayerShape(1, 24, 16)]
    for shapes in (same_shapes, mixed):
        rows = KvRows(shapes, lanes=2, max_rows=600, dtype=torch.float32, device=CPU)
        views = [
            (lane, rows.view(layer, lane, SCRATCH_ROWS if lane == 2 else whole_blocks(600)))
            for layer in range(len(shapes))
            for lane in range(3)
        ]
        held = sum(tensor.nbytes for _, pair in views for tensor in pair)
        assert held == rows_nbytes(shapes, lanes=2, max_rows=600, dtype=torch.float32)


def test_paddings_are_multiples_of_four_rows() -> None:
    assert [padded_rows(rows) for rows in (1, 3, 4, 5, 33)] == [4, 4, 4, 8, 36]


def test_packed_layers_are_called_with_few_row_counts_each_of_which_costs_memory() -> None:
    counts = [packed_rows(rows) for rows in range(1, 257)]
    assert len(set(counts)) == 16 + 4 * 8
    assert all(rows <= count <= rows * 9 / 8 for rows, count in enumerate(counts, start=1))
    assert all(count % 4 == 0 for count in counts[3::4])  # paddings stay what they are


def test_fast_numerics_give_the_same_answer_up_to_rounding(llama: Path) -> None:
    tokens = random_tokens(9, 21)
    exact = run(load_ring(llama, [0, 4]), tokens, RowSegment(0, 0, 21))
    fast = load(llama, 0, 4, numerics=Numerics.FAST)
    parts = [run([fast], tokens[:20], RowSegment(0, 0, 20))]
    parts += [run([fast], tokens[20:], RowSegment(0, 20, 1))]
    assert (torch.cat(parts) - exact).abs().max() < 1e-4
