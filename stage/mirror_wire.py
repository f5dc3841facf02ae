"""What a stage and the neighbour that keeps its nodes' bytes say to each other, as parts of a message.

Decides the byte layout. It never unpickles; what cannot be read is None. What a record holds is not looked into: its
own digests tell whether it came whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from coordinator.frames import NodeId
from stage.kv.mirror import Key, Record
from stage.kv.node_file import Buffer


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """The stage's first word; it is answered with Shelved."""

    budget: int  # bytes that its store has, and that its mirror may take


class Shelved(msgspec.Struct, tag="shelved", frozen=True):
    """What the neighbour keeps, by what stamps, in the order in which it is best given back."""

    stamps: tuple[tuple[Key, int], ...]


class Wanted(msgspec.Struct, tag="wanted", frozen=True):
    """Asks for one record, which is the answer; or Absent is."""

    key: Key


class Absent(msgspec.Struct, tag="absent", frozen=True):
    key: Key


class Dropped(msgspec.Struct, tag="dropped", frozen=True):
    """What the stage no longer keeps."""

    keys: tuple[Key, ...]


class _RecordHead(msgspec.Struct, tag="record", frozen=True):
    node: NodeId
    parent: NodeId
    holds: str
    stamp: int


Said = Hello | Shelved | Wanted | Absent | Dropped | Record

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Hello | Shelved | Wanted | Absent | Dropped | _RecordHead)


def encode(said: Said) -> list[Buffer]:
    """A record's parts are its own: nobody may write to them any more."""
    if isinstance(said, Record):
        head = _ENCODER.encode(_RecordHead(said.node, said.parent, said.holds, said.stamp))
        return [head, said.head, said.payload]
    return [_ENCODER.encode(said)]


def decode(parts: Sequence[Buffer]) -> Said | None:
    try:
        said = _DECODER.decode(parts[0])
        if not isinstance(said, _RecordHead):
            return said
        return Record(said.node, said.parent, said.holds, said.stamp, parts[1], parts[2])
    except (msgspec.MsgspecError, UnicodeDecodeError, IndexError):
        return None
