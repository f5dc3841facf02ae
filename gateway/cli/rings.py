"""`ringserve rings`: what an operator asks of a process that serves, over its gRPC port."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from gateway.cli.asking import Address, ApiKey, ClientCert, TlsCa, ask
from gateway.cli.flags import Json
from gateway.server_address import ServerAddress

app = typer.Typer(
    help="Lists, adds and drains the rings of a running ringserve.", no_args_is_help=True
)


@app.command()
def ls(
    address: Address,
    api_key: ApiKey = None,
    tls_ca: TlsCa = None,
    client_cert: ClientCert = None,
    as_json: Json = False,
) -> None:
    """Shows each ring's state and load, what its host memory holds, and why turns missed what their sessions had."""
    server = ServerAddress(address, api_key, tls_ca, client_cert)
    rings = ask(server, lambda client: client.rings())
    if as_json:
        typer.echo(json.dumps({"rings": [_facts(ring) for ring in rings]}))
        return
    for ring in rings:
        typer.echo(_line(ring))


@app.command()
def add(
    address: Address,
    api_key: ApiKey = None,
    tls_ca: TlsCa = None,
    client_cert: ClientCert = None,
) -> None:
    """Starts one more ring of the same model; returns when it takes turns. Ctrl-C ends what was started."""
    server = ServerAddress(address, api_key, tls_ca, client_cert)
    typer.echo(ask(server, lambda client: client.add_ring()))


@app.command()
def drain(
    address: Address,
    name: Annotated[str, typer.Argument(help="As `rings ls` shows it.")],
    api_key: ApiKey = None,
    tls_ca: TlsCa = None,
    client_cert: ClientCert = None,
) -> None:
    """Lets a ring take no more turns; it ends with the last one that it has."""
    server = ServerAddress(address, api_key, tls_ca, client_cert)
    jobs = ask(server, lambda client: client.drain_ring(name))
    typer.echo(f"{name} is draining, {jobs} turns to go")


def _facts(ring: Any) -> dict[str, object]:
    return {
        "name": ring.name,
        "state": _state(ring),
        "reason": "" if ring.ready else ring.reason,
        "lanes": ring.lanes,
        "busy_lanes": ring.busy_lanes,
        "running_jobs": ring.running_jobs,
        "waiting_jobs": ring.waiting_jobs,
        "sessions": ring.sessions,
        "epoch": ring.epoch,
        "spares": ring.spares,
        "replaced_stages": ring.replaced_stages,
        "host_rows": ring.host_rows,
        "stored_rows": ring.stored_rows,
        "pinned_rows": ring.pinned_rows,
        "prefilled_rows": ring.counts.prefilled_rows,
        "reused_rows": ring.counts.reused_rows,
        "restored_rows": ring.counts.restored_rows,
        "ahead_rows": ring.counts.ahead_rows,
        "refusals": ring.counts.refusals,
        "misses": _misses(ring),
    }


def _line(ring: Any) -> str:
    lanes = f"{ring.busy_lanes} of {ring.lanes} lanes busy"
    jobs = f"{ring.running_jobs} running, {ring.waiting_jobs} waiting"
    state = _state(ring)
    why = ring.reason.removeprefix(f"{state}: ")
    reason = f" ({why})" if state in ("recovering", "down") else ""
    parts = [f"{ring.name}: {state}{reason}", lanes, jobs, f"{ring.sessions} sessions"]
    if ring.epoch:
        parts.append(f"epoch {ring.epoch}")
    if ring.replaced_stages:
        parts.append(f"{ring.replaced_stages} stages replaced")
    if ring.spares:
        parts.append(f"{ring.spares} spare")
    if ring.host_rows:
        parts.append(
            f"{ring.stored_rows} of {ring.host_rows} rows stored ({ring.pinned_rows} pinned)"
        )
    misses = [f"{turns} {reason}" for reason, turns in _misses(ring).items()]
    if misses:
        parts.append(f"misses: {' + '.join(misses)}")
    return ", ".join(parts)


def _misses(ring: Any) -> dict[str, int]:
    """Turns by reason, in the words of docs and metrics."""
    from gateway.rpc.client_convert import miss_kind

    known = ((miss_kind(miss.reason), miss.turns) for miss in ring.counts.misses)
    return {str(kind): turns for kind, turns in known if kind is not None}


def _state(ring: Any) -> str:
    """RingStatus.state's words."""
    if ring.draining:
        return "draining"
    if ring.ready:
        return "ready"
    if ring.recovering:
        return "recovering"
    return "down" if ring.lanes else "loading"  # nothing is known of it before it has loaded
