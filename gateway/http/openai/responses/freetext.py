"""The plain text in the JSON arguments of a free-form tool's call, as it comes: `{"input": "..."}`.

A model that writes anything else than that one string still called the tool: then its arguments, whole, are the text.
"""

from __future__ import annotations

import json
import re

from gateway.chat.parts import sendable

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# A JSON string's content up to its end, without an escape that is cut off: half a \u pair may be one.
_WHOLE = re.compile(
    r'(?:[^"\\]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u])*'
)
# The rest of it, with halves of pairs and what is no escape, but for an escape that the answer's end cut off.
_REST = re.compile(r'(?:[^"\\]|\\[^u]|\\u(?![0-9a-fA-F]{0,3}\Z))*')


class FreeText:
    """`text` is what there is by now."""

    def __init__(self) -> None:
        self.text = ""
        self._raw = ""
        self._read = 0  # of the raw text
        self._inside: bool | None = None  # None: not known yet

    def feed(self, piece: str) -> str:
        """What is certain by now and was not before."""
        self._raw += piece
        if self._inside is None and (head := _HEAD.match(self._raw)):
            self._inside = True
            self._read = head.end()
        if not self._inside:
            return ""
        whole = _WHOLE.match(self._raw, self._read)
        assert whole is not None  # it matches nothing as well
        self._read = whole.end()
        return self._add(_unescaped(whole.group()))

    def flush(self) -> str:
        """The rest, once the arguments have come to their end."""
        if not self._inside:
            return self._add(_only_text(self._raw))
        rest = _REST.match(self._raw, self._read)
        assert rest is not None  # it matches nothing as well
        return self._add(_unescaped(rest.group()))

    def _add(self, text: str) -> str:
        text = sendable(text)
        self.text += text
        return text


def _unescaped(content: str) -> str:
    try:
        text = json.loads(f'"{content}"', strict=False)
    except ValueError:  # an escape that JSON does not know: as the model wrote it
        return content
    return str(text)


def _only_text(raw: str) -> str:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    values = list(value.values()) if isinstance(value, dict) else [value]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else raw
