"""HTTP answers for errors, in the shape that OpenAI's clients read. Which status and type is gateway/errors.py's table.

A retry of what fails for a reason of its own costs the same again, so clients are told not to.
"""

from __future__ import annotations

import math
from typing import Any

from starlette.responses import JSONResponse

from coordinator import errors
from gateway.errors import is_internal, wire_error

# A client that left reads no answer; this is what proxies write down.
CLIENT_CLOSED = 499


def error_body(error: BaseException) -> dict[str, Any]:
    """`{"error": {"message", "type", "param", "code"}}`; an internal error's text stays in the log."""
    internal = is_internal(error)
    code = error.code if isinstance(error, errors.RingserveError) else errors.RingserveError.code
    said = {
        "message": "internal error" if internal else _message(error),
        "type": wire_error(error).openai_type,
        "param": error.field if isinstance(error, errors.InvalidValue) else None,
        "code": code,
    }
    return {"error": said}


def _message(error: BaseException) -> str:
    if isinstance(error, errors.ContextTooLong):
        # Agents begin to shorten their conversation at these words.
        return (
            f"This model's maximum context length is {error.limit} tokens, "
            f"but the prompt has {error.prompt_tokens}."
        )
    return str(error)


def error_response(error: BaseException, request_id: str) -> JSONResponse:
    status = wire_error(error).http or CLIENT_CLOSED
    headers = {"x-request-id": request_id}
    if isinstance(error, errors.BusyError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    else:
        headers["x-should-retry"] = "false"
    return JSONResponse(error_body(error), status_code=status, headers=headers)
