"""How a command asks a running ringserve: one connection, one question, and an error as one line."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from gateway.client import Client

Address = Annotated[
    str, typer.Option(envvar="RINGSERVE_ADDRESS", help="HOST:PORT of a running ringserve.")
]
T = TypeVar("T")


def ask(address: str, question: Callable[[Client], Awaitable[T]]) -> T:
    """Ends the command with exit code 1 when there is no answer."""
    import grpc

    from gateway.client import Client

    async def asked() -> T:
        async with Client(address) as client:
            return await question(client)

    try:
        return asyncio.run(asked())
    except grpc.aio.AioRpcError as error:
        typer.echo(f"error: {error.details()}", err=True)
        raise typer.Exit(1) from None
