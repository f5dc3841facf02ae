"""The one table from error classes to what each wire says, and the gRPC status made of it.

Every front translates here and nowhere else. A class without a row of its own takes its nearest parent's. What is not
a client's business (a bug of ours, an exception nobody expected) becomes "internal error": its text stays in the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from coordinator import errors
from coordinator.requests import SamplingSpec

ERROR_DOMAIN = "ringserve"

# gRPC drops the details of a status whose trailing metadata outgrow 8 KiB, and a client's own words come back in them.
_LONGEST_MESSAGE = 512
_LONGEST_VALUE = 256

# Where a field that our records name lies in a gRPC request; the others lie at its top, under the same name.
_GRPC_PATHS: Mapping[str, str] = MappingProxyType(
    {
        "messages": "chat.messages",
        "tools": "chat.tools",
        "template_args": "chat.template_args_json",
        "token_ids": "token_ids.ids",
        "max_new_tokens": "max_tokens",
        "prefix": "prompt",
        "lark": "lark_grammar",
        **{spec.name: f"sampling.{spec.name}" for spec in fields(SamplingSpec)},
    }
)


@dataclass(frozen=True, slots=True)
class WireError:
    """What each wire calls one kind of error. `http` is None where no HTTP answer is possible."""

    grpc: grpc.StatusCode
    http: int | None
    openai_type: str
    anthropic_type: str


_INTERNAL = WireError(grpc.StatusCode.INTERNAL, 500, "server_error", "api_error")
_NO_ROOM = WireError(grpc.StatusCode.RESOURCE_EXHAUSTED, 503, "server_error", "api_error")
_INVALID = WireError(
    grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error", "invalid_request_error"
)

ERROR_TABLE: Mapping[type[BaseException], WireError] = MappingProxyType(
    {
        errors.RequestError: _INVALID,
        errors.InvalidApiKey: WireError(
            grpc.StatusCode.UNAUTHENTICATED, 401, "authentication_error", "authentication_error"
        ),
        errors.NotAnOperator: WireError(
            grpc.StatusCode.PERMISSION_DENIED, 403, "permission_error", "permission_error"
        ),
        errors.RequestTooLarge: WireError(
            grpc.StatusCode.RESOURCE_EXHAUSTED, 413, "invalid_request_error", "request_too_large"
        ),
        errors.ModelNotFound: WireError(
            grpc.StatusCode.NOT_FOUND, 404, "invalid_request_error", "not_found_error"
        ),
        # Anthropic's clients take a rate limit for their key's own; what is full here is everybody's.
        errors.QueueFull: WireError(
            grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "overloaded_error"
        ),
        errors.RateLimited: WireError(
            grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "rate_limit_error"
        ),
        errors.RingUnavailable: WireError(
            grpc.StatusCode.UNAVAILABLE, 503, "server_error", "overloaded_error"
        ),
        errors.TooManyViewers: WireError(
            grpc.StatusCode.RESOURCE_EXHAUSTED, 503, "server_error", "overloaded_error"
        ),
        errors.TooManyConnections: WireError(
            grpc.StatusCode.RESOURCE_EXHAUSTED, 503, "server_error", "overloaded_error"
        ),
        # As far as we know: what a grammar asks for may be more than its limits allow.
        errors.ConstraintFailed: _INVALID,
        errors.SlowReader: WireError(
            grpc.StatusCode.ABORTED, 408, "invalid_request_error", "invalid_request_error"
        ),
        errors.StageLost: WireError(grpc.StatusCode.ABORTED, 500, "server_error", "api_error"),
        errors.DeadlineExceeded: WireError(
            grpc.StatusCode.DEADLINE_EXCEEDED, 504, "server_error", "api_error"
        ),
        errors.Cancelled: WireError(grpc.StatusCode.CANCELLED, None, "server_error", "api_error"),
        # A ring that was to be added. Those that run already go on.
        errors.SetupError: WireError(
            grpc.StatusCode.FAILED_PRECONDITION, 503, "server_error", "api_error"
        ),
        errors.ClusterTooSmall: _NO_ROOM,
        errors.ModelDoesNotFit: _NO_ROOM,
        errors.RingserveError: _INTERNAL,
    }
)


def wire_error(error: BaseException) -> WireError:
    """The row of the error's class, or of its nearest parent that has one."""
    rows = (ERROR_TABLE[kind] for kind in type(error).__mro__ if kind in ERROR_TABLE)
    return next(rows, _INTERNAL)


def is_internal(error: BaseException) -> bool:
    """True for what a client is told nothing about; whoever translates such an error logs it."""
    return wire_error(error) is _INTERNAL


def grpc_status(error: BaseException, *, request_id: str = "") -> grpc.Status:
    """The status with its details, ready for ServicerContext.abort_with_status."""
    internal = is_internal(error)
    message = "internal error" if internal else _cut(str(error), _LONGEST_MESSAGE)
    status = status_pb2.Status(code=wire_error(error).grpc.value[0], message=message)
    for detail in _details(error, request_id):
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return rpc_status.to_status(status)


def _details(error: BaseException, request_id: str) -> list[Message]:
    code = error.code if isinstance(error, errors.RingserveError) else errors.RingserveError.code
    facts = {**_facts(error), "request_id": request_id}
    metadata = {name: _cut(value, _LONGEST_VALUE) for name, value in facts.items() if value}
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=code.upper(), domain=ERROR_DOMAIN, metadata=metadata)
    ]
    if isinstance(error, errors.BusyError):
        details.append(error_details_pb2.RetryInfo(retry_delay=_duration(error.retry_after_s)))
    if isinstance(error, errors.InvalidValue):
        details.append(_violation(error))
    return details


def _facts(error: BaseException) -> dict[str, str]:
    match error:
        case errors.InvalidValue():
            return {"field": _grpc_path(error.field)}
        case errors.ContextTooLong():
            return {"prompt_tokens": str(error.prompt_tokens), "limit": str(error.limit)}
        case errors.RequestTooLarge():
            return {
                "received_bytes": str(error.received_bytes),
                "limit_bytes": str(error.limit_bytes),
            }
        case errors.ModelNotFound():
            return {"model": error.model, "served": error.served}
        case errors.ClusterTooSmall():
            return {"wanted": error.wanted, "available": error.available}
        case errors.QueueFull():
            return {"waiting": str(error.waiting), "what": error.reason.value}
        case errors.RateLimited():
            return {"limit": str(error.limit), "what": error.what}
        case errors.RingUnavailable() | errors.StageLost() | errors.ConstraintFailed():
            return {"why": error.reason}
    return {}


def _grpc_path(field: str) -> str:
    """`messages[3].role` is chat.messages[3].role."""
    name, bracket, rest = field.partition("[")
    return _GRPC_PATHS.get(name, name) + bracket + rest


def _violation(error: errors.InvalidValue) -> error_details_pb2.BadRequest:
    violation = error_details_pb2.BadRequest.FieldViolation(
        field=_cut(_grpc_path(error.field), _LONGEST_VALUE),
        description=_cut(error.reason, _LONGEST_MESSAGE),
    )
    return error_details_pb2.BadRequest(field_violations=[violation])


def _duration(seconds: float) -> Duration:
    return Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
