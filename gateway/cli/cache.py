"""`ringserve cache`: what the rings keep in host memory, and what of it stays, by an operator's word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.errors import InvalidSetting
from gateway.cli.asking import Address, ApiKey, ClientCert, TlsCa, ask
from gateway.cli.exits import fail
from gateway.cli.flags import Json
from gateway.server_address import ServerAddress

if TYPE_CHECKING:
    from gateway.client import Client
    from gateway.turns import Prompt

app = typer.Typer(
    help="Lists, pins and drops the rows that a running ringserve keeps in host memory.",
    no_args_is_help=True,
)


@app.command()
def ls(
    address: Address,
    ring: Annotated[str, typer.Option(help="Only this one's.", show_default="all rings'")] = "",
    api_key: ApiKey = None,
    tls_ca: TlsCa = None,
    client_cert: ClientCert = None,
    as_json: Json = False,
) -> None:
    """Shows each node: a block of rows that every prompt with the same beginning can take up."""

    async def listed(client: Client) -> list[Any]:
        return [node async for node in client.nodes(ring)]

    server = ServerAddress(address, api_key, tls_ca, client_cert)
    nodes = ask(server, listed)
    if as_json:
        typer.echo(json.dumps({"nodes": [_facts(node) for node in nodes]}))
        return
    for node in nodes:
        typer.echo(_line(node))
    rows = sum(node.end - node.start for node in nodes)
    pinned = sum(node.end - node.start for node in nodes if node.pinned)
    typer.echo(f"{len(nodes)} nodes, {rows} rows, {pinned} of them pinned")


@app.command()
def pin(
    address: Address,
    text: Annotated[str | None, typer.Option(help="What prompts begin with, as text.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="The same, in a text file."),
    ] = None,
    chat: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="A JSON file of messages, tools and template_args; "
            "of a system message and tools alone, what each such chat begins with.",
        ),
    ] = None,
    api_key: ApiKey = None,
    tls_ca: TlsCa = None,
    client_cert: ClientCert = None,
) -> None:
    """Keeps the rows of a prompt's beginning, on each ring that has computed them, until they are dropped."""
    try:
        prompt = _prompt(text, file, chat)
    except InvalidSetting as error:
        raise typer.Exit(fail(error)) from None
    server = ServerAddress(address, api_key, tls_ca, client_cert)
    pinned = ask(server, lambda client: client.pin_prefix(prompt))
    typer.echo(f"pinned {pinned.tokens} tokens on {', '.join(pinned.rings)}")


@app.command()
def drop(
    address: Address,
    node: Annotated[str, typer.Argument(help="As `cache ls` shows it.")],
    api_key: ApiKey = None,
    tls_ca: TlsCa = None,
    client_cert: ClientCert = None,
) -> None:
    """Drops a node and all that go on from it, pinned or not, on every ring."""
    server = ServerAddress(address, api_key, tls_ca, client_cert)
    if not ask(server, lambda client: client.drop_node(node)):
        typer.echo(f"error: no ring has a node {node}", err=True)
        raise typer.Exit(1)
    typer.echo(f"dropped {node}")


def _prompt(text: str | None, file: Path | None, chat: Path | None) -> Prompt:
    """Raises InvalidSetting."""
    from gateway.cli.chat_file import parse_chat
    from gateway.turns import TextPrompt

    if [text, file, chat].count(None) != 2:
        raise InvalidSetting("text", "give one of --text, --file and --chat")
    if text is not None:
        return TextPrompt(text)
    if file is not None:
        return TextPrompt(_read(file))
    assert chat is not None
    return parse_chat(_read(chat))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting("file", f"{path} cannot be read: {error}") from error


def _facts(node: Any) -> dict[str, object]:
    return {
        "ring": node.ring,
        "id": node.id,
        "parent_id": node.parent_id,
        "start": node.start,
        "end": node.end,
        "pinned": node.pinned,
    }


def _line(node: Any) -> str:
    pinned = ", pinned" if node.pinned else ""
    return f"{node.ring} {node.id} rows {node.start} to {node.end}{pinned}"
