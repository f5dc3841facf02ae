"""Recurrent layers (gated delta nets, SSMs, short convolutions), called so that a row does not depend on its call.

Decides how a frame's rows reach transformers' own mixers: the projections at a mixer's ends are done for all rows of
the frame at once, and what lies between runs block by block. A block's rows that are not there yet are zeros: they
come later, so that they change nothing before them, and the call has the same shape for one row as for all of them. A
row is then the same in a prefill, a verify frame or a decoding step. May not know an architecture: mixers are found
by their convolution and speak the protocol of transformers' cache. What cannot be taken up again so is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from coordinator.errors import BrokenInvariant, ModelUnusable
from stage.attention import RowSegment
from stage.kv.states import LaneStates, StatePart, StateShape
from stage.model.packed import PackedLinear

_SEED = 11
# Between a block by itself and the same rows in one call; in bfloat16 such rows differ as any two calls do.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_COARSE = 0.1

PartKey = tuple[str, int]


class Recurrence(Protocol):
    """What a mixer is handed to, in the place of transformers' cache."""

    def run(self, mixer: RecurrentMixer, hidden: Tensor) -> Tensor:
        """Take and return [1, rows, hidden]."""


class SharedLinear(nn.Module):
    """A projection at an end of a mixer, that is done for all rows at once rather than inside of it."""

    def __init__(self, linear: nn.Module, is_input: bool) -> None:
        super().__init__()
        self.linear = linear
        self.is_input = is_input
        self.is_inside = True
        self.given: Tensor | None = None

    def forward(self, rows: Tensor) -> Tensor:
        if self.is_inside:
            result: Tensor = self.linear(rows)
            return result
        if not self.is_input:
            return rows
        if self.given is None:
            raise BrokenInvariant("a projection was asked for before it was made")
        return self.given


class RecurrentMixer(nn.Module):
    """Stands in for one of transformers' mixers. What it keeps of a row is what its projections made of it."""

    def __init__(self, mixer: nn.Module, block: int) -> None:
        super().__init__()
        self.mixer = mixer
        self.block = block
        self.layer = int(mixer.layer_idx)
        self.keys: tuple[PartKey, ...] = ()
        self._inputs: list[SharedLinear] = []
        self._outputs: list[SharedLinear] = []
        self._widths: list[int] = []
        self._idle: Tensor | None = None  # stands for rows whose projections are given
        self._shape: StateShape | None = None
        self._more: dict[str, Any] = {}
        if hasattr(mixer, "chunk_size"):
            mixer.chunk_size = block
        elif _takes_more(mixer):
            self._more = {"chunk_size": block}

    def forward(self, hidden_states: Tensor, cache: Recurrence | None = None, **_: Any) -> Tensor:
        if cache is None:
            raise BrokenInvariant(f"{type(self.mixer).__name__} lost the frame on its way")
        return cache.run(self, hidden_states)

    def project(self, hidden: Tensor) -> Tensor:
        """What is kept of each row: [1, rows, width]."""
        if not self._inputs:
            return hidden
        return torch.cat([shared.linear(hidden) for shared in self._inputs], dim=-1)

    def compute(self, rows: Tensor, states: BlockStates) -> Tensor:
        """One block; rows [block, width], returns [block, inner width]."""
        hidden = rows[None]
        if self._inputs:
            parts = hidden.split(self._widths, dim=-1)
            for shared, part in zip(self._inputs, parts, strict=True):
                shared.given = part
            assert self._idle is not None
            hidden = self._idle
        out: Tensor = self.mixer(hidden_states=hidden, cache=states, **self._more)
        return out[0]

    def finish(self, inner: Tensor) -> Tensor:
        """[1, rows, inner width] to [1, rows, hidden]."""
        for shared in self._outputs:
            inner = shared.linear(inner)
        return inner

    # What is learnt once, at load

    def learn(self, like: Tensor) -> StateShape:
        """Try the mixer on two blocks of random rows. Raises ModelUnusable unless it can be taken up in between."""
        if self._shape is None:
            self._shape = self._learn(like)
        return self._shape

    def _learn(self, like: Tensor) -> StateShape:
        random = torch.Generator().manual_seed(_SEED)
        size = (1, 2 * self.block, like.shape[-1])
        hidden = torch.randn(size, generator=random).to(like.device, like.dtype)
        states = BlockStates({})
        with _Ends(self.mixer, hidden) as ends:
            whole = self.mixer(hidden_states=hidden, cache=states, **self._more)
        if not isinstance(whole, Tensor) or whole.shape != hidden.shape or not states.after:
            raise ModelUnusable(
                f"{type(self.mixer).__name__} is not a recurrent layer that is known"
            )
        shape = self._remember(states, hidden)
        self._share(ends, whole)
        if self._agrees(hidden, whole):
            return StateShape(shape, self._width(hidden))
        self._unshare()
        if not self._agrees(hidden, whole):
            raise ModelUnusable(f"{type(self.mixer).__name__} cannot be taken up at a later row")
        return StateShape(shape, self._width(hidden))

    def _remember(self, states: BlockStates, hidden: Tensor) -> tuple[StatePart, ...]:
        self.keys = tuple(sorted(states.after))
        self._idle = torch.zeros_like(hidden[:, : self.block])
        tensors = [states.after[key] for key in self.keys]
        return tuple(StatePart(tuple(tensor.shape), tensor.dtype) for tensor in tensors)

    def _share(self, ends: _Ends, whole: Tensor) -> None:
        found = [(name, True) for name in ends.first]
        found += [(name, False) for name, out in ends.results.items() if out is whole]
        for name, is_input in found:
            path, _, leaf = name.rpartition(".")
            parent = self.mixer.get_submodule(path)
            shared = SharedLinear(getattr(parent, leaf), is_input)
            setattr(parent, leaf, shared)
            (self._inputs if is_input else self._outputs).append(shared)
            shared.is_inside = False
        self._widths = [ends.results[name].shape[-1] for name in ends.first]

    def _unshare(self) -> None:
        for shared in (*self._inputs, *self._outputs):
            shared.is_inside = True
        self._inputs, self._outputs = [], []

    def _width(self, hidden: Tensor) -> int:
        return sum(self._widths) if self._inputs else hidden.shape[-1]

    def _agrees(self, hidden: Tensor, whole: Tensor) -> bool:
        """Whether two blocks, the second one from the first one's state, give what one call gave."""
        rows = self.project(hidden)[0]
        try:
            before = BlockStates({})
            first = self.compute(rows[: self.block], before)
            # As it is done later on: from zeros rather than from nothing.
            again = BlockStates({key: torch.zeros_like(t) for key, t in before.after.items()})
            first = self.compute(rows[: self.block], again)
            second = self.compute(rows[self.block :], BlockStates(again.after))
            got = self.finish(torch.cat((first, second))[None])
        except (RuntimeError, ValueError, BrokenInvariant):
            return False
        if not whole.isfinite().all():
            return got.shape == whole.shape  # damaged weights: what calls the slice first says so
        allowed = _TOLERANCE.get(hidden.dtype, _COARSE) * float(whole.float().abs().max())
        return bool(got.shape == whole.shape and (got - whole).float().abs().max() <= allowed)


@dataclass(slots=True)
class BlockStates:
    """The state before a block and after it, in the words of transformers' cache; of one layer."""

    before: dict[PartKey, Tensor]
    after: dict[PartKey, Tensor] = field(default_factory=dict)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.before.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.before.get(("recurrent", state_idx))

    def update_conv_state(
        self,
        rows: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Rows are [1, channels, rows]; returns them behind those that the convolution still looks at."""
        if conv_kernel_size is None:
            raise ModelUnusable(f"layer {layer_idx} does not say how far its convolution looks")
        before = self.before.get(("conv", state_idx))
        full = rows if before is None else torch.cat((before, rows), dim=-1)
        self.after["conv", state_idx] = full[..., -conv_kernel_size:]
        return full

    def update_recurrent_state(
        self, state: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        self.after["recurrent", state_idx] = state
        return state

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return bool(self.before)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


class CarriedEntries:
    """What attention layers ask of a cache: their rows are kept elsewhere (attention.py)."""

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key, value


class FrameRecurrence(CarriedEntries):
    """One frame's rows through the recurrent layers of a stage, lane by lane."""

    def __init__(
        self, segments: Sequence[RowSegment], states: LaneStates, layers: Sequence[int]
    ) -> None:
        states.begin(segments)
        self._segments = tuple(segments)
        self._states = states
        self._ordinals = {layer: ordinal for ordinal, layer in enumerate(layers)}
        self.layers_seen = 0

    def run(self, mixer: RecurrentMixer, hidden: Tensor) -> Tensor:
        self.layers_seen += 1
        rows = mixer.project(hidden)[0]
        inner = list(self._blocks(mixer, rows))
        missing = len(rows) - sum(map(len, inner))
        if missing:  # padding rows touch no state; they repeat the last row in all they do
            inner.append(inner[-1][-1:].expand(missing, -1))
        return mixer.finish(torch.cat(inner)[None])

    def _blocks(self, mixer: RecurrentMixer, rows: Tensor) -> Iterator[Tensor]:
        """The inner rows of all segments, in order."""
        done = 0
        for segment in self._segments:
            row = segment.start
            while row < segment.end:
                width = min(segment.end, row - row % mixer.block + mixer.block) - row
                yield self._block(mixer, segment.lane, row, rows[done : done + width])
                row, done = row + width, done + width

    def _block(self, mixer: RecurrentMixer, lane: int, start: int, new: Tensor) -> Tensor:
        """Rows from `start` on, all within one block."""
        layer, states = self._ordinals[mixer.layer], self._states
        since = start % mixer.block
        base, end = start - since, since + len(new)
        kept = states.block_rows(layer, lane, base)
        kept[since:end] = new
        kept[end:] = 0
        parts = states.state(layer, lane, base)
        block = BlockStates(dict(zip(mixer.keys, parts, strict=True)))
        out = mixer.compute(kept, block)
        if end == mixer.block:
            after = [block.after[key] for key in mixer.keys]
            states.put_state(layer, lane, base + mixer.block, after)
        return out[since:end]


class StateSurvey(CarriedEntries):
    """Learns from one call what each recurrent layer keeps; computes nothing for the layers behind."""

    def __init__(self) -> None:
        self.shapes: dict[int, StateShape] = {}

    def run(self, mixer: RecurrentMixer, hidden: Tensor) -> Tensor:
        if mixer.layer in self.shapes:
            raise ModelUnusable(f"layer {mixer.layer} recurs twice; such models are not supported")
        self.shapes[mixer.layer] = mixer.learn(hidden)
        return torch.zeros_like(hidden)


class _Ends:
    """Finds the linear layers that a mixer's own input goes into, and what each one of them gave."""

    def __init__(self, mixer: nn.Module, hidden: Tensor) -> None:
        self._mixer = mixer
        self._hidden = hidden
        self._hooks: list[Any] = []
        self.first: list[str] = []
        self.results: dict[str, Tensor] = {}

    def __enter__(self) -> _Ends:
        for name, module in self._mixer.named_modules():
            if isinstance(module, nn.Linear | PackedLinear):
                self._hooks.append(module.register_forward_hook(self._note(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, name: str) -> Any:
        def note(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            if args[0] is self._hidden:
                self.first.append(name)
            self.results[name] = out

        return note


def _takes_more(mixer: nn.Module) -> bool:
    kinds = [p.kind for p in inspect.signature(mixer.forward).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def wrap_recurrent(layers: Sequence[nn.Module], block: int) -> bool:
    """Put a RecurrentMixer in the place of every recurrent part of the layers. True if there were any."""
    found = False
    for layer in layers:
        for name, child in list(layer.named_children()):
            convolves = any(isinstance(part, nn.Conv1d) for part in child.children())
            if convolves and hasattr(child, "layer_idx"):
                setattr(layer, name, RecurrentMixer(child, block))
                found = True
    return found
