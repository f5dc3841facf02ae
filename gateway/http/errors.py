"""HTTP answers for errors: the status and the headers. Which status and type is gateway/errors.py's table; the body is
the dialect's.

A retry of what fails for a reason of its own costs the same again, so clients are told not to.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

from starlette.responses import JSONResponse

from coordinator import errors
from gateway.errors import is_internal, wire_error

# A client that left reads no answer; this is what proxies write down.
CLIENT_CLOSED = 499
# Nothing that a browser knows: it would ask its user for a password over the status page's own question.
_CHALLENGE = 'Bearer realm="ringserve"'


class Dialect(Protocol):
    """How one family of clients wants errors."""

    def body(self, error: BaseException, request_id: str) -> dict[str, Any]: ...

    def status(self, error: BaseException) -> int: ...


def status_of(error: BaseException) -> int:
    return wire_error(error).http or CLIENT_CLOSED


def code_of(error: BaseException) -> str:
    return error.code if isinstance(error, errors.RingserveError) else errors.RingserveError.code


def message_of(error: BaseException) -> str:
    """An internal error's text stays in the log."""
    if is_internal(error):
        return "internal error"
    if isinstance(error, errors.ContextTooLong):
        # Agents begin to shorten their conversation at these words.
        return (
            f"This model's maximum context length is {error.limit} tokens, "
            f"but the prompt has {error.counted}."
        )
    return str(error)


def request_id_headers(request_id: str) -> dict[str, str]:
    """As OpenAI's clients look for it, and as Anthropic's do."""
    return {"x-request-id": request_id, "request-id": request_id}


def error_response(error: BaseException, request_id: str, dialect: Dialect) -> JSONResponse:
    headers = request_id_headers(request_id)
    if isinstance(error, errors.BusyError):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    else:
        headers["x-should-retry"] = "false"
    if isinstance(error, errors.InvalidApiKey):
        headers["www-authenticate"] = _CHALLENGE
    body = dialect.body(error, request_id)
    return JSONResponse(body, status_code=dialect.status(error), headers=headers)
