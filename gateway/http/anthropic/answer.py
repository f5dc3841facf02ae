"""Answer parts to Anthropic's content blocks: the events of a stream, and whole messages put together from them.

Decides shapes only. One Answering is one request: its id and model are the same in every event.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from coordinator.requests import FinishReason, Usage
from gateway.chat.parts import AnswerPart, CallArguments, CallOpened, SaidText, Thought
from gateway.http.anthropic.content import RAW, json_object
from gateway.http.anthropic.request import Asked
from gateway.http.carried import SHOWN, carrying
from gateway.http.openai.chat_answer import timings
from gateway.http.streaming import Collected
from gateway.turns import TurnFinished, TurnStarted

Event = dict[str, Any]


class Blocks:
    """The events of an answer's content blocks, one block open at a time."""

    def __init__(self, *, show_thoughts: bool) -> None:
        self._show_thoughts = show_thoughts
        self._count = 0
        self._open: str | None = None
        self._thought: list[str] = []

    def feed(self, parts: Iterable[AnswerPart]) -> list[Event]:
        return [event for part in parts for event in self._fed(part)]

    def _fed(self, part: AnswerPart) -> list[Event]:
        match part:
            case SaidText(text):
                return self._said(text)
            case Thought(text):
                return self._thinks(text)
            case CallOpened():
                use = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
                return self._opened("tool_use", use)
            case CallArguments(_, text):
                return [self._delta({"type": "input_json_delta", "partial_json": text})]

    def _said(self, text: str) -> list[Event]:
        opened: list[Event] = []
        if self._open != "text":
            opened = self._opened("text", {"type": "text", "text": ""})
        return [*opened, self._delta({"type": "text_delta", "text": text})]

    def _thinks(self, text: str) -> list[Event]:
        opened: list[Event] = []
        if self._open != "thinking":
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            opened = self._opened("thinking", empty)
        self._thought.append(text)
        if not self._show_thoughts:
            return opened
        return [*opened, self._delta({"type": "thinking_delta", "thinking": text})]

    def _opened(self, kind: str, block: Event) -> list[Event]:
        closed = self.close()
        self._open = kind
        start = {"type": "content_block_start", "index": self._count, "content_block": block}
        return [*closed, start]

    def close(self) -> list[Event]:
        """The end of the block that is open, if one is."""
        if self._open is None:
            return []
        signed = [self._signature()] if self._open == "thinking" else []
        stop = {"type": "content_block_stop", "index": self._count}
        self._open = None
        self._count += 1
        return [*signed, stop]

    def _signature(self) -> Event:
        thought = "".join(self._thought)
        self._thought.clear()
        given = SHOWN if self._show_thoughts else carrying(thought)
        return self._delta({"type": "signature_delta", "signature": given})

    def _delta(self, delta: Event) -> Event:
        return {"type": "content_block_delta", "index": self._count, "delta": delta}


class Answering:
    def __init__(self, model: str, asked: Asked) -> None:
        self._id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._asked = asked
        self._blocks = Blocks(show_thoughts=asked.show_thoughts)

    def whole(self, answer: Collected) -> dict[str, Any]:
        finished = answer.finished
        return {
            **self._head(),
            "content": _put_together([*self.blocks(answer.parts), *self._blocks.close()]),
            **self._stopped(finished),
            "usage": self._usage(finished.usage, finished.thought_tokens),
            "timings": timings(finished.timings),
        }

    def opening(self, started: TurnStarted) -> Event:
        said = Usage(started.prompt_tokens, started.cached_prefix, 0)
        message = {
            **self._head(),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(said, 0),
        }
        return {"type": "message_start", "message": message}

    def blocks(self, parts: Iterable[AnswerPart]) -> list[Event]:
        return [] if self._asked.only_read else self._blocks.feed(parts)

    def ending(self, finished: TurnFinished) -> list[Event]:
        delta = {
            "type": "message_delta",
            "delta": self._stopped(finished),
            "usage": self._usage(finished.usage, finished.thought_tokens),
            "timings": timings(finished.timings),
        }
        return [*self._blocks.close(), delta]

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model}

    def _usage(self, used: Usage, thought: int) -> dict[str, Any]:
        generated = 0 if self._asked.only_read else used.generated_tokens
        return {
            "input_tokens": used.prompt_tokens - used.cached_prefix,
            "cache_read_input_tokens": used.cached_prefix,
            "cache_creation_input_tokens": 0,
            "output_tokens": generated,
            "output_tokens_details": {"thinking_tokens": min(thought, generated)},
        }

    def _stopped(self, finished: TurnFinished) -> dict[str, Any]:
        matched = finished.matched_stop
        sequence = matched if isinstance(matched, str) and not finished.calls else None
        return {"stop_reason": self._reason(finished, sequence), "stop_sequence": sequence}

    def _reason(self, finished: TurnFinished, sequence: str | None) -> str:
        if self._asked.only_read:
            return "max_tokens"
        if finished.reason is FinishReason.LENGTH:
            limit = self._asked.turn.max_tokens or 0
            reached = finished.usage.generated_tokens >= limit
            return "max_tokens" if reached else "model_context_window_exceeded"
        if sequence is not None:
            return "stop_sequence"
        return "tool_use" if finished.calls else "end_turn"


def _put_together(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The blocks that a stream of these events spells."""
    blocks: list[dict[str, Any]] = []
    arguments = ""
    for event in events:
        match event["type"]:
            case "content_block_start":
                blocks.append(dict(event["content_block"]))
                arguments = ""
            case "content_block_delta" if event["delta"]["type"] == "input_json_delta":
                arguments += event["delta"]["partial_json"]
            case "content_block_delta":
                kept = {name: text for name, text in event["delta"].items() if name != "type"}
                blocks[-1].update({name: blocks[-1][name] + text for name, text in kept.items()})
            case "content_block_stop" if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = _input(arguments)
    return blocks


def _input(arguments: str) -> dict[str, object]:
    """Text that is no JSON object comes under a name that no tool knows: the client refuses the call, the model
    sees what it wrote.
    """
    if not arguments.strip():
        return {}
    value = json_object(arguments)
    return {RAW: arguments} if value is None else value
