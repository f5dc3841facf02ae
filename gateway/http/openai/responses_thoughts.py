"""Thoughts that a client carries for us between turns, in the field that other servers seal: `encrypted_content`.

Clients drop what has none (they take it for unusable without a server's memory), and some drop a thought's plain text.
A model that thinks between tool calls must read its thoughts again as they were, or every row behind them is void.
Nothing is hidden here: the same text stands beside it.
"""

from __future__ import annotations

import base64
import binascii

_MARK = "ringserve.1."


def sealed(thought: str) -> str:
    return _MARK + base64.b64encode(thought.encode()).decode("ascii")


def recalled(text: str) -> str:
    """Empty for what is not ours."""
    if not text.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(text[len(_MARK) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
