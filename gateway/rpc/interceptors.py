"""The one place where gRPC calls are guarded: request ids, keys, malformed messages, errors into statuses.

It wraps every method of our own service and no other. A client never sees a stack trace: what is not of the error
tree is logged with the request id and answered as INTERNAL. It may not swallow a cancellation: grpc.aio leaks
the call's memory when a handler does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from coordinator.errors import InvalidValue, RingserveError
from gateway.errors import grpc_status, is_internal
from gateway.intake import Intake
from gateway.safety.guard import Guard

logger = logging.getLogger(__name__)

REQUEST_ID_KEY = "x-request-id"
_LONGEST_REQUEST_ID = 128
_TELLING_S = 2.0

# What they change, or show, is everybody's.
OPERATORS_METHODS = frozenset({"AddRing", "DrainRing", "ListNodes", "PinPrefix", "DropNode"})

_Behaviour = Callable[[Any, Any], Awaitable[Any]]


class CallGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Guards the methods whose path begins with `/service/`."""

    def __init__(self, service: str, guard: Guard, intake: Intake) -> None:
        self._prefix = f"/{service}/"
        self._guard = guard
        self._intake = intake

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._prefix):
            return handler
        if handler.response_streaming:
            make, behaviour = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        else:
            make, behaviour = grpc.unary_unary_rpc_method_handler, handler.unary_unary
        # Without a deserializer the call brings bytes: grpc would answer malformed ones without any details.
        name = handler_call_details.method.removeprefix(self._prefix)
        check = self._guard.operator if name in OPERATORS_METHODS else self._guard.caller
        try:
            check(handler_call_details.invocation_metadata or ())
        except RingserveError as error:
            # As a stream of requests, none of which is read: a stranger's message is never in our memory.
            return grpc.stream_stream_rpc_method_handler(_refusing(error))
        held = _holding(behaviour, self._intake)
        guarded = _guarded(held, handler.request_deserializer)
        return make(guarded, None, handler.response_serializer)


def _refusing(error: RingserveError) -> _Behaviour:
    async def call(_: Any, context: Any) -> None:
        await _abort(context, error, _given_request_id(context))

    return call


def _holding(behaviour: _Behaviour, intake: Intake) -> _Behaviour:
    """What a message takes of the memory is counted until its answer has ended."""

    async def call(message: Any, context: Any) -> Any:
        with intake.opened() as held:
            held.add(message.ByteSize())
            return await behaviour(message, context)

    return call


def _guarded(behaviour: _Behaviour, parse: Callable[[bytes], Any]) -> _Behaviour:
    async def call(raw: bytes, context: Any) -> Any:
        request_id = _given_request_id(context)
        try:
            message = _parsed(parse, raw)
            request_id = _clean(getattr(message, "request_id", "")) or request_id
            request_id = request_id or uuid.uuid4().hex
            _name(message, request_id)
            # At once, so that a client knows it was heard while a long prompt is prefilled.
            await context.send_initial_metadata(((REQUEST_ID_KEY, request_id),))
            return await behaviour(message, context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await _abort(context, error, request_id)

    return call


def _parsed(parse: Callable[[bytes], Any], raw: bytes) -> Any:
    try:
        return parse(raw)
    except (DecodeError, UnicodeDecodeError) as error:
        raise InvalidValue("request", "is not a message of this method") from error


def _name(message: Any, request_id: str) -> None:
    """From here on the message carries its id, whoever gave it."""
    if "request_id" in message.DESCRIPTOR.fields_by_name:
        message.request_id = request_id


async def _abort(context: Any, error: Exception, request_id: str) -> None:
    if is_internal(error):
        logger.error("request=%s failed", request_id, exc_info=error)
    else:
        logger.info("request=%s refused: %s", request_id, error.__class__.__name__)
    # A status lies behind what was sent before: a client that does not read is told when it reads on, or never. The
    # call is over here all the same, as it is for a client that leaves meanwhile.
    with contextlib.suppress(TimeoutError, grpc.aio.InternalError):
        async with asyncio.timeout(_TELLING_S):
            await context.abort_with_status(grpc_status(error, request_id=request_id))


def _given_request_id(context: Any) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str):
            return _clean(value)
    return ""


def _clean(request_id: str) -> str:
    """What may go into a header and a log line: visible ASCII, cut short."""
    visible = "".join(char for char in request_id[:_LONGEST_REQUEST_ID] if "!" <= char <= "~")
    return visible
