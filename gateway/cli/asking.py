"""How a command asks a running ringserve: one connection, one question, and an error as one line."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from coordinator.errors import SetupError
from gateway.cli.exits import fail
from gateway.server_address import ServerAddress

if TYPE_CHECKING:
    from gateway.client import Client

Address = Annotated[
    str, typer.Option(envvar="RINGSERVE_ADDRESS", help="HOST:PORT of a running ringserve.")
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="RINGSERVE_API_KEY",
        metavar="KEY",
        help="A key of the server. Others on this machine can read a command line: rather use the variable.",
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        envvar="RINGSERVE_TLS_CA",
        dir_okay=False,
        help="The authority of the server's certificate (PEM). An address with grpcs:// in front needs none "
        "where it is a public one.",
    ),
]
ClientCert = Annotated[
    Path | None,
    typer.Option(
        envvar="RINGSERVE_CLIENT_CERT",
        dir_okay=False,
        help="A certificate and its key in one PEM file, for a server with --tls-client-ca.",
    ),
]
T = TypeVar("T")


def ask(server: ServerAddress, question: Callable[[Client], Awaitable[T]]) -> T:
    """Ends the command with exit code 1 when there is no answer."""
    import grpc

    from gateway.client import client_of

    async def asked() -> T:
        async with client_of(server) as client:
            return await question(client)

    try:
        return asyncio.run(asked())
    except SetupError as error:
        raise typer.Exit(fail(error)) from None
    except grpc.aio.AioRpcError as error:
        typer.echo(f"error: {error.details()}", err=True)
        raise typer.Exit(1) from None
