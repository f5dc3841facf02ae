"""A terminal client on the gRPC API, for `ringserve chat`.

It keeps the conversation and shows what each turn reused. Ctrl-C ends the answer that is being written; what came of it
stays in the conversation. On a pipe it asks without a prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
import time
import uuid

import grpc
from rich.console import Console

from coordinator.requests import SamplingSpec, SessionId
from gateway.chat.messages import Message
from gateway.cli.chat_options import ChatOptions
from gateway.cli.entry import INTERRUPTED
from gateway.client import Client, client_of, error_info
from gateway.server_address import ServerAddress
from gateway.turns import (
    ChatPrompt,
    TurnDelta,
    TurnFinished,
    TurnRecovering,
    TurnRequest,
    TurnStarted,
)

_PAUSE = "\n(the ring lost a stage; going on shortly)"


def talk(options: ChatOptions) -> int:
    """Until the end of input; returns the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # input() then edits lines and remembers them
    with asyncio.Runner() as runner:
        client = runner.run(_connect(options.server))
        try:
            model = runner.run(client.model())
            console.print(
                f"{model.name}, {model.max_context} tokens, {model.numerics}", style="dim"
            )
            return _converse(
                runner, _Conversation(client, options, console), options.server.address
            )
        except grpc.aio.AioRpcError as error:
            console.print(_said(error, options.server.address), style="red", markup=False)
            return 1
        except KeyboardInterrupt:
            console.print()
            return INTERRUPTED
        finally:
            runner.run(client.__aexit__(None, None, None))


async def _connect(server: ServerAddress) -> Client:
    return client_of(server)


class _Conversation:
    def __init__(self, client: Client, options: ChatOptions, console: Console) -> None:
        self.console = console
        self._client = client
        self._options = options
        self._session = SessionId(uuid.uuid4().hex)
        system = options.system
        self._messages = [] if system is None else [Message("system", system)]

    async def turn(self, text: str) -> None:
        """One question and its answer. Raises AioRpcError, and then the question is forgotten."""
        self._messages.append(Message("user", text))
        answer: list[str] = []
        try:
            await self._answer(answer)
        except grpc.aio.AioRpcError:
            if not answer:
                del self._messages[-1]
            raise
        finally:
            if answer:
                self._messages.append(Message("assistant", "".join(answer)))

    async def _answer(self, answer: list[str]) -> None:
        asked_s = first_s = time.monotonic()
        async with self._client.generate(self._request()) as stream:
            async for event in stream:
                match event:
                    case TurnStarted(cached_prefix=cached, prompt_tokens=prompt):
                        self.console.print(
                            f"[{prompt} tokens, {cached} cached]", style="dim", markup=False
                        )
                    case TurnDelta(text=text) if text:
                        first_s = first_s if answer else time.monotonic()
                        answer.append(text)
                        self.console.print(text, end="", markup=False, soft_wrap=True)
                    case TurnRecovering():
                        self.console.print(_PAUSE, style="dim", markup=False)
                    case TurnFinished():
                        self._footer(event, first_s - asked_s, time.monotonic() - first_s)

    def _request(self) -> TurnRequest:
        options = self._options
        return TurnRequest(
            prompt=ChatPrompt(tuple(self._messages)),
            session=self._session,
            sampling=SamplingSpec(temperature=options.temperature),
            seed=options.seed,
            max_tokens=options.max_tokens,
        )

    def _footer(self, event: TurnFinished, first_s: float, rest_s: float) -> None:
        tokens = event.usage.generated_tokens
        rate = (tokens - 1) / rest_s if rest_s > 0 else 0.0
        self.console.print(
            f"\n[{event.reason}, {tokens} tokens, first after {first_s:.2f} s, {rate:.1f} tokens/s]",
            style="dim",
            markup=False,
        )


def _converse(runner: asyncio.Runner, conversation: _Conversation, address: str) -> int:
    console = conversation.console
    asks = sys.stdin.isatty()
    while True:
        try:
            text = input("> " if asks else "").strip()
        except EOFError:
            if asks:
                console.print()
            return 0
        except KeyboardInterrupt:
            console.print()
            return INTERRUPTED
        if not text:
            continue
        try:
            runner.run(conversation.turn(text))
        except KeyboardInterrupt:
            console.print("\n[interrupted]", style="dim", markup=False)
        except grpc.aio.AioRpcError as error:
            console.print(_said(error, address), style="red", markup=False)
            if error.code() is grpc.StatusCode.UNAVAILABLE and error_info(error) is None:
                return 1


def _said(error: grpc.aio.AioRpcError, address: str) -> str:
    info = error_info(error)
    if info is not None:
        return f"{info.reason.lower()}: {error.details()}"
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        reason = (error.details() or "no reason given").rpartition("; ")[2]
        return f"cannot reach {address}: {reason}"
    return f"{error.code().name.lower()}: {error.details()}"
