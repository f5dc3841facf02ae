"""Loading one slice of a local Hugging Face model folder.

Decides what is built and which tensors are read: the model is built on the meta device, absent parts
are replaced by pass-through modules, and only the slice's own tensors are then read from the safetensors
files, converted by transformers' own rules where a checkpoint names or stacks them differently. May not
compute anything with the model, nor run code that comes with it. Holds that no other layer's bytes are read and
nothing stays on meta.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from coordinator.errors import ModelUnusable
from stage.attention import ATTENTION, EXPERTS, Numerics
from stage.model.activations import steady_activations
from stage.model.damage import unusable
from stage.model.footprint import check_layers, layer_of, quantized, read_text_config
from stage.model.packed import can_pack, pack_linears

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

# transformers sets torch's default dtype while it builds a model: two threads must not build at once.
_BUILDING = Lock()
_NORMS = ("norm", "final_layernorm", "embedding_norm", "norm_f")
_KNOWN_LAYERS = {
    *("full_attention", "sliding_attention", "attention", "linear_attention", "conv", "mamba"),
    *("hybrid", "mlp", "moe"),
}
# These return attention weights beside their rows.
_RETURN_PAIRS = {"BambaDecoderLayer"}
# Weights of any other type mean nothing without the scales that a quantized checkpoint keeps beside them.
_PLAIN_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# These scale rotary frequencies by the longest position in the call, so a row depends on its neighbours.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True)
class SlicedDecoder:
    """A causal language model of which only layers [first, last) are present, on one device in one dtype."""

    causal_lm: PreTrainedModel
    first: int
    last: int
    n_layers: int
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    length_dependent_rope: bool
    all_packed: bool  # every matrix product goes through packed.py

    @property
    def is_head(self) -> bool:
        return self.first == 0

    @property
    def is_tail(self) -> bool:
        return self.last == self.n_layers


class AbsentLayer(nn.Module):
    """Stands where another stage holds a layer; hands its input on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.returns_pair = type(layer).__name__ in _RETURN_PAIRS
        for name in ("attention_type", "layer_type", "block_type"):  # some pick a mask by these
            if hasattr(layer, name):
                setattr(self, name, getattr(layer, name))

    def forward(
        self, hidden_states: Tensor, *_: Any, **__: Any
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        return (hidden_states, None) if self.returns_pair else hidden_states


def read_config(folder: Path) -> PreTrainedConfig:
    """The model's text config. Raises ModelUnusable where no slice can be made of such a model."""
    raw = read_text_config(folder)
    with unusable(f"{folder.name}: config.json cannot be used"):
        _refuse_own_code(folder, raw)
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config = config.get_text_config(decoder=True)
        kinds = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if kinds:
        raise ModelUnusable(
            f"{config.model_type} has layers that are not supported: {', '.join(sorted(kinds))}"
        )
    return config


def _refuse_own_code(folder: Path, config: dict[str, Any]) -> None:
    """Such a model is served only where transformers knows its kind as well, by transformers' code."""
    if config.get("auto_map") and config.get("model_type") not in CONFIG_MAPPING:
        raise ModelUnusable(
            f"{folder.name} needs code of its own (auto_map in config.json), which is never run"
        )


def load_decoder(
    folder: Path,
    first: int,
    last: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    numerics: Numerics = Numerics.EXACT,
    progress: Progress | None = None,
) -> SlicedDecoder:
    """Load layers [first, last), with the embedding if first is 0, norm and LM head if last is the number of layers.

    `progress(bytes_done, bytes_total)` is called after every tensor. Raises ModelUnusable."""
    config = read_config(folder)
    n_layers = config.num_hidden_layers
    if not 0 <= first < last <= n_layers:
        raise ModelUnusable(f"layers {first} to {last} of a model with {n_layers} layers")
    index = _read_index(folder, config)
    with unusable(f"{folder.name}: no model can be built from config.json"):
        model = _build(config, dtype, numerics)
        _cut(model, first, last)
        _fill_buffers(model, device)
    with unusable(
        f"{folder.name}: the weights cannot be loaded", passing=(torch.OutOfMemoryError,)
    ):
        _load_weights(model, index, device, progress)
    model.eval().requires_grad_(False)
    left = [name for name, tensor in _named_tensors(model) if tensor.is_meta]
    if left:
        raise ModelUnusable(f"{folder} lacks {', '.join(left[:3])} ({len(left)} tensors in all)")
    if numerics is Numerics.EXACT and device.type == "cpu":
        steady_activations(model)
    all_packed = can_pack(dtype, device) and pack_linears(model)
    log.info("loaded layers=%d-%d of=%d dtype=%s device=%s", first, last, n_layers, dtype, device)
    return SlicedDecoder(
        causal_lm=model,
        first=first,
        last=last,
        n_layers=n_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        dtype=dtype,
        device=device,
        length_dependent_rope=_rope_types(config.to_dict()) & _LENGTH_DEPENDENT_ROPE != set(),
        all_packed=all_packed,
    )


def _build(config: PreTrainedConfig, dtype: torch.dtype, numerics: Numerics) -> PreTrainedModel:
    experts = {"experts_implementation": EXPERTS} if numerics is Numerics.EXACT else {}
    with _BUILDING, torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=ATTENTION, **experts
        )


def _cut(model: PreTrainedModel, first: int, last: int) -> None:
    """Replace what other stages hold; refuse models with parameters whose place is unknown."""
    base, head = model.base_model, model.get_output_embeddings()
    layers = getattr(base, "layers", None)
    kind = type(model).__name__
    if base is model or not isinstance(layers, nn.ModuleList) or head is None:
        raise ModelUnusable(f"{kind} is not built of embedding, layers, norm and head")
    embedding = _name_of(base, model.get_input_embeddings())
    for name, child in base.named_children():
        known = name in _NORMS or name in ("layers", embedding)
        if not known and any(True for _ in child.parameters()):
            raise ModelUnusable(f"{kind} has a part that no slice knows: {name}")
        if (first > 0 and name == embedding) or (last < len(layers) and name in _NORMS):
            setattr(base, name, nn.Identity())
    for index, layer in enumerate(layers):
        if not first <= index < last:
            layers[index] = AbsentLayer(layer)
    if last < len(layers):
        setattr(model, _name_of(model, head), nn.Identity())
    if first > 0 and hasattr(base, "embedding_multiplier"):
        base.embedding_multiplier = 1.0  # Granite scales its embeddings inside forward


def _name_of(parent: nn.Module, child: nn.Module) -> str:
    for name, module in parent.named_children():
        if module is child:
            return name
    raise ModelUnusable(f"{type(parent).__name__} keeps its embedding or head elsewhere")


def _fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute what is in no checkpoint, such as rotary frequencies: meta buffers hold nothing."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            # NaN shows afterwards whether the model's own initialisation has reached the buffer.
            filled = torch.full_like(buffer, float("nan"), device=device)
            module.register_buffer(
                name, filled, persistent=name not in module._non_persistent_buffers_set
            )
        if any(True for _ in module.buffers(recurse=False)):
            model._init_weights(module)
            _check_filled(path, module)


def _check_filled(path: str, module: nn.Module) -> None:
    for name, buffer in module.named_buffers(recurse=False):
        if name in module._non_persistent_buffers_set and buffer.isnan().any():
            raise ModelUnusable(
                f"the buffer {path}.{name} is neither in the model's files nor computed"
            )


def _read_index(folder: Path, config: PreTrainedConfig) -> dict[str, Path]:
    """The file that holds each tensor, by the tensor's name."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with unusable(f"{folder.name}: {index.name} does not say which file holds which tensor"):
            found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {str(name): folder / file for name, file in found.items()}
    else:
        single = folder / "model.safetensors"
        if not single.is_file():
            raise ModelUnusable(f"{folder} has no model.safetensors")
        with unusable(f"{folder.name}: {single.name} cannot be read"):
            with safe_open(single, framework="pt") as file:
                files = dict.fromkeys(file.keys(), single)
    layers = {layer for name in files if (layer := layer_of(name)) is not None}
    predicting = getattr(config, "num_nextn_predict_layers", None) or 0
    check_layers(layers, config.num_hidden_layers, predicting, folder.name)
    return files


@dataclass(frozen=True)
class _Source:
    """Which checkpoint tensor belongs to which of the model's tensors, and by which conversion."""

    name: str
    target: str
    pattern: str | None


def _load_weights(
    model: PreTrainedModel, index: dict[str, Path], device: torch.device, progress: Progress | None
) -> None:
    transforms = get_model_conversion_mapping(model)
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    sources = list(_own_sources(model, index, transforms, converters))
    reader = _Reader(index, [source.name for source in sources], progress)
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    pending: dict[str, WeightConverter | WeightRenaming] = {}
    for source in sources:
        entry = by_pattern.get(source.pattern or "")
        fresh = WeightRenaming(source.name, source.target) if entry is None else deepcopy(entry)
        loading = pending.setdefault(source.target, fresh)
        loading.add_tensor(
            source.target, source.name, source.pattern or source.name, reader.later(source.name)
        )
    for target, loading in pending.items():
        for name, tensors in loading.convert(target, model=model, config=model.config).items():
            _assign(model, name, tensors[0] if isinstance(tensors, list) else tensors, device)
    _share_tied(model, pending.keys())


def _own_sources(
    model: PreTrainedModel, index: dict[str, Path], transforms: list[Any], converters: list[Any]
) -> Iterator[_Source]:
    """The checkpoint's tensors that this slice needs, in the order of their names."""
    wanted = {name: tensor for name, tensor in _named_tensors(model) if name in model.state_dict()}
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    found: dict[str, str] = {}
    tied = _tied(model)
    for name in sorted(index, key=dot_natural_key):
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, wanted
        )
        found[target] = name
        # A head of its own is taken even where the config says that it is tied, as transformers does.
        if target in wanted:
            yield _Source(name, target, pattern)
    for target, source in tied.items():
        # The tail of a tied model reads the embedding as its head, unless it holds the embedding anyway.
        name_of = found.get(source) or found.get(f"{model.base_model_prefix}.{source}")
        if target in wanted and target not in found and source not in wanted and name_of:
            yield _Source(name_of, target, None)


def _tied(model: PreTrainedModel) -> dict[str, str]:
    """Which tensors are another one's twin, by their names."""
    return dict(model._tied_weights_keys or {}) if model.config.tie_word_embeddings else {}


def _share_tied(model: PreTrainedModel, loaded: Collection[str]) -> None:
    """Where a slice holds both of a pair and the checkpoint one of them, the other one takes no memory."""
    present = dict(_named_tensors(model))
    for target, source in _tied(model).items():
        if target in present and source in present and target not in loaded and source in loaded:
            path, _, leaf = target.rpartition(".")
            setattr(model.get_submodule(path), leaf, present[source])


class _Reader:
    """Reads tensors one at a time from memory-mapped files and reports how far it has come."""

    def __init__(
        self, index: dict[str, Path], names: Iterable[str], progress: Progress | None
    ) -> None:
        self._index = index
        self._files: dict[Path, Any] = {}
        self._progress = progress
        self._done = 0
        self._total = sum(self._nbytes(name) for name in names)

    def later(self, name: str) -> Callable[[], Tensor]:
        return lambda: self._read(name)

    def _read(self, name: str) -> Tensor:
        tensor = self._file(name).get_tensor(name)
        self._done += tensor.nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)
        return tensor

    def _nbytes(self, name: str) -> int:
        part = self._file(name).get_slice(name)
        n_values = 1
        for length in part.get_shape():
            n_values *= length
        return n_values * _ITEM_BYTES.get(part.get_dtype(), 4)

    def _file(self, name: str) -> Any:
        path = self._index[name]
        if path not in self._files:
            with unusable(f"{path} cannot be read"):
                self._files[path] = safe_open(path, framework="pt")
        return self._files[path]


_ITEM_BYTES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U8": 1,
    "I8": 1,
    "BOOL": 1,
}


def _assign(model: PreTrainedModel, name: str, tensor: Tensor, device: torch.device) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    meta = getattr(module, leaf)
    if tensor.shape != meta.shape:
        raise ModelUnusable(
            f"{name} has shape {tuple(tensor.shape)}; the config wants {tuple(meta.shape)}"
        )
    if meta.is_floating_point() and tensor.dtype not in _PLAIN_FLOATS:
        raise quantized(f"{name} is stored as {str(tensor.dtype).removeprefix('torch.')}")
    # A copy of our own, aligned and resident, rather than a view of the mapped file.
    own = torch.empty(meta.shape, dtype=meta.dtype, device=device).copy_(tensor)
    if leaf in module._buffers:
        module._buffers[leaf] = own
    else:
        setattr(module, leaf, nn.Parameter(own, requires_grad=False))


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _rope_types(config: Any) -> set[str]:
    """Every rope_type in a config, however it is nested."""
    if not isinstance(config, dict):
        return set()
    own = {config["rope_type"]} if isinstance(config.get("rope_type"), str) else set()
    return own.union(*(_rope_types(value) for value in config.values()))
