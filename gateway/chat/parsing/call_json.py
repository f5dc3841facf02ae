"""Reads a call that is written as a JSON object, character by character: its name, then its arguments as they come.

It decides what counts as a call: an object with a name and perhaps arguments, in either order, perhaps within
"function". Inside the arguments it only finds their end; whether they are good JSON is their reader's business.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from gateway.chat.parsing.writer import PartsWriter

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


class CallReader:
    """One object. `done` and `broken` are final: what follows is not read."""

    def __init__(self, writer: PartsWriter) -> None:
        self._writer = writer
        self._state: Callable[[str], None] = self._begin
        self._depth = 0  # of objects around the call's members
        self._level = 0  # of brackets within a value
        self._quoted = False  # within a string within a value
        self._escaped = False
        self._key = ""
        self._text = ""  # a string or a bare word so far
        self._kept = ""  # arguments that wait for their name, or for the end of these characters
        self._whole = False  # the arguments are
        self.opened = False
        self.done = False
        self.broken = False

    def feed(self, text: str) -> int:
        """How many characters it took."""
        taken = 0
        for char in text:
            self._state(char)
            if self.broken:
                break
            taken += 1
            if self.done:
                break
        self._pass_on()
        return taken

    def _pass_on(self) -> None:
        if self.opened:
            self._writer.arguments(self._kept)
            self._kept = ""

    # Around members

    def _begin(self, char: str) -> None:
        if char == "{":
            self._depth = 1
            self._state = self._member
        elif char not in _SPACE and char != "[":  # some models write a list of calls
            self._fail()

    def _member(self, char: str) -> None:
        if char == '"':
            self._begin_string(char, self._in_key)
        elif char == "}":
            self._close()
        elif char not in _SPACE:
            self._fail()

    def _in_key(self, char: str) -> None:
        self._text += char
        if self._closes(char):
            self._key = self._string()
            self._state = self._colon

    def _colon(self, char: str) -> None:
        if char == ":":
            self._state = self._value
        elif char not in _SPACE:
            self._fail()

    def _next(self, char: str) -> None:
        if char == ",":
            self._state = self._member
        elif char == "}":
            self._close()
        elif char not in _SPACE:
            self._fail()

    def _close(self) -> None:
        self._depth -= 1
        self._state = self._next
        if self._depth:
            return
        if not self.opened:
            self._fail()
            return
        self._end_arguments(absent="{}")
        self.done = True

    # Values

    def _value(self, char: str) -> None:
        if char in _SPACE:
            return
        if self._key == "function" and char == "{":
            self._depth += 1
            self._state = self._member
        elif char == '"':
            self._begin_string(char, self._in_string)
        elif char in "}],:" or self._is_name:
            self._fail()
        elif char in "{[":
            self._level, self._quoted = 1, False
            self._keep(char)
            self._state = self._nested
        else:
            self._text = char
            self._state = self._bare

    @property
    def _is_name(self) -> bool:
        return self._key == "name" and not self.opened

    @property
    def _is_arguments(self) -> bool:
        return self._key in _ARGUMENTS and not self._whole

    def _in_string(self, char: str) -> None:
        self._text += char
        if not self._closes(char):
            return
        self._state = self._next
        if self._is_name:
            self._name(self._string())
        elif self._is_arguments:
            self._keep(_unwrapped(self._text))
            self._end_arguments()

    def _nested(self, char: str) -> None:
        self._keep(char)
        if self._quoted:
            self._quoted = not self._closes(char)
        elif char == '"':
            self._quoted, self._escaped = True, False
        elif char in "{[":
            self._level += 1
        elif char in "}]":
            self._level -= 1
        if not self._level:
            self._state = self._next
            if self._is_arguments:
                self._end_arguments()

    def _bare(self, char: str) -> None:
        if char not in ",}" and char not in _SPACE:
            self._text += char
            return
        self._state = self._next
        if self._is_arguments:
            self._keep("{}" if self._text == "null" else self._text)
            self._end_arguments()
        self._state(char)

    def _keep(self, text: str) -> None:
        if self._is_arguments:
            self._kept += text

    def _end_arguments(self, absent: str = "") -> None:
        """Once there is a name; else when it comes."""
        if absent and not self._whole:
            self._kept = absent
        already, self._whole = self._whole, True
        if self.opened and not already:
            self._pass_on()
            self._writer.end_call()

    def _name(self, name: str) -> None:
        if not name:
            self._fail()
            return
        self._writer.open_call(name)
        self.opened = True
        self._pass_on()
        if self._whole:
            self._writer.end_call()

    # Strings

    def _begin_string(self, char: str, state: Callable[[str], None]) -> None:
        self._text, self._escaped = char, False
        self._state = state

    def _closes(self, char: str) -> bool:
        ends = char == '"' and not self._escaped
        self._escaped = char == "\\" and not self._escaped
        return ends

    def _string(self) -> str:
        try:
            return str(json.loads(self._text, strict=False))
        except ValueError:
            self._fail()
            return ""

    def _fail(self) -> None:
        self.broken = True
        if self.opened:
            self._end_arguments(absent="{}")


def _unwrapped(text: str) -> str:
    """Arguments that were written as a string of JSON, as some models do; else the string itself."""
    try:
        inner = str(json.loads(text, strict=False))
        json.loads(inner)
    except ValueError:
        return text
    return inner
