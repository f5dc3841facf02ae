"""`ringserve ps`, `stop` and `drain`: the detached rings of a Ray cluster, whoever drives them.

Shows what their own processes say. A ring that a gateway drives is its gateway's: drain asks it, over its gRPC port,
and stop goes past it only with --force.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from coordinator.errors import SetupError
from gateway.cli.asking import ApiKey, ClientCert, TlsCa, ask
from gateway.cli.exits import fail
from gateway.cli.flags import Json
from gateway.server_address import ServerAddress
from gateway.standing import connected, end, sight, sights

if TYPE_CHECKING:
    from stage.ray_ring.census import RingSight, StageSight

Cluster = Annotated[
    str,
    typer.Option(
        "--ray-address",
        envvar="RINGSERVE_RAY_ADDRESS",
        help="The Ray cluster: HOST:PORT, as for ray start --address.",
    ),
]
RingName = Annotated[str, typer.Argument(metavar="RING", help="As `ringserve ps` shows it.")]
T = TypeVar("T")


def ps(ray_address: Cluster, as_json: Json = False) -> None:
    """Lists the detached rings of a Ray cluster: their stages, what their lanes hold, and who drives them."""
    rings = _in_cluster(ray_address, sights)
    if as_json:
        typer.echo(json.dumps({"rings": [_facts(ring) for ring in rings]}))
        return
    for ring in rings:
        for line in _lines(ring):
            typer.echo(line)
    if not rings:
        typer.echo("no detached ring", err=True)


def stop(
    ring: RingName,
    ray_address: Cluster,
    force: Annotated[
        bool, typer.Option("--force", help="Also one that a gateway drives; its turns end.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Ends a detached ring: its processes, what their lanes hold, and its places in the cluster."""
    ended = _in_cluster(ray_address, lambda: end(ring, force=force))
    told = f"{ring} has ended, {len(ended.stages)} processes"
    typer.echo(json.dumps({"ended": ring}) if as_json else told)


def drain(
    ring: RingName,
    ray_address: Cluster,
    api_key: ApiKey = None,
    tls_ca: TlsCa = None,
    client_cert: ClientCert = None,
    as_json: Json = False,
) -> None:
    """Lets a detached ring take no more turns; it ends with its last one. One that nobody drives has none."""
    found = _in_cluster(ray_address, lambda: sight(ring))
    if found.tenure is None:
        stop(ring, ray_address, as_json=as_json)
        return
    server = ServerAddress(found.tenure.owner.grpc, api_key, tls_ca, client_cert)
    turns = ask(server, lambda client: client.drain_ring(ring))
    told = f"{ring} is draining, {turns} turns to go"
    typer.echo(json.dumps({"draining": ring, "turns": turns}) if as_json else told)


def _in_cluster(ray_address: str, question: Callable[[], Awaitable[T]]) -> T:
    """Ends the command when there is no answer."""

    async def asked() -> T:
        async with connected(ray_address):
            return await question()

    try:
        return asyncio.run(asked())
    except SetupError as error:
        raise typer.Exit(fail(error)) from None


def _lines(ring: RingSight) -> list[str]:
    model = f"model {ring.model}" if ring.model else "none of its processes answers"
    driven = "driven by nobody" if ring.tenure is None else f"driven by {ring.tenure.owner}"
    rows = " + ".join(map(str, ring.rows)) or "0"
    head = f"{ring.name}: {model}, epoch {ring.epoch}, {driven}, lanes with {rows} rows of {ring.max_rows}"
    return [head, *(f"  {_stage_line(stage)}" for stage in ring.stages)]


def _stage_line(stage: StageSight) -> str:
    if not stage.answers:
        return "a process that does not answer"
    what = "spare or loading" if stage.stage is None else f"stage {stage.stage}"
    return f"{what}: node {stage.node}, pid {stage.pid}"


def _facts(ring: RingSight) -> dict[str, object]:
    """As a script wants it; the owner's id and space are nobody's business."""
    facts = asdict(ring)
    tenure = facts.pop("tenure")
    driver = None
    if tenure is not None:
        owner = tenure["owner"]
        driver = {name: owner[name] for name in ("host", "pid", "grpc", "http")}
    return {**facts, "driver": driver}
