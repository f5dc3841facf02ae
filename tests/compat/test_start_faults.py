"""What `ringserve serve` says when its host has no port or no ear for it: one line, and nothing hangs.

Each server is a process of its own; a fake ring needs no model.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from coordinator.errors import CannotListen
from gateway.listening import bound

_ROOT = Path(__file__).parents[2]
_MAIN = "from gateway.cli.app import main; main()"
_SERVE = (sys.executable, "-c", _MAIN, "serve", "demo", "--ring", "fake")
_FREE = ("--grpc-port", "0", "--http-port", "0")
_END_S = 40.0


def _refused(*flags: str, before: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a server that must not come up."""
    done = subprocess.run(
        [*before, *_SERVE, *flags], cwd=_ROOT, capture_output=True, text=True, timeout=_END_S
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("flag", "other"), [("grpc", "http"), ("http", "grpc")])
def test_a_port_that_is_taken_is_named_with_its_flag(flag: str, other: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        got = _refused(f"--{flag}-port", str(port), f"--{other}-port", "0")
    said = (
        f"error: cannot listen on 127.0.0.1:{port}: the port is taken; "
        f"end who listens there, or give another one with --{flag}-port\n"
    )
    assert got == (1, "", said)


def test_an_address_of_another_machine_is_named() -> None:
    code, out, said = _refused(*_FREE, "--host", "192.0.2.1", "--insecure")
    assert (code, out) == (1, "")
    assert said == (
        "error: cannot listen on 192.0.2.1:0: that address is not this machine's; "
        "give one that is with --host\n"
    )


def test_a_host_that_does_not_exist_is_named() -> None:
    with pytest.raises(CannotListen, match=r"nowhere.invalid:8000: no such host \(.*--host"):
        bound("nowhere.invalid", 8000, "--http-port")


# Takes every port that its network may choose from, then becomes the program that is named behind it.
_TAKE_ALL = """
import os, socket, subprocess, sys
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
with open("/proc/sys/net/ipv4/ip_local_port_range", "w") as range_:
    range_.write("40000 40001")
for port in (40000, 40001):
    taken = socket.create_server(("127.0.0.1", port))
    os.set_inheritable(taken.detach(), True)
os.execv(sys.argv[1], sys.argv[1:])
"""
_ALONE = ("unshare", "--map-root-user", "--net", sys.executable, "-c", _TAKE_ALL)


@pytest.fixture
def no_ports() -> tuple[str, ...]:
    """What runs a command in a network of its own, in which no port is free."""
    probe = subprocess.run([*_ALONE, "/bin/true"], capture_output=True, timeout=_END_S)
    if probe.returncode != 0:
        pytest.skip(f"no network of one's own here: {probe.stderr.decode().strip()[-200:]}")
    return _ALONE


def test_a_host_without_a_free_port_is_told_apart(no_ports: tuple[str, ...]) -> None:
    code, out, said = _refused(*_FREE, before=no_ports)
    assert (code, out) == (1, "")
    assert said == (
        "error: cannot listen on 127.0.0.1:0: no port is free in "
        "net.ipv4.ip_local_port_range; give one with --grpc-port\n"
    )


def test_a_stage_without_a_free_port_says_so(no_ports: tuple[str, ...]) -> None:
    script = (
        "from coordinator.errors import RingLost\n"
        "from stage.transport import Link\n"
        "link = Link()\n"
        "try: link.listen('127.0.0.1')\n"
        "except RingLost as lost: print(lost)\n"
        "link.close()\n"
    )
    command = [*no_ports, sys.executable, "-c", script]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_END_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "the ring: cannot listen at 127.0.0.1: no port is free in net.ipv4.ip_local_port_range\n"
    )


@contextmanager
def _full() -> Iterator[int]:
    disk = os.open("/dev/full", os.O_WRONLY)
    yield disk
    os.close(disk)


@contextmanager
def _unread() -> Iterator[int]:
    """A pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("broken", ["stdout", "stderr"])
@pytest.mark.parametrize(
    ("how", "log_format"), [(_full, "text"), (_full, "json"), (_unread, "text")]
)
def test_a_server_whose_lines_nobody_takes_serves_and_ends_well(
    how: Callable[[], Iterator[int]], broken: str, log_format: str
) -> None:
    heard = {"stdout": "stderr", "stderr": "stdout"}[broken]
    with how() as nowhere:  # type: ignore[attr-defined]
        process = subprocess.Popen(
            [*_SERVE, *_FREE, "--log-format", log_format, "--log-level", "info"],
            cwd=_ROOT,
            **{broken: nowhere, heard: subprocess.PIPE},
        )
    stream = getattr(process, heard)
    try:
        # Said once it serves, to whoever can hear it.
        while not ((line := stream.readline()).startswith(b"ready:") or b"deadlines" in line):
            assert line, "it ended"
        process.send_signal(signal.SIGTERM)
        rest = stream.read()
        assert (process.wait(_END_S), b"Traceback" in rest) == (0, False)
    finally:
        process.kill()
        process.wait()
        stream.close()


def test_a_server_without_standard_streams_serves_and_ends_well() -> None:
    """Descriptors 0 to 2 are closed: what is opened next must not get their numbers."""
    with bound("127.0.0.1", 0, "") as free:
        port = free.getsockname()[1]
    flags = (*_SERVE, "--grpc-port", "0", "--http-port", str(port))
    closing = f"exec {' '.join(map(repr, flags))} <&- >&- 2>&-"
    process = subprocess.Popen(["/bin/sh", "-c", closing], cwd=_ROOT)
    try:
        while not _answers(port):
            assert process.poll() is None, "it ended"
        standard = [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in range(3)]
        assert standard == ["/dev/null"] * 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(_END_S) == 0
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as asking:
            asking.sendall(b"GET /ready HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return asking.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


_TAKES_OVER = """
import asyncio, signal
from contextlib import asynccontextmanager

import gateway.cli.serve as serve
from gateway.settings import RingKind, ServeSettings

@asynccontextmanager
async def launch(settings, board):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    await asyncio.sleep(3 * serve._INSTALL_EVERY_S)
    print("loading", flush=True)
    await asyncio.Event().wait()
    yield

serve.launch = launch
raise SystemExit(serve.serve_until_interrupted(ServeSettings("m", ring=RingKind.FAKE)))
"""


def test_a_signal_while_loading_is_heard_though_a_library_took_it_over() -> None:
    """Ray's core sets a handler of its own, which prints a stack."""
    process = subprocess.Popen(
        [sys.executable, "-c", _TAKES_OVER],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"loading\n"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=_END_S)
    assert (process.returncode, errors) == (130, b"interrupted\n")
