"""An answer's parts to the Responses API's output items, and to the events that tell of each step on the way.

Whole answers and streams are made by the same steps, so they say the same. One item is open at a time: what a model
says comes in order. Thoughts are told as summaries, which clients show and send back; the item has their text as well.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Protocol

from gateway.chat.parts import AnswerPart, CallArguments, CallOpened, SaidText, Thought
from gateway.http.carried import carrying
from gateway.http.openai.responses.freetext import FreeText
from gateway.http.openai.responses.tools import Called

Item = dict[str, Any]
Event = dict[str, Any]


class OpenItem(Protocol):
    """An item that still grows. Its events lack their place in the answer, which Output adds."""

    def opened(self) -> list[Event]: ...

    def grown(self, text: str) -> list[Event]: ...

    def closed(self, status: str) -> list[Event]: ...

    def item(self, status: str) -> Item: ...


class Output:
    """One answer's. `own`: the client's tools by the names that the model knows; `seals`: thoughts come with a sealed
    copy.
    """

    def __init__(self, own: Mapping[str, Called], *, seals: bool) -> None:
        self.items: list[Item] = []
        self._own = own
        self._seals = seals
        self._open: OpenItem | None = None

    def take(self, part: AnswerPart) -> list[Event]:
        match part:
            case SaidText(text):
                return self._grow(_Message, text)
            case Thought(text):
                return self._grow(_Reasoning, text)
            case CallOpened():
                return self._start(self._call(part))
            case CallArguments(_, text):
                return self._placed(self._open.grown(text)) if self._open and text else []

    def end(self, status: str) -> list[Event]:
        """The item that is open gets the answer's own status. There is always an item: an empty answer is one too."""
        first = [] if self._open or self.items else self._start(_Message())
        return [*first, *self._close(status)]

    def snapshot(self, status: str) -> list[Item]:
        """What there is by now, the open item included."""
        return [*self.items, *([self._open.item(status)] if self._open else [])]

    def _call(self, opened: CallOpened) -> OpenItem:
        own = self._own.get(opened.name, Called(opened.name))
        return _CustomCall(opened.id, own) if own.free else _FunctionCall(opened.id, own)

    def _grow(self, kind: type[_Message] | type[_Reasoning], text: str) -> list[Event]:
        if not text:
            return []
        started = []
        if not isinstance(self._open, kind):
            started = self._start(_Reasoning(self._seals) if kind is _Reasoning else _Message())
        assert self._open is not None
        return [*started, *self._placed(self._open.grown(text))]

    def _start(self, item: OpenItem) -> list[Event]:
        closed = self._close("completed")
        self._open = item
        added = {"type": "response.output_item.added", "item": item.item("in_progress")}
        return [*closed, *self._placed([added, *item.opened()])]

    def _close(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        item = self._open.item(status)
        done = {"type": "response.output_item.done", "item": item}
        events = self._placed([*self._open.closed(status), done])
        self.items.append(item)
        self._open = None
        return events

    def _placed(self, events: list[Event]) -> list[Event]:
        return [{**event, "output_index": len(self.items)} for event in events]


class _Message:
    def __init__(self) -> None:
        self._id = f"msg_{uuid.uuid4().hex}"
        self._text: list[str] = []

    def opened(self) -> list[Event]:
        return [self._event("response.content_part.added", part=_text_part(""))]

    def grown(self, text: str) -> list[Event]:
        self._text.append(text)
        return [self._event("response.output_text.delta", delta=text, logprobs=[])]

    def closed(self, status: str) -> list[Event]:
        text = "".join(self._text)
        return [
            self._event("response.output_text.done", text=text, logprobs=[]),
            self._event("response.content_part.done", part=_text_part(text)),
        ]

    def item(self, status: str) -> Item:
        content = [] if status == "in_progress" else [_text_part("".join(self._text))]
        message = {"type": "message", "id": self._id, "role": "assistant"}
        return {**message, "status": status, "content": content}

    def _event(self, kind: str, **more: Any) -> Event:
        return {"type": kind, "item_id": self._id, "content_index": 0, **more}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class _Reasoning:
    def __init__(self, seals: bool) -> None:
        self._id = f"rs_{uuid.uuid4().hex}"
        self._seals = seals
        self._text: list[str] = []

    def opened(self) -> list[Event]:
        return [self._event("response.reasoning_summary_part.added", part=_summary(""))]

    def grown(self, text: str) -> list[Event]:
        self._text.append(text)
        return [self._event("response.reasoning_summary_text.delta", delta=text)]

    def closed(self, status: str) -> list[Event]:
        text = "".join(self._text)
        return [
            self._event("response.reasoning_summary_text.done", text=text),
            self._event("response.reasoning_summary_part.done", part=_summary(text)),
        ]

    def item(self, status: str) -> Item:
        item = {"type": "reasoning", "id": self._id, "status": status}
        if status == "in_progress":
            return {**item, "summary": [], "content": [], "encrypted_content": None}
        text = "".join(self._text)
        return {
            **item,
            "summary": [_summary(text)],
            "content": [{"type": "reasoning_text", "text": text}],
            "encrypted_content": carrying(text) if self._seals else None,
        }

    def _event(self, kind: str, **more: Any) -> Event:
        return {"type": kind, "item_id": self._id, "summary_index": 0, **more}


def _summary(text: str) -> dict[str, Any]:
    return {"type": "summary_text", "text": text}


def _call(call_id: str, own: Called) -> dict[str, Any]:
    space = {"namespace": own.namespace} if own.namespace else {}
    return {"call_id": call_id, "name": own.name, **space}


class _FunctionCall:
    def __init__(self, call_id: str, own: Called) -> None:
        self._id = f"fc_{uuid.uuid4().hex}"
        self._call = _call(call_id, own)
        self._arguments: list[str] = []

    def opened(self) -> list[Event]:
        return []

    def grown(self, text: str) -> list[Event]:
        self._arguments.append(text)
        return [self._event("response.function_call_arguments.delta", delta=text)]

    def closed(self, status: str) -> list[Event]:
        arguments = "".join(self._arguments)
        return [self._event("response.function_call_arguments.done", arguments=arguments)]

    def item(self, status: str) -> Item:
        return {
            "type": "function_call",
            "id": self._id,
            **self._call,
            "arguments": "".join(self._arguments),
            "status": status,
        }

    def _event(self, kind: str, **more: Any) -> Event:
        return {"type": kind, "item_id": self._id, **more}


class _CustomCall:
    def __init__(self, call_id: str, own: Called) -> None:
        self._id = f"ctc_{uuid.uuid4().hex}"
        self._call = _call(call_id, own)
        self._input = FreeText()

    def opened(self) -> list[Event]:
        return []

    def grown(self, text: str) -> list[Event]:
        return self._told(self._input.feed(text))

    def closed(self, status: str) -> list[Event]:
        rest = self._told(self._input.flush())
        return [*rest, self._event("response.custom_tool_call_input.done", input=self._input.text)]

    def item(self, status: str) -> Item:
        return {
            "type": "custom_tool_call",
            "id": self._id,
            **self._call,
            "input": self._input.text,
            "status": status,
        }

    def _told(self, text: str) -> list[Event]:
        delta = "response.custom_tool_call_input.delta"
        return [self._event(delta, delta=text)] if text else []

    def _event(self, kind: str, **more: Any) -> Event:
        return {"type": kind, "item_id": self._id, "call_id": self._call["call_id"], **more}
