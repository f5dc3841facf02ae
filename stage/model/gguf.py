"""Turns one llama-architecture GGUF file into a Hugging Face model folder.

The folder holds fp32 safetensors, config, tokenizer and chat template.

It decides how GGUF names, head order and tokenizer tables map to what `transformers` reads. Weights are dequantized
with the `gguf` package and written as they are: nothing is requantized, and a tied output head is not written twice.
It may not touch the network or the cache: `embedded.py` and the CLI say where the file comes from and where it goes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import quants
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from coordinator.errors import ModelUnusable
from stage.model.damage import unusable

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of the whole that is done, 0 to 1."""

_WHOLE_MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# GGUF's token types; control tokens (3) are the special ones, user-defined ones (4) are matched whole but kept in text.
_CONTROL, _USER_DEFINED = 3, 4


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The hyperparameters of a llama-architecture model, as the GGUF states them."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_positions: int
    rope_theta: float
    rms_epsilon: float
    tied: bool


def convert_gguf(source: Path, target: Path, progress: Progress) -> None:
    """Writes the model of `source` into the existing folder `target`.

    Raises ModelUnusable if the file is not a llama-architecture GGUF with a byte-level BPE tokenizer. A failure
    leaves a partial folder behind: the caller converts into a scratch folder and renames it.
    """
    with unusable(f"{source.name} cannot be converted"):
        _convert(source, target, progress)


def _convert(source: Path, target: Path, progress: Progress) -> None:
    fields = _Fields(source)
    shape = read_shape(fields)
    _write_json(target / "config.json", _config(shape, fields))
    _write_json(target / "generation_config.json", _token_roles(fields))
    progress("tokenizer", 0.02)
    build_tokenizer(fields).save_pretrained(target)
    save_file(
        dict(_weights(fields, shape, progress)), target / "model.safetensors", {"format": "pt"}
    )
    progress("weights written", 1.0)


class _Fields:
    """A GGUF file's metadata by key, and its tensors."""

    def __init__(self, path: Path) -> None:
        with unusable(f"{path.name} is not a readable GGUF file"):
            self._reader = gguf.GGUFReader(path)
        self.name = path.name
        self.tensors = self._reader.tensors
        self._require("general.architecture", "llama")
        self._require("tokenizer.ggml.model", "gpt2")
        self._require("tokenizer.ggml.pre", "smollm")

    def get(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelUnusable(f"{self.name} lacks the GGUF field {key}")
        return value

    def _require(self, key: str, wanted: str) -> None:
        found = self.need(key)
        if found != wanted:
            raise ModelUnusable(
                f"{self.name} has {key} {found!r}; only {wanted!r} can be converted"
            )


def read_shape(fields: _Fields) -> LlamaShape:
    hidden, heads = fields.need("llama.embedding_length"), fields.need("llama.attention.head_count")
    return LlamaShape(
        layers=fields.need("llama.block_count"),
        hidden=hidden,
        intermediate=fields.need("llama.feed_forward_length"),
        heads=heads,
        kv_heads=fields.get("llama.attention.head_count_kv", heads),
        head_dim=fields.get("llama.attention.key_length", hidden // heads),
        vocabulary=len(fields.need("tokenizer.ggml.tokens")),
        max_positions=fields.need("llama.context_length"),
        rope_theta=fields.get("llama.rope.freq_base", 10_000.0),
        rms_epsilon=_shortest(fields.need("llama.attention.layer_norm_rms_epsilon")),
        tied=all(tensor.name != "output.weight" for tensor in fields.tensors),
    )


def _shortest(value: float) -> float:
    """The shortest decimal of a float that went through float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _config(shape: LlamaShape, fields: _Fields) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.rms_epsilon,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.tied,
        **_token_roles(fields),
    }


def _token_roles(fields: _Fields) -> dict[str, Any]:
    roles = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {name: fields.get(f"tokenizer.ggml.{role}_token_id") for name, role in roles.items()}
    return {name: value for name, value in found.items() if value is not None}


def _weights(
    fields: _Fields, shape: LlamaShape, progress: Progress
) -> Iterator[tuple[str, np.ndarray]]:
    for done, tensor in enumerate(fields.tensors, start=1):
        weight = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if ".attn_q." in tensor.name:
            weight = _halves_first(weight, shape.heads)
        elif ".attn_k." in tensor.name:
            weight = _halves_first(weight, shape.kv_heads)
        yield _hf_name(tensor.name), np.ascontiguousarray(weight)
        progress("weights", 0.05 + 0.9 * done / len(fields.tensors))


def _halves_first(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's row order: GGUF interleaves each head's two rotary halves, transformers keeps them apart."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _hf_name(name: str) -> str:
    if name in _WHOLE_MODEL_NAMES:
        return _WHOLE_MODEL_NAMES[name]
    block, layer, part, suffix = (name.split(".") + ["", "", ""])[:4]
    if block != "blk" or part not in _LAYER_NAMES:
        raise ModelUnusable(f"unknown GGUF tensor {name}")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}"


def build_tokenizer(fields: _Fields) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer that the file's tables describe, with its chat template."""
    tokens: list[str] = fields.need("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in fields.need("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # "smollm": every digit stands alone, then GPT-2's own split.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.add_tokens(_added_tokens(tokens, fields.need("tokenizer.ggml.token_type")))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_max_length=fields.need("llama.context_length"),
        chat_template=fields.get("tokenizer.chat_template"),
        **_role_tokens(tokens, fields),
    )


def _added_tokens(tokens: list[str], types: list[int]) -> list[AddedToken]:
    return [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _role_tokens(tokens: list[str], fields: _Fields) -> dict[str, str]:
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: fields.get(f"tokenizer.ggml.{role}_token_id") for name, role in roles.items()}
    return {name: tokens[index] for name, index in ids.items() if index is not None}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
