"""The Responses API's response object: whole, and as it is told while it comes. Decides shapes only.

One Answering is one request: its id, time and model are the same in every event.
"""

from __future__ import annotations

import uuid
from typing import Any

from coordinator import errors
from coordinator.requests import FinishReason
from gateway.http.errors import message_of
from gateway.http.openai.chat_answer import timings
from gateway.http.openai.responses.items import Item
from gateway.http.openai.responses.request import Asked
from gateway.turns import TurnFinished


class Answering:
    def __init__(self, model: str, created: int, asked: Asked) -> None:
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": created,
            "model": model,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **asked.echo,
        }

    def running(self, output: list[Item]) -> dict[str, Any]:
        return {**self._head, "status": "in_progress", "output": output}

    def finished(self, output: list[Item], done: TurnFinished) -> dict[str, Any]:
        status = status_of(done)
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "output": output,
            "incomplete_details": cut,
            "usage": _usage(done),
            "timings": timings(done.timings),
        }

    def failed(self, output: list[Item], error: Exception) -> dict[str, Any]:
        said = {"code": _code(error), "message": _message(error)}
        return {**self._head, "status": "failed", "output": output, "error": said}


def status_of(done: TurnFinished) -> str:
    return "incomplete" if done.reason is FinishReason.LENGTH else "completed"


def _usage(done: TurnFinished) -> dict[str, Any]:
    used = done.usage
    return {
        "input_tokens": used.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": used.cached_prefix,
            "cache_write_tokens": used.prompt_tokens - used.cached_prefix,
        },
        "output_tokens": used.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": done.thought_tokens},
        "total_tokens": used.prompt_tokens + used.generated_tokens,
    }


def _code(error: Exception) -> str:
    """Agents shorten their conversation, wait, give up or try again by these."""
    match error:
        case errors.ContextTooLong():
            return error.code
        case errors.BusyError():
            return "rate_limit_exceeded"
        case errors.RequestError():
            return "invalid_prompt"
    return "server_error"


def _message(error: Exception) -> str:
    if isinstance(error, errors.BusyError):
        # Codex reads how long it shall wait in these words.
        return f"{message_of(error)}. Please try again in {max(1.0, error.retry_after_s):g}s."
    return message_of(error)
