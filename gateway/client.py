"""An async Python client of ringserve's gRPC API, with typed turns.

Its streams are async context managers: leaving one cancels the call, and with it the turn. Dropping a bare gRPC call
object, or breaking out of its loop, does not. Errors are grpc.aio.AioRpcError; `error_info` reads their details.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from coordinator.requests import SessionId
from gateway.pb import generation_pb2 as pb
from gateway.pb.generation_pb2_grpc import GenerationServiceStub
from gateway.rpc.client_convert import generate_request, put_prompt, turn_event
from gateway.server_address import ClientTls, ServerAddress
from gateway.turns import Prompt, TurnEvent, TurnRequest

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.max_send_message_length", 16 * 2**20),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 65536),
    # Slower than the server's minimum, so that a silent prefill is never taken for a dead connection.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """What google.rpc.ErrorInfo says, and how long RetryInfo says to wait."""

    reason: str
    metadata: dict[str, str]
    retry_after_s: float | None = None


class TurnStream:
    """One running turn. Iterate inside `async with`; leaving it cancels what still runs."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def __aenter__(self) -> TurnStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._call.cancel()

    def __aiter__(self) -> TurnStream:
        return self

    async def __anext__(self) -> TurnEvent:
        while True:
            message = await self._call.read()
            if message is grpc.aio.EOF:
                raise StopAsyncIteration
            event = turn_event(message)
            if event is not None:
                return event


class Client:
    """`async with Client("127.0.0.1:50051") as client`. The server is not contacted before the first call.

    `tls` None: in plain text, the key too. `answer_s`: what any answer may take but a turn's and a new ring's, which
    have no bound but their own; a server that is gone is noticed by its silence.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str = "",
        tls: ClientTls | None = None,
        answer_s: float = 60.0,
    ) -> None:
        self._channel = _channel(address, tls)
        self._answer_s = answer_s
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._stub: Any = GenerationServiceStub(self._channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._channel.close(None)

    def generate(self, turn: TurnRequest, *, request_id: str = "") -> TurnStream:
        """Raises AioRpcError from the stream. `turn.timeout_s` becomes the call's deadline."""
        message = generate_request(turn, request_id)
        return TurnStream(
            self._stub.Generate(message, timeout=turn.timeout_s, metadata=self._metadata)
        )

    async def _ask(self, method: Any, message: Any) -> Any:
        return await method(message, metadata=self._metadata, timeout=self._answer_s)

    async def count_tokens(self, prompt: Prompt) -> int:
        message = pb.CountTokensRequest()
        put_prompt(message, prompt)
        answer: pb.CountTokensResponse = await self._ask(self._stub.CountTokens, message)
        return answer.prompt_tokens

    async def model(self) -> pb.GetModelResponse:
        answer: pb.GetModelResponse = await self._ask(self._stub.GetModel, pb.GetModelRequest())
        return answer

    async def rings(self) -> tuple[pb.RingStatus, ...]:
        answer: pb.ListRingsResponse = await self._ask(self._stub.ListRings, pb.ListRingsRequest())
        return tuple(answer.rings)

    async def add_ring(self) -> str:
        """The new ring's name, when it takes turns: that may be minutes. Leaving ends what was started."""
        answer: pb.AddRingResponse = await self._stub.AddRing(
            pb.AddRingRequest(), metadata=self._metadata
        )
        return answer.name

    async def drain_ring(self, name: str) -> int:
        """How many turns the ring still has; it ends with the last one."""
        message = pb.DrainRingRequest(name=name)
        answer: pb.DrainRingResponse = await self._ask(self._stub.DrainRing, message)
        return answer.jobs

    async def nodes(self, ring: str = "") -> AsyncIterator[pb.Node]:
        """What the rings, or the one of that name, keep in host memory, page by page."""
        request = pb.ListNodesRequest(ring=ring)
        while True:
            answer: pb.ListNodesResponse = await self._ask(self._stub.ListNodes, request)
            for node in answer.nodes:
                yield node
            if not answer.next_page_token:
                return
            request.page_token = answer.next_page_token

    async def pin_prefix(self, prompt: Prompt) -> pb.PinPrefixResponse:
        """Keeps what a prompt without its answer begins with, on each ring that holds its rows, until it is dropped."""
        message = pb.PinPrefixRequest()
        put_prompt(message, prompt)
        answer: pb.PinPrefixResponse = await self._ask(self._stub.PinPrefix, message)
        return answer

    async def drop_node(self, node: str) -> bool:
        """By the id that `nodes` shows; False when no ring has it."""
        answer: pb.DropNodeResponse = await self._ask(
            self._stub.DropNode, pb.DropNodeRequest(id=node)
        )
        return answer.found

    async def close_session(self, session: SessionId) -> bool:
        message = pb.CloseSessionRequest(session_id=session)
        answer: pb.CloseSessionResponse = await self._ask(self._stub.CloseSession, message)
        return answer.closed


def client_of(server: ServerAddress) -> Client:
    """Raises InvalidSetting."""
    return Client(server.host_port, api_key=server.key, tls=server.tls())


def _channel(address: str, tls: ClientTls | None) -> Any:
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    own = tls.cert_and_key
    credentials = grpc.ssl_channel_credentials(tls.ca, private_key=own, certificate_chain=own)
    return grpc.aio.secure_channel(address, credentials, options=_OPTIONS)


def error_info(error: grpc.aio.AioRpcError) -> ErrorInfo | None:
    """The details that ringserve sent with a status; None when there are none, as when the server is away."""
    status = rpc_status.from_call(error)
    if status is None:
        return None
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    retry_after_s = None
    for detail in status.details:
        detail.Unpack(info)
        if detail.Unpack(retry):
            retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    if not info.reason:
        return None
    return ErrorInfo(info.reason, dict(info.metadata), retry_after_s)
