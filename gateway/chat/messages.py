"""Chat messages as the gateway's front ends hand them on: one shape, whatever wire they came over.

The records hold what the client said, unchanged; how a model's template wants it is templates.py's
business. JSON may come as text or already parsed: the wires differ, the rendered prompt may not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

JsonText = str
JsonObject = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that an assistant message made. `arguments` may be any text: models write broken JSON."""

    name: str
    arguments: JsonText | JsonObject = "{}"
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. A content of None and an empty one mean the same."""

    role: str  # system, developer (read as system), user, assistant, tool
    content: str | None = None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None  # what an assistant thought before it said this


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is its JSON schema."""

    name: str
    description: str | None = None
    parameters: JsonText | JsonObject | None = None
