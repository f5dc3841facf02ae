"""The methods of ringserve.v1.GenerationService, each a few lines over gateway/service.py.

Errors are raised as they come: interceptors.py makes statuses of them. Generate writes with `context.write`, so that a
cancellation always reaches this coroutine, and with it the job; as an async generator it could be left suspended.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

from coordinator.errors import InvalidValue
from coordinator.requests import SessionId
from gateway.pb import generation_pb2 as pb
from gateway.pb.generation_pb2_grpc import GenerationServiceServicer
from gateway.rpc import convert
from gateway.service import GenerationService

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


class GenerationServicer(GenerationServiceServicer):
    def __init__(self, service: GenerationService) -> None:
        self._service = service

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        turn = convert.turn_request(request, timeout_s=context.time_remaining())
        # context.cancelled() may still be False while we are being cancelled: only leaving the block is sure.
        async with aclosing(self._service.generate(turn)) as events:
            async for event in events:
                await context.write(convert.response(event))

    async def CountTokens(
        self, request: pb.CountTokensRequest, context: Any
    ) -> pb.CountTokensResponse:
        tokens = await self._service.count_tokens(convert.prompt(request), request.model)
        rows = self._service.info().max_rows
        return pb.CountTokensResponse(prompt_tokens=tokens, max_context=rows)

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        return convert.model(self._service.name, self._service.info())

    async def ListRings(self, request: pb.ListRingsRequest, context: Any) -> pb.ListRingsResponse:
        rings = (convert.ring_status(status) for status in self._service.rings())
        return pb.ListRingsResponse(rings=rings)

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: Any
    ) -> pb.CloseSessionResponse:
        if not request.session_id:
            raise InvalidValue("session_id", "is empty")
        closed = self._service.close_session(SessionId(request.session_id))
        return pb.CloseSessionResponse(closed=closed)
