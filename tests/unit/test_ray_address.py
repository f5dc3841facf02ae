"""What is said of an address at which there is no Ray; a real one is among the tests of a cluster."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from coordinator.errors import InvalidSetting, SetupError
from gateway import ray_address
from gateway.ray_address import check_ray
from gateway.settings import ServeSettings

_METHOD = "/ray.rpc.NodeInfoGcsService/GetClusterId"


@contextmanager
def _silent() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def _speaks_no_grpc() -> Iterator[str]:
    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with ThreadPoolExecutor() as pool, socket.create_server(("127.0.0.1", 0)) as listener:
        pool.submit(answer)
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def _grpc(answer: Callable[[bytes, grpc.ServicerContext], bytes] | None) -> Iterator[str]:
    service, method = _METHOD[1:].split("/")
    server = grpc.server(ThreadPoolExecutor(1))
    if answer is not None:
        handler = grpc.unary_unary_rpc_method_handler(answer)
        server.add_registered_method_handlers(service, {method: handler})
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def _guarded(_: bytes, context: grpc.ServicerContext) -> bytes:
    assert "authorization" not in dict(context.invocation_metadata())
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")


@pytest.fixture(autouse=True)
def no_ray_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_USE_TLS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "")  # put back behind the test, whatever it becomes
    monkeypatch.setenv("HOME", str(tmp_path))


def _refusal(address: str) -> str:
    with pytest.raises(SetupError) as refused:
        check_ray(address)
    text = str(refused.value)
    assert address in text
    assert "\n" not in text
    return text


def test_nobody_a_silent_one_and_strangers_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with _silent() as address:
        monkeypatch.setattr(ray_address, "_ANSWER_S", 0.2)
        assert _refusal(address).endswith(": no answer within 0.2 s")
    monkeypatch.undo()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    assert _refusal(address).endswith(": Connection refused")
    with _speaks_no_grpc() as address:
        assert ": Failed parsing HTTP/2" in _refusal(address)
    with _grpc(None) as address:
        assert _refusal(address).endswith(": something else listens there")


def test_a_ray_that_answers_may_be_joined() -> None:
    with _grpc(lambda _, __: b"") as address:
        check_ray(address)


def test_a_missing_token_is_named_and_none_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with _grpc(_guarded) as address:
        assert "asks for a token: put its ~/.ray/auth_token on this" in _refusal(address)
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        check_ray(address)
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        assert _refusal(address).endswith("RAY_AUTH_MODE=disabled is set here; unset it")


@pytest.mark.parametrize("where", ["home", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"])
def test_a_token_of_this_machine_is_used_where_one_is_asked_for(
    where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A head that was started where a token lies asks for it, whatever the shell says."""
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    if where == "RAY_AUTH_TOKEN":
        monkeypatch.setenv(where, "t" * 64)
    else:
        file.write_text("t" * 64)
    if where == "RAY_AUTH_TOKEN_PATH":
        monkeypatch.setenv(where, str(file.rename(tmp_path / "token")))
    with _grpc(lambda _, __: b"") as address:
        check_ray(address)
    assert os.environ["RAY_AUTH_MODE"] == ""
    with _grpc(_guarded) as address:
        check_ray(address)
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_a_ray_with_tls_is_left_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    check_ray("127.0.0.1:1")


@pytest.mark.parametrize(
    "address",
    ["nonsense", "host:", ":6379", "host:0", "host:65536", "ray://host:10001", "auto", ""],
)
def test_an_address_that_is_none_is_refused_before_anybody_is_asked(address: str) -> None:
    with pytest.raises(InvalidSetting, match="ray_address: must be HOST:PORT"):
        ServeSettings(model="m", ray_address=address)


@pytest.mark.parametrize("address", ["host:6379", "10.0.0.1:65535", "[::1]:6379"])
def test_an_address_is_taken_as_ray_writes_it(address: str) -> None:
    assert ServeSettings(model="m", ray_address=address).ray_address == address
