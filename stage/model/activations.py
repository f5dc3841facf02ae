"""Activations whose result does not depend on how many rows share the call.

torch gives each thread a piece of a large element-wise call and ends every piece on a scalar loop, which rounds
silu, gelu and sigmoid otherwise than the vector loop does. Where the pieces end depends on the number of rows; and
where a row has a single value, such as a gate's, so does the last piece's end.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# torch's at::internal::GRAIN_SIZE: what is not larger is done by one thread, in one piece.
GRAIN_VALUES = 32_768
_HOMES = ("transformers.activations", "torch.nn.modules.activation")


class SteadyActivation(nn.Module):
    """The same activation, called on as many whole rows at a time as one thread takes in one piece."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, rows: Tensor) -> Tensor:
        if rows.numel() <= GRAIN_VALUES or torch.get_num_threads() == 1:
            return self.activation(rows)
        width = rows.shape[-1]
        pieces = rows.reshape(-1, width).split(max(1, GRAIN_VALUES // width))
        return torch.cat([self.activation(piece) for piece in pieces]).view(rows.shape)


class SteadyGate(nn.Module):
    """A linear layer of one value a row, handed on in strides: torch takes those one by one, never as vectors."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, rows: Tensor) -> Tensor:
        gate = self.linear(rows)
        return torch.cat((gate, gate), dim=-1)[..., :1]


def steady_activations(model: nn.Module) -> None:
    """Replace every activation module and every gate in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.out_features == 1:
                setattr(parent, name, SteadyGate(child))
            if type(child).__module__ in _HOMES and not isinstance(parent, SteadyActivation):
                setattr(parent, name, SteadyActivation(child))
