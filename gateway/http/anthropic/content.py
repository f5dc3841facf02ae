"""Anthropic's messages and content blocks to message records. Raises InvalidValue with the field's path.

What a user shows the model and the model cannot read is refused. What lies in a conversation already (a tool's
picture, another server's tools) must not end it: it is left out, with a note where the model was to see it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from coordinator.errors import InvalidValue
from gateway.chat.billing import without_billing
from gateway.chat.messages import JsonObject, JsonText, Message, ToolCall
from gateway.http.carried import carried
from gateway.http.fields import Fields

# Between text blocks that a client put side by side. The model's own are put together as it said them.
_BETWEEN = "\n\n"
# What an answer's tool call carries whose arguments are no JSON object; see answer.py.
RAW = "_raw"


def system(body: Fields) -> Iterator[Message]:
    """The system prompt, if there is one."""
    text = _BETWEEN.join(_system_texts(body, "system"))
    if text:
        yield Message("system", text)


def _system_texts(holder: Fields, name: str) -> Iterator[str]:
    for text in _texts(holder, name):
        if kept := without_billing(text):
            yield kept


def messages(body: Fields) -> Iterator[Message]:
    for message in body.objects("messages"):
        role = message.text("role")
        match role:
            case "user":
                yield from _user(message)
            case "assistant":
                yield from _assistant(message)
            case "system":
                text = _BETWEEN.join(_system_texts(message, "content"))
                if text:
                    yield Message("system", text)
            case None:
                raise InvalidValue(message.path("role"), "is missing")
            case _:
                raise InvalidValue(message.path("role"), f"there is no role {role!r}")


def _texts(holder: Fields, name: str) -> Iterator[str]:
    """The texts of a string or of text blocks; empty ones say nothing."""
    for block in _blocks(holder, name):
        if block.text("type") not in (None, "text"):
            raise InvalidValue(block.path("type"), "must be text")
        if text := block.text("text"):
            yield text


def _blocks(holder: Fields, name: str) -> Iterator[Fields]:
    value = holder.raw(name)
    if isinstance(value, str):
        return iter((Fields({"type": "text", "text": value}, holder.path(name)),))
    if not isinstance(value, list | None):
        raise InvalidValue(holder.path(name), "must be a string or a list of blocks")
    return holder.objects(name)


def _user(message: Fields) -> Iterator[Message]:
    """Tools' results go first, as calls want them behind them; then what the user says."""
    said: list[str] = []
    for block in _blocks(message, "content"):
        if block.text("type") == "tool_result":
            yield _result(block)
        else:
            said.append(_shown(block))
    text = _joined(said)
    if text:
        yield Message("user", text)


def _joined(texts: Iterable[str]) -> str:
    return _BETWEEN.join(text for text in texts if text)


def _shown(block: Fields) -> str:
    """The text of a block that a user shows the model."""
    kind = block.text("type")
    match kind:
        case "text":
            return block.text("text") or ""
        case "document":
            return _document(block)
        case "search_result":
            heads = (block.text("title"), block.text("source"))
            return _joined([*(head or "" for head in heads), *_texts(block, "content")])
        case "thinking" | "redacted_thinking":
            return ""
        case None:
            raise InvalidValue(block.path("type"), "is missing")
        case "image":
            raise InvalidValue(block.path("type"), "this model reads no images")
    raise InvalidValue(block.path("type"), f"{kind} is nothing that this model reads")


def _document(block: Fields) -> str:
    source = block.object("source")
    kind = source.text("type")
    if kind not in ("text", "content"):
        raise InvalidValue(source.path("type"), f"{kind} documents cannot be read, only text")
    text = source.text("data") or "" if kind == "text" else _joined(_texts(source, "content"))
    return _joined([block.text("title") or "", block.text("context") or "", text])


def _result(block: Fields) -> Message:
    call = block.text("tool_use_id")
    if call is None:
        raise InvalidValue(block.path("tool_use_id"), "is missing")
    text = _joined(_result_text(each) for each in _blocks(block, "content"))
    if block.flag("is_error") and "error" not in text.lower():
        text = f"Error: {text}"
    return Message("tool", text, tool_call_id=call)


def _result_text(block: Fields) -> str:
    if block.text("type") == "tool_reference":
        return f"The tool {block.text('tool_name')} is there."
    try:
        return _shown(block)
    except InvalidValue as error:
        return f"[left out: {error.reason}]"


def _assistant(message: Fields) -> Iterator[Message]:
    said: list[str] = []
    thought: list[str] = []
    calls: list[ToolCall] = []
    for block in _blocks(message, "content"):
        match block.text("type"):
            case "text":
                said.append(block.text("text") or "")
            case "thinking":
                thought.append(block.text("thinking") or carried(block.text("signature")))
            case "tool_use":
                calls.append(_call(block))
    if any(said) or any(thought) or calls:
        yield Message(
            "assistant",
            "".join(said),
            tool_calls=tuple(calls),
            reasoning="".join(thought) or None,
        )


def _call(block: Fields) -> ToolCall:
    name = block.text("name")
    if not name:
        raise InvalidValue(block.path("name"), "is missing")
    return ToolCall(name, _arguments(block.plain_object("input")), block.text("id"))


def _arguments(given: JsonObject) -> JsonObject | JsonText:
    """As the model wrote them, where it wrote no JSON object."""
    raw = given.get(RAW)
    if len(given) == 1 and isinstance(raw, str) and json_object(raw) is None:
        return raw
    return given


def json_object(text: str) -> dict[str, object] | None:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None
    return value if isinstance(value, dict) else None
