"""What a model weighs, layer by layer, read from config.json and the headers of its safetensors files.

It decides which tensors belong to which layer, to the embedding or to the tail, how many bytes one row of KV takes, and
what config and headers must agree on for a model to be started at all. It may not load weights or import torch:
`ringserve plan` answers before anything is loaded.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.errors import InvalidSetting, ModelUnusable
from stage.model.damage import unusable
from stage.model.layer_kinds import keeps_rows, layer_kinds, state_bytes

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# Tensors stored as one of these are loaded in the ring's dtype; any other (int8, fp8, packed) keeps its stored size.
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# Some configs make a list of this length as soon as they are read.
_MOST_LAYERS = 10_000
# What packed.py lays out anew on a CPU.
_PACKED = ("float32", "bfloat16")
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
    state_bytes: tuple[int, ...] = ()
    """Per layer, the bytes of one lane's recurrent state; empty for a model without any."""
    packed: bool = False
    """Matrices are laid out anew at load (packed.py): then a tied head shares no bytes with its embedding."""

    @property
    def n_layers(self) -> int:
        return len(self.layer_bytes)

    def weight_bytes(self, first: int, last: int) -> int:
        """The weights of a stage that holds layers [first, last)."""
        embedding = self.embedding_bytes if first == 0 else 0
        tail = self.head_bytes + self.norm_bytes if last == self.n_layers else 0
        is_shared = self.tied and not self.packed and embedding and tail
        shared = self.embedding_bytes if is_shared else 0
        return sum(self.layer_bytes[first:last]) + embedding + tail - shared

    def kv_bytes(self, first: int, last: int, rows: int) -> int:
        """The KV rows of one lane in layers [first, last)."""
        return sum(self.kv_row_bytes[first:last]) * rows

    def lane_bytes(self, first: int, last: int, rows: int) -> int:
        """One lane's KV rows and recurrent state in layers [first, last)."""
        return self.kv_bytes(first, last, rows) + sum(self.state_bytes[first:last])


def read_footprint(model_dir: Path, dtype: str, device: str = "cpu") -> Footprint:
    """Raises ModelUnusable if the folder holds no decoder model that can be sliced, InvalidSetting for a dtype."""
    if dtype not in DTYPE_BYTES:
        raise InvalidSetting("dtype", f"{dtype!r} is none of {', '.join(DTYPE_BYTES)}")
    with unusable(f"{model_dir.name} cannot be weighed"):
        return _footprint(model_dir, dtype, device)


def _footprint(model_dir: Path, dtype: str, device: str) -> Footprint:
    config = read_text_config(model_dir)
    weights = _weigh(model_dir, DTYPE_BYTES[dtype])
    # Some say it only by naming each layer's kind.
    n_layers = _count(config, "num_hidden_layers", len(layer_kinds(config, 0)) or None)
    check_layers(
        weights.layers, n_layers, _count(config, "num_nextn_predict_layers", 0), model_dir.name
    )
    hidden = _count(config, "hidden_size")
    kinds = layer_kinds(config, n_layers)
    if len(kinds) != n_layers:
        raise ModelUnusable(f"config.json: {len(kinds)} layer_types for {n_layers} layers")
    return Footprint(
        name=model_dir.name,
        dtype=dtype,
        layer_bytes=tuple(weights.layers[index] for index in range(n_layers)),
        kv_row_bytes=_kv_row_bytes(config, kinds, DTYPE_BYTES[dtype]),
        state_bytes=tuple(state_bytes(config, kind, DTYPE_BYTES[dtype], device) for kind in kinds),
        embedding_bytes=weights.embedding,
        head_bytes=weights.head or weights.embedding,
        norm_bytes=weights.rest,
        tied=not weights.head,
        hidden=hidden,
        intermediate=_count(config, "intermediate_size", 4 * hidden),
        vocabulary=_count(config, "vocab_size"),
        max_positions=_count(config, "max_position_embeddings"),
        packed=device == "cpu" and dtype in _PACKED,
    )


def read_text_config(model_dir: Path) -> dict[str, Any]:
    """config.json as it stands, or its text part. Raises ModelUnusable, also for weights that need decoding."""
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnusable(f"{model_dir} has no readable config.json: {error}") from error
    if not isinstance(config, dict):
        raise ModelUnusable(f"{model_dir.name}: config.json holds no JSON object")
    text = config.get("text_config") or config
    if not isinstance(text, dict):
        raise ModelUnusable(f"{model_dir.name}: text_config in config.json is no JSON object")
    layers = text.get("num_hidden_layers")
    if isinstance(layers, int) and layers > _MOST_LAYERS:
        raise ModelUnusable(f"config.json: {layers} layers; at most {_MOST_LAYERS} are supported")
    for part in (config, text):
        if part.get("quantization_config") or part.get("compression_config"):
            raise quantized(model_dir.name)
    return text


def quantized(name: str) -> ModelUnusable:
    return ModelUnusable(f"{name}: quantized checkpoints are not supported yet")


def layer_of(tensor: str) -> int | None:
    """The number of the decoder layer that a checkpoint's tensor belongs to."""
    layer = None if _NOT_TEXT.search(tensor) else _LAYER.search(tensor)
    return None if layer is None else int(layer[1])


def check_layers(found: Iterable[int], n_layers: int, predicting: int, name: str) -> None:
    """Raises ModelUnusable where the checkpoint's layers are not those that the config counts.

    A model with its last layers left out still writes fluent text, and nothing else would tell. Some models store
    `predicting` layers for multi-token prediction behind the others.
    """
    found = set(found)
    missing = next((index for index in range(n_layers) if index not in found), None)
    if missing is not None:
        raise ModelUnusable(f"{name} has no weights for layer {missing} of {n_layers}")
    if max(found, default=0) >= n_layers + predicting:
        raise ModelUnusable(
            f"{name}: config.json says {n_layers} layers, but there are weights of layer {max(found)}"
        )


def _count(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """A whole number from 1 on; `default` stands for one that is absent or 0."""
    value = config.get(key)
    if default is not None and (value is None or value == 0):
        return default
    if value is None:
        raise ModelUnusable(f"config.json lacks {key}")
    if type(value) is not int or value < 1:
        raise ModelUnusable(f"config.json: {key} must be a whole number from 1 on, not {value!r}")
    return value


def _kv_row_bytes(
    config: dict[str, Any], kinds: tuple[str, ...], element_bytes: int
) -> tuple[int, ...]:
    heads = _count(config, "num_attention_heads")
    key_dim = _count(config, "head_dim", _count(config, "hidden_size") // heads)
    kv_heads, value_dim = _count(config, "num_key_value_heads", heads), key_dim
    if config.get("qk_nope_head_dim"):
        # latent attention caches whole heads, with keys wider than values
        kv_heads, value_dim = heads, _count(config, "v_head_dim")
        key_dim = _count(config, "qk_nope_head_dim") + _count(config, "qk_rope_head_dim")
    row = kv_heads * (key_dim + value_dim) * element_bytes
    return tuple(row if keeps_rows(kind) else 0 for kind in kinds)


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
        with unusable(f"{file.name} is not a readable safetensors file"):
            _add(file, float_bytes, layers, places)
    return _Weights(dict(layers), **places)


def _add(file: Path, float_bytes: int, layers: dict[int, int], places: dict[str, int]) -> None:
    for name, tensor in _read_header(file).items():
        if _NOT_TEXT.search(name):
            continue
        layer = layer_of(name)
        if layer is None:
            places[_place(name)] += _loaded_bytes(tensor, float_bytes)
        else:
            layers[layer] += _loaded_bytes(tensor, float_bytes)


def _place(name: str) -> str:
    if _EMBEDDING.search(name):
        return "embedding"
    return "head" if _HEAD.search(name) else "rest"


def _read_header(file: Path) -> dict[str, Any]:
    """The tensor table of a safetensors file: 8 bytes of length, then that much JSON, then the tensors' bytes."""
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        size = file.stat().st_size
        if size < 8 or length > size:
            raise ModelUnusable(f"{file.name} is damaged: its header is longer than the file")
        header: dict[str, Any] = json.loads(handle.read(length))
    header.pop("__metadata__", None)
    end = 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if end > size:
        raise ModelUnusable(f"{file.name} is damaged: it has {size} of its {end} bytes")
    return header


def _loaded_bytes(tensor: dict[str, Any], float_bytes: int) -> int:
    if tensor["dtype"] in _FLOATS:
        return math.prod(tensor["shape"]) * float_bytes
    start, end = tensor["data_offsets"]
    return int(end - start)
