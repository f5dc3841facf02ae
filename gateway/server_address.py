"""Where a running ringserve is, and what our own commands show to be let in: a key, a certificate.

Reads PEM files; decides only whether the way there is encrypted: by `grpcs://`, or because an authority or a
certificate is named.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.errors import InvalidSetting
from gateway.safety.keys import split_keys
from gateway.safety.tls import read_pem

_PLAIN, _ENCRYPTED = "grpc://", "grpcs://"


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM as gRPC takes it. `ca` None: the authorities that gRPC comes with."""

    ca: bytes | None = None
    cert_and_key: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """`address`: HOST:PORT, or a URL with grpc:// or grpcs:// in front."""

    address: str
    api_key: str | None = field(default=None, repr=False)
    tls_ca: Path | None = None
    client_cert: Path | None = None  # with its key in the same file

    @property
    def host_port(self) -> str:
        return self.address.removeprefix(_ENCRYPTED).removeprefix(_PLAIN).rstrip("/")

    @property
    def key(self) -> str:
        """Without its name; the first one, where the variable says a server's several."""
        entry = next(iter(split_keys(self.api_key or "")), "")
        return entry.rpartition(" ")[2]

    def tls(self) -> ClientTls | None:
        """None for a way in plain text. Raises InvalidSetting."""
        named = self.tls_ca is not None or self.client_cert is not None
        if not (named or self.address.startswith(_ENCRYPTED)):
            return None
        ca = None if self.tls_ca is None else _authority(self.tls_ca)
        return ClientTls(ca, None if self.client_cert is None else _own(self.client_cert))


def _authority(path: Path) -> bytes:
    pem = read_pem("tls_ca", path, b"CERTIFICATE-----")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode())
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise InvalidSetting("tls_ca", f"{path} cannot be used: {error}") from error
    return pem


def _own(path: Path) -> bytes:
    pem = read_pem("client_cert", path, b"CERTIFICATE-----")
    if b"PRIVATE KEY-----" not in pem or b"ENCRYPTED" in pem:
        raise InvalidSetting(
            "client_cert", f"{path} must hold the certificate's key too, unencrypted"
        )
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(path)
    except ssl.SSLError as error:
        raise InvalidSetting("client_cert", f"{path} cannot be used: {error}") from error
    return pem
