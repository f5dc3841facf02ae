"""Turn events to OpenAI's objects: whole answers, and the chunks of streamed ones.

Decides shapes only. One Answering is one request: its id, time and model are the same in every chunk.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from coordinator.requests import FinishReason, RowLogprobs, Timings, Usage
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
            "usage": usage([each.finished.usage for each in choices]),
            "timings": timings(choices[0].finished.timings),
        }

    def _choice(self, index: int, answer: Collected) -> dict[str, Any]:
        rows = [row for delta in answer.deltas for row in self._rows(delta)]
        said: dict[str, Any] = {"text": answer.text}
        if self._chat:
            said = {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
        return {
            "index": index,
            **said,
            "logprobs": self._logprobs(rows),
            "finish_reason": _REASONS[answer.finished.reason],
        }

    # A streamed one

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The first chunk of a chat's choice; plain completions have none."""
        if not self._chat:
            return []
        return [self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, [], None)]

    def pieces(self, index: int, delta: TurnDelta) -> list[dict[str, Any]]:
        rows = self._rows(delta)
        if not delta.text and not rows:
            return []
        said = {"delta": {"content": delta.text}} if self._chat else {"text": delta.text}
        return [self._chunk(index, said, rows, None)]

    def ending(self, index: int, finished: TurnFinished) -> dict[str, Any]:
        said: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        chunk = self._chunk(index, said, [], _REASONS[finished.reason])
        return {**chunk, "timings": timings(finished.timings)}

    def usage_chunk(self, used: Sequence[Usage]) -> dict[str, Any]:
        return {**self._head(self._chunk_kind), "choices": [], "usage": usage(used)}

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


def usage(used: Sequence[Usage]) -> dict[str, Any]:
    """Of all choices. The prompt counts once, as OpenAI counts it."""
    prompt, generated = used[0].prompt_tokens, sum(each.generated_tokens for each in used)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": used[0].cached_prefix},
    }


def timings(spent: Timings) -> dict[str, Any]:
    return {
        "queue_ms": round(spent.queue_s * 1e3, 3),
        "prefill_ms": round(spent.prefill_s * 1e3, 3),
        "decode_ms": round(spent.decode_s * 1e3, 3),
        "drafted": spent.drafted,
        "accepted": spent.accepted,
    }
