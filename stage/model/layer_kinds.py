"""Which of a model's layers keep KV rows and which keep a recurrent state, and how large that is, from config.json.

Decides by the names that transformers' models use. An estimate of what a slice allocates once it has seen the model's
layers (recurrent.py); a layer of a kind that is not known here counts as attention. May not import torch.
"""

from __future__ import annotations

from typing import Any

# As in stage/kv/states.py, which imports torch: rows of a block, and blocks whose first state is kept.
BLOCK_ROWS = {"cpu": 16, "cuda": 64}
BLOCKS_KEPT = 2
_RECURRENT = ("linear_attention", "conv", "mamba")
# Recurrences are computed, and their states kept, in float32.
_STATE_BYTES = 4


def layer_kinds(config: dict[str, Any], n_layers: int) -> tuple[str, ...]:
    """The kind of each layer, in transformers' words; of another length where the config says so."""
    for key in ("layer_types", "layers_block_type"):
        if config.get(key):
            return tuple(map(str, config[key]))
    if isinstance(interval := config.get("full_attention_interval"), int) and interval > 0:
        return tuple(
            "linear_attention" if (index + 1) % interval else "full_attention"
            for index in range(n_layers)
        )
    for key, other in (("attn_layer_indices", "mamba"), ("full_attn_idxs", "conv")):
        if config.get(key):
            return tuple(
                "full_attention" if index in config[key] else other for index in range(n_layers)
            )
    return ("full_attention",) * n_layers


def keeps_rows(kind: str) -> bool:
    return "attention" in kind and kind not in _RECURRENT


def state_bytes(config: dict[str, Any], kind: str, element_bytes: int, device: str) -> int:
    """What one lane takes in one layer: the first states of the blocks that are kept, and these blocks' rows."""
    if kind not in _RECURRENT:
        return 0
    state, row_width = _sizes(config, kind, element_bytes)
    block = BLOCK_ROWS.get(device, BLOCK_ROWS["cuda"])
    return BLOCKS_KEPT * (state + block * row_width * element_bytes)


def _sizes(config: dict[str, Any], kind: str, element_bytes: int) -> tuple[int, int]:
    """The bytes of a state, and the elements of a row that goes into the recurrence."""
    if kind == "conv":
        hidden = _int(config, "hidden_size")
        return hidden * _int(config, "conv_L_cache") * element_bytes, 3 * hidden
    if "linear_num_value_heads" in config:
        return _delta_net(config, element_bytes)
    return _mamba(config, element_bytes)


def _delta_net(config: dict[str, Any], element_bytes: int) -> tuple[int, int]:
    heads, value_dim = _int(config, "linear_num_value_heads"), _int(config, "linear_value_head_dim")
    key_heads, key_dim = _int(config, "linear_num_key_heads"), _int(config, "linear_key_head_dim")
    channels = 2 * key_heads * key_dim + heads * value_dim
    convolution = channels * _int(config, "linear_conv_kernel_dim") * element_bytes
    row = channels + heads * value_dim + 2 * heads
    return convolution + heads * key_dim * value_dim * _STATE_BYTES, row


def _mamba(config: dict[str, Any], element_bytes: int) -> tuple[int, int]:
    heads = _int(config, "mamba_n_heads", "mamba_num_heads")
    inner = heads * _int(config, "mamba_d_head", "mamba_head_dim")
    state = _int(config, "mamba_d_state", "ssm_state_size")
    channels = inner + 2 * _int(config, "mamba_n_groups", "n_groups") * state
    convolution = channels * _int(config, "mamba_d_conv", "conv_kernel") * element_bytes
    return convolution + inner * state * _STATE_BYTES, inner + channels + heads


def _int(config: dict[str, Any], *names: str) -> int:
    """The number under the first of these names that there is; 0 if there is none."""
    value = next((config[name] for name in names if name in config), 0)
    return value if isinstance(value, int) else 0
