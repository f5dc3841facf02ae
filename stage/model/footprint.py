"""What a model weighs, layer by layer, read from config.json and the headers of its safetensors files.

It decides which tensors belong to which layer, to the embedding or to the tail, and how many bytes one row of KV
takes. It may not load weights or import torch: `ringserve plan` answers before anything is loaded.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.errors import InvalidSetting, ModelUnusable

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Tensors stored as one of these are loaded in the ring's dtype; any other (int8, fp8, packed) keeps its stored size.
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|wpe|word_embeddings)\.")
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out)\.")
# Towers that read images or sound, and multi-token-prediction layers, are not part of a text slice.
_NOT_TEXT = re.compile(r"(?:^|\.)(?:visual|vision_\w+|audio_\w+|multi_modal_projector|mtp)\.")


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes of one model in one dtype. A tied head counts in `head_bytes` too: a tail needs its own copy."""

    name: str
    dtype: str
    layer_bytes: tuple[int, ...]
    kv_row_bytes: tuple[int, ...]
    """Per layer, the bytes of one row of one lane; 0 for a layer that keeps no rows."""
    embedding_bytes: int
    head_bytes: int
    norm_bytes: int
    tied: bool
    hidden: int
    intermediate: int
    vocabulary: int
    max_positions: int

    @property
    def n_layers(self) -> int:
        return len(self.layer_bytes)

    def weight_bytes(self, first: int, last: int) -> int:
        """The weights of a stage that holds layers [first, last)."""
        embedding = self.embedding_bytes if first == 0 else 0
        tail = self.head_bytes + self.norm_bytes if last == self.n_layers else 0
        shared = self.embedding_bytes if self.tied and embedding and tail else 0
        return sum(self.layer_bytes[first:last]) + embedding + tail - shared

    def kv_bytes(self, first: int, last: int, rows: int) -> int:
        """The KV rows of one lane in layers [first, last)."""
        return sum(self.kv_row_bytes[first:last]) * rows


def read_footprint(model_dir: Path, dtype: str) -> Footprint:
    """Raises ModelUnusable if the folder holds no decoder model that can be sliced, InvalidSetting for a dtype."""
    if dtype not in DTYPE_BYTES:
        raise InvalidSetting("dtype", f"{dtype!r} is none of {', '.join(DTYPE_BYTES)}")
    config = _read_config(model_dir)
    weights = _weigh(model_dir, DTYPE_BYTES[dtype])
    n_layers = int(_need(config, "num_hidden_layers"))
    layers = tuple(weights.layers.get(index, 0) for index in range(n_layers))
    if not all(layers):
        raise ModelUnusable(
            f"{model_dir.name} has no weights for layer {layers.index(0)} of {n_layers}"
        )
    hidden = int(_need(config, "hidden_size"))
    return Footprint(
        name=model_dir.name,
        dtype=dtype,
        layer_bytes=layers,
        kv_row_bytes=_kv_row_bytes(config, n_layers, DTYPE_BYTES[dtype]),
        embedding_bytes=weights.embedding,
        head_bytes=weights.head or weights.embedding,
        norm_bytes=weights.rest,
        tied=not weights.head,
        hidden=hidden,
        intermediate=int(config.get("intermediate_size") or 4 * hidden),
        vocabulary=int(_need(config, "vocab_size")),
        max_positions=int(_need(config, "max_position_embeddings")),
    )


def _read_config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "config.json"
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnusable(f"{model_dir} has no readable config.json: {error}") from error
    text: dict[str, Any] = config.get("text_config") or config
    return text


def _need(config: dict[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ModelUnusable(f"config.json lacks {key}")
    return config[key]


def _kv_row_bytes(config: dict[str, Any], n_layers: int, element_bytes: int) -> tuple[int, ...]:
    heads = int(_need(config, "num_attention_heads"))
    key_dim = config.get("head_dim") or int(_need(config, "hidden_size")) // heads
    kv_heads, value_dim = config.get("num_key_value_heads") or heads, key_dim
    if config.get(
        "qk_nope_head_dim"
    ):  # latent attention caches whole heads, with keys wider than values
        kv_heads, value_dim = heads, config["v_head_dim"]
        key_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    row = kv_heads * (key_dim + value_dim) * element_bytes
    kinds = config.get("layer_types") or ["full_attention"] * n_layers
    return tuple(row if "attention" in kind and "linear" not in kind else 0 for kind in kinds)


@dataclass(frozen=True, slots=True)
class _Weights:
    layers: dict[int, int]
    embedding: int
    head: int
    rest: int


def _weigh(model_dir: Path, float_bytes: int) -> _Weights:
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ModelUnusable(f"{model_dir} holds no .safetensors file")
    layers: dict[int, int] = defaultdict(int)
    places = {"embedding": 0, "head": 0, "rest": 0}
    for file in files:
        for name, tensor in _read_header(file).items():
            if _NOT_TEXT.search(name):
                continue
            if layer := _LAYER.search(name):
                layers[int(layer[1])] += _loaded_bytes(tensor, float_bytes)
            else:
                places[_place(name)] += _loaded_bytes(tensor, float_bytes)
    return _Weights(dict(layers), **places)


def _place(name: str) -> str:
    if _EMBEDDING.search(name):
        return "embedding"
    return "head" if _HEAD.search(name) else "rest"


def _read_header(file: Path) -> dict[str, Any]:
    """The tensor table of a safetensors file: 8 bytes of length, then that much JSON."""
    try:
        with file.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            if length > file.stat().st_size:
                raise ModelUnusable(f"{file.name} is damaged: its header is longer than the file")
            header: dict[str, Any] = json.loads(handle.read(length))
    except (OSError, ValueError, struct.error) as error:
        raise ModelUnusable(f"{file.name} is not a readable safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return header


def _loaded_bytes(tensor: dict[str, Any], float_bytes: int) -> int:
    if tensor["dtype"] in _FLOATS:
        return math.prod(tensor["shape"]) * float_bytes
    start, end = tensor["data_offsets"]
    return int(end - start)
