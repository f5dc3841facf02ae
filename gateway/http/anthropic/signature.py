"""Thoughts that a client would rather not see, kept in their block's signature.

Clients send signatures back as they are. So the conversation renders as it did, and its rows are found again.
"""

from __future__ import annotations

import base64
import binascii

# Of a thought that the block shows itself. It proves nothing: a client may send back what it likes.
SHOWN = "ringserve"
_KEPT = "ringserve:"


def keeping(thought: str) -> str:
    return _KEPT + base64.b64encode(thought.encode(errors="replace")).decode()


def thought_in(signature: str | None) -> str:
    """Empty where the signature keeps none."""
    if signature is None or not signature.startswith(_KEPT):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_KEPT), validate=True).decode()
    except (binascii.Error, UnicodeError, ValueError):
        return ""
