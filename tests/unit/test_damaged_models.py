"""Whatever is in a model's folder, it is served right or refused in one line that says why."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from coordinator.errors import ModelUnusable, RingserveError
from stage.attention import RowSegment
from stage.build import build_stage
from stage.config import RingConfig
from stage.model.damage import in_one_line, unusable
from stage.model.load import load_decoder, read_config
from stage.model.slice import RowBatch
from stage.plan import plan

GIB = 2**30
CPU = torch.device("cpu")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DOWN = "model.layers.2.mlp.down_proj.weight"

Damage = Callable[[Path], object]


def config(**changes: Any) -> Damage:
    def apply(folder: Path) -> None:
        kept = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**kept, **changes}))

    return apply


def text(name: str, content: str | bytes) -> Damage:
    raw = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(raw)


def cut(size: int) -> Damage:
    def apply(folder: Path) -> None:
        whole = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(whole[:size])

    return apply


def tensors(change: Callable[[dict[str, Tensor]], object]) -> Damage:
    def apply(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        change(held)
        (folder / WEIGHTS).unlink()
        save_file(held, folder / WEIGHTS, metadata={"format": "pt"})

    return apply


def header(raw: bytes) -> bytes:
    return len(raw).to_bytes(8, "little") + raw


DAMAGES: dict[str, Damage] = {
    "no config": lambda folder: (folder / "config.json").unlink(),
    "config is cut": text("config.json", "{"),
    "config is a list": text("config.json", "[]"),
    "config is null": text("config.json", "null"),
    "config is no text": text("config.json", b"\xff\xfe\x00"),
    "text_config is a word": config(text_config="x"),
    "layers is a word": config(num_hidden_layers="four"),
    "no layers": config(num_hidden_layers=0),
    "layers is huge": config(num_hidden_layers=10**15),
    "layers is large": config(num_hidden_layers=9999),
    "a layer too few": config(num_hidden_layers=3),
    "a layer too many": config(num_hidden_layers=5),
    "hidden is a word": config(hidden_size="x"),
    "hidden cannot be divided": config(hidden_size=65),
    "no heads": config(num_attention_heads=0),
    "heads is negative": config(num_attention_heads=-4),
    "KV heads are not those of the weights": config(num_key_value_heads=3),
    "KV heads is a word": config(num_key_value_heads="2"),
    "vocabulary is another one": config(vocab_size=10),
    "positions is a word": config(max_position_embeddings="8k"),
    "positions is none": config(max_position_embeddings=None),
    "unknown kind": config(model_type="foo"),
    "no kind": config(model_type=None, architectures=None),
    "no decoder": config(model_type="t5"),
    "unknown activation": config(hidden_act="nope"),
    "unknown rope": config(rope_parameters={"rope_type": "bogus"}),
    "rope is a word": config(rope_parameters="x"),
    "epsilon is a word": config(rms_norm_eps="small"),
    "unknown dtype": config(dtype="float13"),
    "layer kinds for fewer layers": config(layer_types=["full_attention"]),
    "quantized": config(quantization_config={"quant_method": "gptq", "bits": 4}),
    "quantization is a word": config(quantization_config="x"),
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "weights are empty": text(WEIGHTS, b""),
    "weights are cut in the header": cut(100),
    "weights are cut in the data": cut(200_000),
    "weights are cut by a byte": cut(-1),
    "weights are garbage": text(WEIGHTS, random.Random(1).randbytes(5000)),
    "weights' header is a list": text(WEIGHTS, header(b"[]")),
    "weights' header holds words": text(WEIGHTS, header(b'{"model.layers.0.x": "y"}')),
    "a tensor is missing": tensors(lambda held: held.pop(DOWN)),
    "a tensor has another shape": tensors(lambda held: held.update({DOWN: torch.ones(5, 128)})),
    "a tensor is packed": tensors(
        lambda held: held.update({DOWN: torch.ones(64, 128, dtype=torch.uint8)})
    ),
    "a tensor is NaN": tensors(lambda held: held[DOWN].fill_(float("nan"))),
    "a tensor overflows": tensors(lambda held: held[DOWN].fill_(float("inf"))),
    "index is cut": text(INDEX, "{"),
    "index is empty": text(INDEX, "{}"),
    "index is a list": text(INDEX, "[]"),
    "index maps nothing": text(INDEX, '{"weight_map": null}'),
    "index names no file": text(INDEX, '{"weight_map": {"model.embed_tokens.weight": null}}'),
    "index names a file that is not there": text(
        INDEX, json.dumps({"weight_map": {f"model.layers.{n}.x": "nope" for n in range(4)}})
    ),
}


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def start(folder: Path) -> None:
    """All that is read of a folder before a ring of it serves, but for its tokenizer."""
    ring = plan(folder, 2, 1, 512, "float32", (GIB, GIB))
    splits = tuple((stage.first, stage.last) for stage in ring.stages)
    for index in range(2):
        build_stage(RingConfig(folder, "m", splits, 1, 512), index, "cpu", lambda _: None)


def lines_of(call: Callable[[], object]) -> list[str]:
    """What it was refused with; nothing when it was not. Errors that are not ours fail the test."""
    try:
        call()
    except RingserveError as error:
        return str(error).splitlines()
    return []


def refusal(folder: Path) -> str:
    with pytest.raises(ModelUnusable) as caught:
        start(folder)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_refused_in_one_line_at_every_entry(name: str, folder: Path) -> None:
    DAMAGES[name](folder)
    assert refusal(folder)
    # Each entry alone, as other callers use it, raises nothing that is not ours.
    for entry in (
        lambda: plan(folder, 1, 1, 512, "float32", (GIB,)),
        lambda: read_config(folder),
        lambda: load_decoder(folder, 0, 4, dtype=torch.float32, device=CPU),
    ):
        assert len(lines_of(entry)) <= 1


def test_the_folder_that_these_damages_are_made_to_is_served(folder: Path) -> None:
    start(folder)


@pytest.mark.parametrize("seed", range(12))
def test_no_scrambled_value_of_a_config_gets_past_the_boundary(seed: int, folder: Path) -> None:
    source = random.Random(seed)
    kept = json.loads((folder / "config.json").read_text())
    odd = [None, "x", -1, 0, 1.5, 10**9, [], {}, [1, "a"], {"a": None}, True]
    for key in source.sample(sorted(kept), 3):
        kept[key] = source.choice(odd)
    (folder / "config.json").write_text(json.dumps(kept))
    assert len(lines_of(lambda: start(folder))) <= 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("a layer too few", "3 layers, but there are weights of layer 3"),
        ("a layer too many", "no weights for layer 4 of 5"),
        ("quantized", "quantized checkpoints are not supported yet"),
        ("a tensor is packed", "quantized checkpoints are not supported yet"),
        ("a tensor is NaN", "not finite"),
        ("a tensor overflows", "not finite"),
        ("weights are cut in the data", "has 200000 of its"),
        ("heads is negative", "num_attention_heads must be a whole number from 1 on, not -4"),
    ],
)
def test_the_line_says_what_is_wrong(name: str, says: str, folder: Path) -> None:
    DAMAGES[name](folder)
    assert says in refusal(folder)


def test_layers_for_multi_token_prediction_may_follow_the_others(folder: Path) -> None:
    config(num_hidden_layers=3, num_nextn_predict_layers=1)(folder)
    plan(folder, 1, 1, 512, "float32", (GIB,))
    assert load_decoder(folder, 0, 3, dtype=torch.float32, device=CPU).n_layers == 3


def test_code_that_comes_with_a_model_is_never_run_nor_asked_about(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object) -> str:
        raise AssertionError("the terminal was asked")

    monkeypatch.setattr("builtins.input", ask)
    (folder / "own.py").write_text("raise SystemExit")
    config(model_type="foo", auto_map={"AutoConfig": "own.Config"})(folder)
    assert "code of its own" in refusal(folder)
    config(model_type="llama", auto_map={"AutoConfig": "own.Config"})(folder)
    start(folder)  # transformers knows this kind itself


def last_logits(folder: Path) -> Tensor:
    whole = RingConfig(folder, "m", ((0, 4),), 1, 512)
    stage, _ = build_stage(whole, 0, "cpu", lambda _: None)
    logits = stage.model.forward(RowBatch((5, 6, 7), (RowSegment(0, 0, 3),), asked=(2,))).logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_of_its_own_is_used_whatever_the_config_says_of_tying(
    folder: Path, tied: bool
) -> None:
    config(tie_word_embeddings=tied)(folder)
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = whole(torch.tensor([[5, 6, 7]])).logits[0, -1]
    assert (last_logits(folder)[0] - expected).abs().max() < 1e-4


def test_a_tied_model_in_one_stage_holds_its_embedding_once_where_nothing_is_packed(
    folder: Path,
) -> None:
    tensors(lambda held: held.pop("lm_head.weight"))(folder)
    config(tie_word_embeddings=True)(folder)
    loaded = load_decoder(folder, 0, 4, dtype=torch.float16, device=CPU)
    head, embedding = (
        loaded.causal_lm.get_output_embeddings(),
        loaded.causal_lm.get_input_embeddings(),
    )
    assert head.weight.data_ptr() == embedding.weight.data_ptr()
    assert last_logits(folder).isfinite().all()


def test_a_bug_behind_the_boundary_leaves_its_traceback_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level(logging.DEBUG, "stage.model.damage"),
        pytest.raises(ModelUnusable, match="m cannot be read: KeyError: 'x'"),
        unusable("m cannot be read"),
    ):
        {}["x"]
    assert caplog.records[0].exc_info is not None


def test_errors_of_ours_and_want_of_memory_pass_the_boundary_as_they_are() -> None:
    for error in (ModelUnusable("mine"), MemoryError(), torch.OutOfMemoryError()):
        with (
            pytest.raises(type(error)) as caught,
            unusable("x", passing=(torch.OutOfMemoryError,)),
        ):
            raise error
        assert caught.value is error


def test_an_error_is_told_in_one_line_of_bounded_length() -> None:
    assert in_one_line(ValueError("first:\n  second\n third")) == "first: second"
    assert in_one_line(RuntimeError()) == "RuntimeError"
    assert len(in_one_line(ValueError("x" * 9999))) < 300
