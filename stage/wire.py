"""How a message becomes bytes and back: a fixed envelope, a msgspec body and the raw bytes of a tensor.

Decides the byte layout. It never unpickles, and what it cannot read becomes Garbled (the envelope still tells
which frame it was) or, without a readable envelope, a WireError. Illegal records do not construct, so whatever
is decoded here is legal by the rules of coordinator.frames.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from coordinator.errors import InvalidValue
from coordinator.frames import (
    PROTOCOL_VERSION,
    CopyRows,
    DropNodes,
    Epoch,
    Frame,
    LaneId,
    LaneRows,
    LoadNodes,
    NodeId,
    Op,
    OpenLane,
    Refusal,
    Reply,
    Segment,
    Seq,
    StageTiming,
    StoreNodes,
)
from stage.messages import Delivery, FrameMessage, Garbled, ReplyMessage

Buffer = bytes | bytearray | memoryview

# magic, protocol version, kind, opened, epoch, seq, sent_at
_ENVELOPE = struct.Struct("<4sBBQQQd")
_MAGIC = b"RING"
_FRAME, _REPLY = 1, 2

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

# msgspec cannot tell dataclasses of a union apart: an op travels with its place in this table. Append only.
_OPS: tuple[type[Op], ...] = (OpenLane, CopyRows, LoadNodes, DropNodes)
_OP_DECODERS = tuple(msgspec.msgpack.Decoder(op) for op in _OPS)


class WireError(ValueError):
    """Bytes without a readable envelope: nobody can tell which frame they were."""


class _TensorHead(msgspec.Struct, array_like=True, frozen=True):
    dtype: str
    shape: tuple[int, ...]


class _FrameBody(msgspec.Struct, array_like=True, frozen=True):
    ops: tuple[tuple[int, msgspec.Raw], ...]
    segments: tuple[Segment, ...]
    refusals: tuple[Refusal, ...]
    lanes: tuple[LaneRows, ...]
    timings: tuple[StageTiming, ...]
    computed: tuple[LaneId, ...]
    hidden: _TensorHead | None
    alone: bool
    after: tuple[StoreNodes, ...]
    lost: tuple[NodeId, ...]


_ENCODER = msgspec.msgpack.Encoder()
_FRAME_DECODER = msgspec.msgpack.Decoder(_FrameBody)
_REPLY_DECODER = msgspec.msgpack.Decoder(Reply)


def encode(message: FrameMessage | ReplyMessage) -> list[Buffer]:
    """The parts of a multipart message. A tensor's part is a view: nobody may write to the tensor any more."""
    if isinstance(message, ReplyMessage):
        reply = message.reply
        head = _envelope(_REPLY, message.opened, reply.epoch, reply.seq)
        return [head, _ENCODER.encode(reply)]
    frame = message.frame
    parts: list[Buffer] = [
        _envelope(_FRAME, message.opened, frame.epoch, frame.seq),
        _ENCODER.encode(_frame_body(message)),
    ]
    if message.hidden is not None:
        parts.append(_tensor_bytes(message.hidden))
    return parts


def decode(parts: Sequence[Buffer]) -> Delivery:
    """Raises WireError when not even the envelope can be read."""
    kind, opened, epoch, seq, sent_at = _open_envelope(parts[0])
    try:
        if kind == _REPLY:
            return Delivery(sent_at, ReplyMessage(opened, _REPLY_DECODER.decode(parts[1])))
        return Delivery(sent_at, _read_frame(opened, epoch, seq, parts))
    except (ValueError, TypeError, IndexError, InvalidValue) as error:
        return Delivery(sent_at, Garbled(opened, epoch, seq, str(error)))


def _envelope(kind: int, opened: Epoch, epoch: Epoch, seq: Seq) -> bytes:
    return _ENVELOPE.pack(_MAGIC, PROTOCOL_VERSION, kind, opened, epoch, seq, time.time())


def _open_envelope(part: Buffer) -> tuple[int, Epoch, Epoch, Seq, float]:
    if len(part) != _ENVELOPE.size:
        raise WireError(f"an envelope of {len(part)} bytes")
    magic, version, kind, opened, epoch, seq, sent_at = _ENVELOPE.unpack(part)
    if magic != _MAGIC or version != PROTOCOL_VERSION or kind not in (_FRAME, _REPLY):
        raise WireError(f"an envelope of protocol version {version} and kind {kind}")
    return kind, Epoch(opened), Epoch(epoch), Seq(seq), sent_at


def _frame_body(message: FrameMessage) -> _FrameBody:
    frame, hidden = message.frame, message.hidden
    head = None if hidden is None else _TensorHead(_DTYPE_NAMES[hidden.dtype], tuple(hidden.shape))
    return _FrameBody(
        ops=tuple((_OPS.index(type(op)), msgspec.Raw(_ENCODER.encode(op))) for op in frame.ops),
        segments=frame.segments,
        refusals=message.refusals,
        lanes=message.lanes,
        timings=message.timings,
        computed=message.computed,
        hidden=head,
        alone=frame.alone,
        after=frame.after,
        lost=message.lost,
    )


def _read_frame(opened: Epoch, epoch: Epoch, seq: Seq, parts: Sequence[Buffer]) -> FrameMessage:
    body = _FRAME_DECODER.decode(parts[1])
    ops = tuple(_read_op(tag, raw) for tag, raw in body.ops)
    return FrameMessage(
        opened=opened,
        frame=Frame(epoch, seq, ops, body.segments, body.alone, body.after),
        refusals=body.refusals,
        lanes=body.lanes,
        timings=body.timings,
        computed=body.computed,
        hidden=None if body.hidden is None else _read_tensor(body.hidden, parts[2]),
        lost=body.lost,
    )


def _read_op(tag: int, raw: msgspec.Raw) -> Any:
    if not 0 <= tag < len(_OPS):
        raise ValueError(f"an op of unknown kind {tag}")
    return _OP_DECODERS[tag].decode(raw)


def _tensor_bytes(tensor: Tensor) -> memoryview:
    host = tensor.detach().to("cpu").contiguous()
    return memoryview(host.view(torch.uint8).numpy()).cast("B")


def _read_tensor(head: _TensorHead, part: Buffer) -> Tensor:
    dtype = _DTYPES.get(head.dtype)
    if dtype is None or any(length < 1 for length in head.shape):
        raise ValueError(f"a tensor of {head.dtype} {head.shape}")
    if math.prod(head.shape) * dtype.itemsize != len(part):
        raise ValueError(f"a tensor of {head.dtype} {head.shape} in {len(part)} bytes")
    # Copied, since ZeroMQ's buffers lie at any address and kernels may round by how their input is aligned.
    return torch.frombuffer(part, dtype=dtype).view(head.shape).clone()
