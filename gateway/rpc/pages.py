"""Pages of ListNodes: a bounded part of what the rings keep, and where the next one begins.

A page goes on behind the last node that was shown, by its place in the order and not by a count: nodes that come or go
between two pages neither repeat others nor hide them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.errors import InvalidValue
from coordinator.router import RingNode
from gateway.pb import generation_pb2 as pb

MOST_NODES = 1000  # a message of some 100 KB

# By ring, then by the first row, so that a node comes behind those that it goes on from.
_Place = tuple[str, int, str]


@dataclass(frozen=True, slots=True)
class Page:
    nodes: tuple[RingNode, ...]
    next_token: str  # empty: these were the last ones


def asked(request: pb.ListNodesRequest) -> tuple[_Place | None, int]:
    """Behind which place the page begins, and its size. Raises InvalidValue."""
    if not 0 <= request.page_size <= MOST_NODES:
        raise InvalidValue("page_size", f"must be between 0 and {MOST_NODES}")
    after = _place_of(request.page_token) if request.page_token else None
    return after, request.page_size or MOST_NODES


def page(nodes: Iterable[RingNode], after: _Place | None, size: int) -> Page:
    rest = (kept for kept in nodes if after is None or _place(kept) > after)
    found = heapq.nsmallest(size + 1, rest, key=_place)
    more = len(found) > size
    return Page(tuple(found[:size]), _token(found[size - 1]) if more else "")


def _place(kept: RingNode) -> _Place:
    return kept.ring, kept.node.start, kept.node.id.hex()


def _token(kept: RingNode) -> str:
    return "/".join(map(str, _place(kept)))


def _place_of(token: str) -> _Place:
    try:
        ring, start, node = token.rsplit("/", 2)
        return ring, int(start), node
    except ValueError:
        raise InvalidValue("page_token", "is none that this server gave") from None
