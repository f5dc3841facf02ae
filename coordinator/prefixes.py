"""Prefixes of token ids: how long two sequences agree, and the digest by which one is claimed.

Decides nothing; every replica, the chain index and the gateway compare by these.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from coordinator.frames import DIGEST_BYTES, NO_ROOT

_BLOCK = 1024  # tokens compared at once; any size gives the same answer


def digest_of(tokens: Sequence[int], root: bytes = NO_ROOT) -> bytes:
    """The digest of a prefix of token ids, as OpenLane claims it; with a root, of these rows under that root alone."""
    raw = array("i", tokens).tobytes()
    return hashlib.blake2b(raw, digest_size=DIGEST_BYTES, key=root).digest()


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading token ids two sequences share."""
    shorter = min(len(left), len(right))
    start = 0
    while start < shorter:
        stop = min(start + _BLOCK, shorter)
        if array("i", left[start:stop]) != array("i", right[start:stop]):
            break
        start = stop
    while start < shorter and left[start] == right[start]:
        start += 1
    return start
