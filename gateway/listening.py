"""Where a front listens: the socket's address, and one line for why nobody can listen there.

Decides what is said of a port that is taken and of an address that is not this machine's. It opens nothing for good.
"""

from __future__ import annotations

import errno
import socket

from coordinator.errors import CannotListen


def bound(host: str, port: int, flag: str) -> socket.socket:
    """A socket that is bound and does not listen yet. `flag`: by which the port was given. Raises CannotListen."""
    host = host.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotListen(_told(host, port, flag, error)) from error
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        found.close()
        raise CannotListen(_told(host, port, flag, error)) from error
    return found


def check_free(host: str, port: int, flag: str) -> None:
    """For a server that binds by itself and keeps the reason to itself. Raises CannotListen."""
    bound(host, port, flag).close()


def _told(host: str, port: int, flag: str, error: OSError) -> str:
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"cannot listen on {where}: {_reason(port, flag, error)}"


def _reason(port: int, flag: str, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"no such host ({error.strerror}); give one of this machine's addresses with --host"
    match error.errno:
        case errno.EADDRINUSE if port:
            return f"the port is taken; end who listens there, or give another one with {flag}"
        case errno.EADDRINUSE:
            return f"no port is free in net.ipv4.ip_local_port_range; give one with {flag}"
        case errno.EADDRNOTAVAIL:
            return "that address is not this machine's; give one that is with --host"
        case errno.EACCES:
            return f"this user may not listen there; give a port above 1023 with {flag}"
        case _:
            return str(error.strerror or error)
