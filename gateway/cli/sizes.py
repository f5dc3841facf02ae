"""How an operator writes an amount of memory: 512M, 4G, 1.5GiB, or plain bytes."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_WRITTEN = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def parse_size(written: str | int) -> int:
    """Bytes; units are powers of 1024. Raises ValueError."""
    found = _WRITTEN.fullmatch(str(written).strip())
    if found is None:
        raise ValueError(f"{written!r} is no amount of memory such as 512M or 4G")
    return int(float(found[1]) * _UNITS[found[2].upper()])
