"""Errors as Anthropic's clients read them: `{"type": "error", "error": {"type", "message"}, "request_id"}`."""

from __future__ import annotations

from typing import Any

from coordinator import errors
from gateway.errors import wire_error
from gateway.http.errors import message_of, status_of

# Anthropic's own status, which its clients know, for a server that cannot serve just now.
_OVERLOADED = 529


class AnthropicDialect:
    def body(self, error: BaseException, request_id: str) -> dict[str, Any]:
        return error_body(wire_error(error).anthropic_type, _message(error), request_id)

    def status(self, error: BaseException) -> int:
        if wire_error(error).anthropic_type == "overloaded_error":
            return _OVERLOADED
        return status_of(error)


def error_body(kind: str, message: str, request_id: str) -> dict[str, Any]:
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }


def _message(error: BaseException) -> str:
    if isinstance(error, errors.ContextTooLong):
        # Claude Code shortens its conversation at these words, and reads both numbers: nothing may stand between.
        return f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum"
    return message_of(error)


ANTHROPIC = AnthropicDialect()
