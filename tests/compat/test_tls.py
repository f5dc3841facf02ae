"""TLS and client certificates on both fronts over real sockets, with the clients that people have and with our own."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx2
import openai
import pytest
import trustme
from openai import AsyncOpenAI
from typer.testing import CliRunner

from gateway.cli.app import app
from gateway.cli.serve import ready_line
from gateway.client import client_of
from gateway.http.server import serve_http
from gateway.launch import launch
from gateway.progress import SilentBoard
from gateway.rpc.server import serve_grpc
from gateway.safety.guard import open_guard
from gateway.safety.settings import SafetySettings
from gateway.safety.tls import TlsSettings
from gateway.server_address import ServerAddress
from gateway.settings import GrpcSettings, HttpSettings, RingKind, ServeSettings
from gateway.turns import TextPrompt, TurnRequest

if TYPE_CHECKING:
    from tests.compat.conftest import Site

ASK: Any = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


@dataclass(frozen=True)
class Papers:
    """PEM files of one authority: a server's, a client's (with its key), and a stranger's of another authority."""

    tls: TlsSettings
    ca: Path
    client: Path
    stranger: Path

    def context(self, own: Path | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.ca))
        if own is not None:
            context.load_cert_chain(own)
        return context


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    folder = tmp_path_factory.mktemp("pem")
    authority, another = trustme.CA(), trustme.CA()

    def write(name: str, *parts: trustme.Blob) -> Path:
        path = folder / name
        path.write_bytes(b"".join(part.bytes() for part in parts))
        return path

    server = authority.issue_cert("127.0.0.1", "localhost")
    client, stranger = authority.issue_cert("client"), another.issue_cert("client")
    ca = write("ca.pem", authority.cert_pem)
    return Papers(
        TlsSettings(
            write("server.pem", *server.cert_chain_pems),
            write("server.key", server.private_key_pem),
        ),
        ca,
        write("client.pem", client.private_key_and_cert_chain_pem),
        write("stranger.pem", stranger.private_key_and_cert_chain_pem),
    )


@dataclass(frozen=True)
class Fronts:
    grpc: str
    http: str
    site: Site

    @asynccontextmanager
    async def sdk(self, context: ssl.SSLContext | bool) -> AsyncIterator[AsyncOpenAI]:
        async with httpx2.AsyncClient(verify=context) as http:
            url = f"https://{self.http}/v1"
            yield AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=http)


@pytest.fixture
def fronts(
    site: Callable[..., AbstractAsyncContextManager[Site]],
) -> Callable[..., AbstractAsyncContextManager[Fronts]]:
    @asynccontextmanager
    async def make(safety: SafetySettings) -> AsyncIterator[Fronts]:
        guard = open_guard(safety)
        async with (
            site() as fake,
            serve_grpc(fake.service, GrpcSettings(drain_s=0.0), guard=guard) as at,
            serve_http(fake.service, HttpSettings(drain_s=0.0), guard=guard) as http,
        ):
            yield Fronts(at, http, fake)

    return make


async def _told(server: ServerAddress) -> str:
    async with client_of(server) as client:
        await client.rings()
        async with client.generate(TurnRequest(TextPrompt("Hello"), max_tokens=2)) as stream:
            return type([event async for event in stream][-1]).__name__


async def test_both_fronts_speak_tls_and_nothing_else(fronts: Any, papers: Papers) -> None:
    async with fronts(SafetySettings(tls=papers.tls)) as it:
        assert await _told(ServerAddress(it.grpc, tls_ca=papers.ca)) == "TurnFinished"
        async with it.sdk(papers.context()) as client:
            answer = await client.chat.completions.create(**ASK)
            assert answer.usage.completion_tokens > 0
            stream = await client.chat.completions.create(**ASK, stream=True)
            assert [chunk async for chunk in stream][-1].choices[0].finish_reason
        with pytest.raises(grpc.aio.AioRpcError):
            await _told(ServerAddress(it.grpc))
        async with httpx2.AsyncClient() as plain:
            with pytest.raises(httpx2.TransportError):
                await plain.get(f"http://{it.http}/health")


async def test_a_client_that_does_not_know_the_authority_says_nothing(
    fronts: Any, papers: Papers
) -> None:
    async with fronts(SafetySettings(tls=papers.tls)) as it:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await _told(ServerAddress(f"grpcs://{it.grpc}"))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        async with it.sdk(True) as client:
            with pytest.raises(openai.APIConnectionError):
                await client.chat.completions.create(**ASK)


async def test_with_an_authority_of_clients_only_its_certificates_get_in(
    fronts: Any, papers: Papers
) -> None:
    tls = TlsSettings(papers.tls.cert, papers.tls.key, papers.ca)
    async with fronts(SafetySettings(tls=tls)) as it:
        own = ServerAddress(it.grpc, tls_ca=papers.ca, client_cert=papers.client)
        assert await _told(own) == "TurnFinished"
        async with it.sdk(papers.context(papers.client)) as client:
            assert (await client.chat.completions.create(**ASK)).usage.completion_tokens > 0
        for other in (None, papers.stranger):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await _told(ServerAddress(it.grpc, tls_ca=papers.ca, client_cert=other))
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            async with it.sdk(papers.context(other)) as client:
                with pytest.raises(openai.APIConnectionError):
                    await client.chat.completions.create(**ASK)
        assert await _told(own) == "TurnFinished"


def _ringserve(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


async def test_our_commands_reach_a_guarded_server_and_its_ready_line_says_how(
    papers: Papers,
) -> None:
    tls = TlsSettings(papers.tls.cert, papers.tls.key, papers.ca)
    settings = ServeSettings(
        model="fake", ring=RingKind.FAKE, safety=SafetySettings(api_keys="sk-one", tls=tls)
    )
    async with launch(settings, SilentBoard()) as running:
        line = ready_line(running, settings)
        assert f"ready: grpc grpcs://{running.grpc_address}, " in line
        assert f"http https://{running.http_address}/v1" in line
        ask = ("rings", "ls", "--address", line.split()[2].rstrip(","), "--tls-ca", papers.ca)
        own = ("--client-cert", papers.client, "--api-key", "sk-one")
        code, told = await asyncio.to_thread(_ringserve, *ask, *own)
        assert (code, told.startswith("ring-0: ready")) == (0, True), told
        code, told = await asyncio.to_thread(_ringserve, *ask, *own[:2])
        assert (code, "an API key is needed" in told) == (1, True)
        code, told = await asyncio.to_thread(_ringserve, *ask, "--client-cert", papers.ca)
        assert (code, "key" in told) == (2, True)
