"""Linear layers whose weights are laid out for oneDNN once, at load.

Decides which layers are packed, those on a CPU, in a dtype that oneDNN multiplies, and which numbers of rows they
are called with. Packed calls skip the repacking that MKL does on every call, and their rows agree for any number of
rows from 2 on, at any number of threads. Measured for the linear layers of 15 layers of SmolLM2-135M, fp32, one AVX-512
thread: 4 rows 16 ms against 25 ms, 512 rows 519 ms against 590 ms.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_PACKED_DTYPES = (torch.float32, torch.bfloat16)
# Row counts in each power of two that packed products are called with. oneDNN makes kernels for each count and keeps
# them: 0.5 MB for each shape of weights, so 500 MB of a stage once all counts up to a frame's 256 rows were met.
# With 8 an octave it is a fifth of that, and a call has up to an eighth, on average 4 %, of rows nobody asked for.
# A power of two.
_COUNTS_AN_OCTAVE = 8


class PackedLinear(nn.Module):
    """As the nn.Linear that it is made of, which may be dropped afterwards."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # Opaque to torch: neither a parameter nor a buffer, since it cannot be moved, cast or saved.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, rows: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")


def packed_rows(rows: int) -> int:
    """The least number that packed layers are called with and that holds so many rows."""
    quantum = 1 << max(0, (rows - 1).bit_length() - _COUNTS_AN_OCTAVE.bit_length())
    return -(-rows // quantum) * quantum


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    return (
        device.type == "cpu"
        and dtype in _PACKED_DTYPES
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def pack_linears(model: nn.Module) -> bool:
    """Pack every linear layer in place. True if no other matrix is multiplied with: no experts, no routers."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
    known = (PackedLinear, nn.Embedding)
    return all(
        isinstance(module, known)
        or all(tensor.ndim < 2 for tensor in module.parameters(recurse=False))
        for module in model.modules()
    )
