"""The file of one chain node: a header that says whose bytes these are, then its rows or the state at its end.

Decides the byte layout, which is also that of a neighbour's copy, and what counts as whole. A reader believes nothing:
header and payload have checksums, the node's id is computed again from its tokens, and what is of another model, dtype,
stage or way of computing is foreign. It raises for whatever is wrong; what becomes of that is for its caller to say.
"""

from __future__ import annotations

import io
import os
import re
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from coordinator.frames import NodeId
from coordinator.nodes import Node, node_id

# magic, layout version, length of the header, digest of the header
_PREFIX = struct.Struct("<4sII16s")
_MAGIC = b"RROW"
_VERSION = 1
_DIGEST_BYTES = 16
_LONGEST_HEADER = 1 << 24

_SUFFIX = re.compile(r"\.(\d{1,6})-(\d{1,6})\.[a-z]+")

Buffer = bytes | bytearray | memoryview

ROWS, STATE = "kv", "state"  # what may be kept of a node

PARTIAL = ".part"  # behind the name of a file that is being written


class Damaged(ValueError):
    """The file is not what was written."""


class Foreign(ValueError):
    """A whole file, but of bytes that this stage would not have computed."""


@dataclass(frozen=True, slots=True)
class FileKind:
    """What rows, or states, must have in common to stand for one another bit for bit."""

    fingerprint: str  # of the model
    first: int  # layers [first, last)
    last: int
    dtype: str
    shapes: tuple[tuple[int, ...], ...]  # of each layer: heads, key and value of one head
    recipe: str  # what computed them: versions, kind of processor, numerics
    holds: str = ROWS

    @property
    def suffix(self) -> str:
        """Of the files' names: stages may share a folder."""
        return f".{self.first}-{self.last}.{self.holds}"

    def is_of_another_split(self, suffix: str) -> bool:
        """Whether files of that name hold some of these layers, cut otherwise: no stage of this ring reads them."""
        found = _SUFFIX.fullmatch(suffix)
        if found is None:
            return False
        first, last = int(found[1]), int(found[2])
        overlaps = first < self.last and self.first < last
        return overlaps and (first, last) != (self.first, self.last)


class _Header(msgspec.Struct, array_like=True, frozen=True):
    kind: FileKind
    node: bytes
    parent: bytes
    start: int
    tokens: bytes  # int32, little endian
    payload_bytes: int
    payload_digest: bytes


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Header)


def file_bytes(node: Node, payload_bytes: int, kind: FileKind) -> int:
    """The size that the file is going to have."""
    head = _header(node, payload_bytes, bytes(_DIGEST_BYTES), kind)
    return _PREFIX.size + len(head) + payload_bytes


def packed(node: Node, data: Tensor, kind: FileKind) -> tuple[bytes, memoryview]:
    """What is in front of the payload, and the payload: a view, so nobody may write to `data` any more."""
    payload = bytes_of(data)
    head = _header(node, len(payload), _digest(payload), kind)
    return _PREFIX.pack(_MAGIC, _VERSION, len(head), _digest(head)) + head, payload


def unpacked(head: Buffer, payload: Buffer, kind: FileKind) -> Node:
    """The node, of which `payload` is what was packed. Raises Damaged and Foreign."""
    file = io.BytesIO(head)
    header = _read_header(file, kind)
    if file.read(1) or header.payload_bytes != len(payload):
        raise Damaged("it has another length than it says")
    if _digest(payload) != header.payload_digest:
        raise Damaged("its payload is not the one that was packed")
    return _node(header)


def write_node(path: Path, node: Node, data: Tensor, kind: FileKind) -> None:
    """Writes beside `path` and renames: the file is there whole or not at all. Raises OSError."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            file.writelines(packed(node, data, kind))
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_head(path: Path, kind: FileKind) -> Node:
    """The node, without its payload. Raises OSError, Damaged and Foreign."""
    with path.open("rb") as file:
        header = _read_header(file, kind)
        if os.fstat(file.fileno()).st_size != file.tell() + header.payload_bytes:
            raise Damaged("it has another length than it says")
    return _node(header)


def read_node(path: Path, kind: FileKind, into: Tensor) -> Node:
    """Fills `into`, whose size must be the payload's. Raises OSError, Damaged and Foreign."""
    payload = bytes_of(into)
    with path.open("rb") as file:
        header = _read_header(file, kind)
        if header.payload_bytes != len(payload) or file.readinto(payload) != len(payload):
            raise Damaged("it ends too early")
    if _digest(payload) != header.payload_digest:
        raise Damaged("its payload is not the one that was written")
    return _node(header)


def _header(node: Node, payload_bytes: int, digest: bytes, kind: FileKind) -> bytes:
    tokens = node.tokens.tobytes()
    return _ENCODER.encode(
        _Header(kind, node.id, node.parent, node.start, tokens, payload_bytes, digest)
    )


def _read_header(file: BinaryIO, kind: FileKind) -> _Header:
    prefix = file.read(_PREFIX.size)
    if len(prefix) != _PREFIX.size:
        raise Damaged("it ends too early")
    magic, version, length, digest = _PREFIX.unpack(prefix)
    if (magic, version) != (_MAGIC, _VERSION):
        raise Foreign("it is of another kind or version")
    raw = file.read(length) if length <= _LONGEST_HEADER else b""
    if len(raw) != length or _digest(raw) != digest:
        raise Damaged("its header is not the one that was written")
    try:
        header = _DECODER.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Foreign(f"its header says something else: {error}") from error
    if header.kind != kind:
        raise Foreign("it is of another model, dtype, stage or way of computing")
    return header


def _node(header: _Header) -> Node:
    tokens = array("i")
    tokens.frombytes(header.tokens[: len(header.tokens) // tokens.itemsize * tokens.itemsize])
    node = Node(NodeId(header.node), NodeId(header.parent), header.start, tokens)
    if node.rows < 1 or node.start < 0 or node_id(node.parent, tokens) != node.id:
        raise Damaged("its tokens are not those of its name")
    return node


def _digest(data: Buffer) -> bytes:
    return blake3(data).digest(length=_DIGEST_BYTES)


def bytes_of(data: Tensor) -> memoryview:
    """A view of a tensor in host memory."""
    if not data.numel():
        return memoryview(bytearray())
    return memoryview(data.view(torch.uint8).numpy()).cast("B")
