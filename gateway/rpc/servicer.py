"""The methods of ringserve.v1.GenerationService, each a few lines over gateway/service.py.

Errors are raised as they come: interceptors.py makes statuses of them. Generate writes with `context.write`, so that a
cancellation always reaches this coroutine, and with it the job; as an async generator it could be left suspended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from coordinator.errors import InvalidValue, SetupError, SlowReader
from gateway.pb import generation_pb2 as pb
from gateway.pb.generation_pb2_grpc import GenerationServiceServicer
from gateway.rings import RingSet
from gateway.rpc import convert, pages
from gateway.safety.guard import Guard, session_of
from gateway.safety.keys import Caller
from gateway.service import GenerationService

T = TypeVar("T")

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


class GenerationServicer(GenerationServiceServicer):
    """`unread_s`: how long a message may wait for its client."""

    def __init__(
        self, service: GenerationService, rings: RingSet | None, guard: Guard, unread_s: float
    ) -> None:
        self._unread_s = unread_s
        self._service = service
        self._rings = rings
        self._guard = guard

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        timeout_s = context.time_remaining()
        reading = partial(convert.turn_request, request, timeout_s, self._caller(context))
        asked = await self._converted(request, reading)
        turn = replace(asked, request_id=request.request_id, traceparent=_traceparent(context))
        # context.cancelled() may still be False while we are being cancelled: only leaving the block is sure.
        async with aclosing(self._service.generate(turn)) as events:
            async for event in events:
                try:
                    async with asyncio.timeout(self._unread_s):
                        await context.write(convert.response(event))
                except TimeoutError:
                    # Thrown where the turn is watched: whoever counts sees why it ended.
                    await events.athrow(SlowReader(self._unread_s))

    async def CountTokens(
        self, request: pb.CountTokensRequest, context: Any
    ) -> pb.CountTokensResponse:
        prompt = await self._converted(request, partial(convert.prompt, request))
        tokens = await self._service.count_tokens(prompt, request.model)
        rows = self._service.info().max_rows
        return pb.CountTokensResponse(prompt_tokens=tokens, max_context=rows)

    def _caller(self, context: Any) -> Caller:
        """Who the interceptor has let in."""
        return self._guard.caller(context.invocation_metadata() or ())

    async def _converted(self, request: Any, convert_it: Callable[[], T]) -> T:
        return await self._service.converted(request.ByteSize(), convert_it)

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        return convert.model(self._service.name, self._service.info())

    async def ListRings(self, request: pb.ListRingsRequest, context: Any) -> pb.ListRingsResponse:
        rings = (convert.ring_status(status) for status in self._service.rings())
        return pb.ListRingsResponse(rings=rings)

    async def AddRing(self, request: pb.AddRingRequest, context: Any) -> pb.AddRingResponse:
        return pb.AddRingResponse(name=await self._ring_set().add())

    async def DrainRing(self, request: pb.DrainRingRequest, context: Any) -> pb.DrainRingResponse:
        return pb.DrainRingResponse(jobs=self._ring_set().drain(request.name))

    def _ring_set(self) -> RingSet:
        if self._rings is None:
            raise SetupError("the rings of this process are fixed")
        return self._rings

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: Any
    ) -> pb.CloseSessionResponse:
        if not request.session_id:
            raise InvalidValue("session_id", "is empty")
        session = session_of(self._caller(context).name, request.session_id)
        closed = session is not None and self._service.close_session(session)
        return pb.CloseSessionResponse(closed=closed)

    async def ListNodes(self, request: pb.ListNodesRequest, context: Any) -> pb.ListNodesResponse:
        after, size = pages.asked(request)
        page = pages.page(self._service.nodes(request.ring or None), after, size)
        nodes = (convert.node(kept) for kept in page.nodes)
        return pb.ListNodesResponse(nodes=nodes, next_page_token=page.next_token)

    async def PinPrefix(self, request: pb.PinPrefixRequest, context: Any) -> pb.PinPrefixResponse:
        prompt = await self._converted(request, partial(convert.prompt, request))
        tenant = self._caller(context).tenant
        pinned = await self._service.pin_prefix(prompt, request.model, tenant)
        return pb.PinPrefixResponse(tokens=pinned.tokens, rings=pinned.rings)

    async def DropNode(self, request: pb.DropNodeRequest, context: Any) -> pb.DropNodeResponse:
        found = self._service.drop_node(convert.node_id(request.id))
        return pb.DropNodeResponse(found=found)


def _traceparent(context: Any) -> str:
    metadata = context.invocation_metadata() or ()
    return next((value for key, value in metadata if key == "traceparent"), "")
