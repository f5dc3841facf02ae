"""Turn events to OpenAI's objects: whole answers, and the chunks of streamed ones.

Decides shapes only. One Answering is one request: its id, time and model are the same in every chunk.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from coordinator.requests import FinishReason, RowLogprobs, Timings
from gateway.chat.parts import (
    AnswerPart,
    CallArguments,
    CallOpened,
    SaidText,
    Thought,
    message_of,
)
from gateway.http.streaming import Collected
from gateway.turns import TurnDelta, TurnFinished

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}

TextOf = Callable[[int], str]


class Answering:
    """`chat`: messages, else plain completions. `text_of` a token id, for log-probabilities."""

    def __init__(self, model: str, created: int, text_of: TextOf, *, chat: bool) -> None:
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._model = model
        self._created = created
        self._chat = chat
        self._text_of = text_of

    # A whole answer

    def whole(self, choices: Sequence[Collected]) -> dict[str, Any]:
        return {
            **self._head("chat.completion" if self._chat else "text_completion"),
            "choices": [self._choice(index, each) for index, each in enumerate(choices)],
            "usage": usage([each.finished for each in choices]),
            "timings": timings(choices[0].finished.timings),
        }

    def _choice(self, index: int, answer: Collected) -> dict[str, Any]:
        rows = [row for delta in answer.deltas for row in self._rows(delta)]
        said = {"message": _message(answer.parts)} if self._chat else {"text": answer.text}
        return {
            "index": index,
            **said,
            "logprobs": self._logprobs(rows),
            "finish_reason": _reason(answer.finished),
        }

    # A streamed one

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The first chunk of a chat's choice; plain completions have none."""
        if not self._chat:
            return []
        return [self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, [], None)]

    def pieces(self, index: int, delta: TurnDelta) -> list[dict[str, Any]]:
        """A chunk for each part of a chat's answer; the first brings the tokens' log-probabilities."""
        rows = self._rows(delta)
        said: list[dict[str, Any]] = [{"delta": _delta(part)} for part in delta.parts]
        if not self._chat:
            said = [{"text": delta.text}] if delta.text else []
        if rows and not said:
            said = [{"delta": {}} if self._chat else {"text": ""}]
        return [
            self._chunk(index, each, [] if place else rows, None) for place, each in enumerate(said)
        ]

    def ending(self, index: int, finished: TurnFinished) -> dict[str, Any]:
        said: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        chunk = self._chunk(index, said, [], _reason(finished))
        return {**chunk, "timings": timings(finished.timings)}

    def usage_chunk(self, done: Sequence[TurnFinished]) -> dict[str, Any]:
        return {**self._head(self._chunk_kind), "choices": [], "usage": usage(done)}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _chunk(
        self, index: int, said: dict[str, Any], rows: list[_Row], reason: str | None
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            **said,
            "logprobs": self._logprobs(rows),
            "finish_reason": reason,
        }
        return {**self._head(self._chunk_kind), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    # Log-probabilities

    def _rows(self, delta: TurnDelta) -> list[_Row]:
        # At a stop string there may be more rows than tokens, never fewer.
        return list(zip(delta.token_ids, delta.logprobs, strict=False))

    def _logprobs(self, rows: list[_Row]) -> dict[str, Any] | None:
        if not rows:
            return None
        if self._chat:
            return {"content": [self._entry(token, row) for token, row in rows], "refusal": None}
        texts = [self._text_of(token) for token, _ in rows]
        return {
            "tokens": texts,
            "token_logprobs": [row.chosen for _, row in rows],
            "top_logprobs": [
                {self._text_of(token): value for token, value in row.top} for _, row in rows
            ],
            "text_offset": [sum(map(len, texts[:place])) for place in range(len(texts))],
        }

    def _entry(self, token: int, row: RowLogprobs) -> dict[str, Any]:
        top = [self._one(each, value) for each, value in row.top]
        return {**self._one(token, row.chosen), "top_logprobs": top}

    def _one(self, token: int, value: float) -> dict[str, Any]:
        text = self._text_of(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}


_Row = tuple[int, RowLogprobs]


def _message(parts: Sequence[AnswerPart]) -> dict[str, Any]:
    said = message_of(parts)
    message: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
    if said.reasoning is not None:
        message["reasoning_content"] = said.reasoning
    if said.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, **_function(name=call.name, arguments=call.arguments)}
            for call in said.tool_calls
        ]
    return message


def _delta(part: AnswerPart) -> dict[str, Any]:
    match part:
        case SaidText(text):
            return {"content": text}
        case Thought(text):
            return {"reasoning_content": text}
        case CallOpened(call, call_id, name):
            opened = {"index": call, "id": call_id, **_function(name=name, arguments="")}
            return {"tool_calls": [opened]}
        case CallArguments(call, text):
            return {"tool_calls": [{"index": call, "function": {"arguments": text}}]}


def _function(**function: object) -> dict[str, Any]:
    return {"type": "function", "function": function}


def _reason(finished: TurnFinished) -> str:
    if finished.calls and finished.reason is FinishReason.STOP:
        return "tool_calls"
    return _REASONS[finished.reason]


def usage(done: Sequence[TurnFinished]) -> dict[str, Any]:
    """Of all choices. The prompt counts once, as OpenAI counts it."""
    used = [each.usage for each in done]
    prompt, generated = used[0].prompt_tokens, sum(each.generated_tokens for each in used)
    thought = sum(each.thought_tokens for each in done)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": used[0].cached_prefix},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }


def timings(spent: Timings) -> dict[str, Any]:
    return {
        "queue_ms": round(spent.queue_s * 1e3, 3),
        "prefill_ms": round(spent.prefill_s * 1e3, 3),
        "decode_ms": round(spent.decode_s * 1e3, 3),
        "drafted": spent.drafted,
        "accepted": spent.accepted,
    }
