"""Thoughts that a client carries for us between turns in a field that others seal: OpenAI's `encrypted_content`,
Anthropic's `signature`.

Clients drop a thought that has none, and some drop its plain text. A model that thinks between tool calls must read its
thoughts again as they were, or every row behind them is void. Nothing is hidden here, and nothing proven.
"""

from __future__ import annotations

import base64
import binascii

# Of a thought whose text stands beside it.
SHOWN = "ringserve"
_MARK = "ringserve.1."


def carrying(thought: str) -> str:
    return _MARK + base64.b64encode(thought.encode(errors="replace")).decode("ascii")


def carried(field: str | None) -> str:
    """The thought; empty for what is not ours."""
    if field is None or not field.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(field.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
