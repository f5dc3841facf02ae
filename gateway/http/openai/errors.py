"""Errors as OpenAI's clients read them: `{"error": {"message", "type", "param", "code"}}`, with a code that is text."""

from __future__ import annotations

from typing import Any

from coordinator import errors
from gateway.errors import wire_error
from gateway.http.errors import code_of, message_of, status_of


class OpenAIDialect:
    def body(self, error: BaseException, request_id: str) -> dict[str, Any]:
        said = {
            "message": message_of(error),
            "type": wire_error(error).openai_type,
            "param": error.field if isinstance(error, errors.InvalidValue) else None,
            "code": code_of(error),
        }
        return {"error": said}

    def status(self, error: BaseException) -> int:
        return status_of(error)


OPENAI = OpenAIDialect()
