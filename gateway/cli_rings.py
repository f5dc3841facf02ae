"""`ringserve rings`: what an operator asks of a process that serves, over its gRPC port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from gateway.flags import Json

if TYPE_CHECKING:
    from gateway.client import Client

app = typer.Typer(
    help="Lists, adds and drains the rings of a running ringserve.", no_args_is_help=True
)

Address = Annotated[
    str, typer.Option(envvar="RINGSERVE_ADDRESS", help="HOST:PORT of a running ringserve.")
]
T = TypeVar("T")


@app.command()
def ls(address: Address, as_json: Json = False) -> None:
    """Shows each ring's state and load."""
    rings = _ask(address, lambda client: client.rings())
    if as_json:
        typer.echo(json.dumps({"rings": [_facts(ring) for ring in rings]}))
        return
    for ring in rings:
        typer.echo(_line(ring))


@app.command()
def add(address: Address) -> None:
    """Starts one more ring of the same model; returns when it takes turns. Ctrl-C ends what was started."""
    typer.echo(_ask(address, lambda client: client.add_ring()))


@app.command()
def drain(
    address: Address, name: Annotated[str, typer.Argument(help="As `rings ls` shows it.")]
) -> None:
    """Lets a ring take no more turns; it ends with the last one that it has."""
    jobs = _ask(address, lambda client: client.drain_ring(name))
    typer.echo(f"{name} is draining, {jobs} turns to go")


def _ask(address: str, question: Callable[[Client], Awaitable[T]]) -> T:
    import grpc

    from gateway.client import Client

    async def ask() -> T:
        async with Client(address) as client:
            return await question(client)

    try:
        return asyncio.run(ask())
    except grpc.aio.AioRpcError as error:
        typer.echo(f"error: {error.details()}", err=True)
        raise typer.Exit(1) from None


def _facts(ring: Any) -> dict[str, object]:
    return {
        "name": ring.name,
        "state": _state(ring),
        "lanes": ring.lanes,
        "busy_lanes": ring.busy_lanes,
        "running_jobs": ring.running_jobs,
        "waiting_jobs": ring.waiting_jobs,
        "sessions": ring.sessions,
        "epoch": ring.epoch,
    }


def _line(ring: Any) -> str:
    lanes = f"{ring.busy_lanes} of {ring.lanes} lanes busy"
    jobs = f"{ring.running_jobs} running, {ring.waiting_jobs} waiting"
    return f"{ring.name}: {_state(ring)}, {lanes}, {jobs}, {ring.sessions} sessions"


def _state(ring: Any) -> str:
    if ring.draining:
        return "draining"
    return "ready" if ring.ready else ring.reason or "loading"
