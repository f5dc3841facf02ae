"""The fronts' certificate, its key, and the authority that clients' certificates must come from.

Reads PEM files once, before anything is loaded, and refuses what no client could connect to. It decides nothing about
who may ask: with a client authority, whoever has no certificate of it does not get as far as a request.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.errors import InvalidSetting

# OpenSSL's numbers, which Python's ssl has no names for.
_DATES = {9: "is not valid yet", 10: "has expired"}
# Messages of a handshake with ourselves; TLS 1.2 takes more than 1.3.
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """PEM files. `client_ca`: only clients with a certificate of this authority may connect."""

    cert: Path
    key: Path
    client_ca: Path | None = None


def tls_settings(cert: Path | None, key: Path | None, client_ca: Path | None) -> TlsSettings | None:
    """None where there is to be no TLS. Raises InvalidSetting for half of what it takes."""
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        missing = "tls_cert" if cert is None else "tls_key"
        raise InvalidSetting(missing, "is missing; TLS takes a certificate and its key")
    return TlsSettings(cert, key, client_ca)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """What was in the files: for gRPC as it stands there, for HTTP as a context."""

    cert: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None
    context: ssl.SSLContext


def open_tls(settings: TlsSettings) -> ServerTls:
    """Raises InvalidSetting."""
    cert = read_pem("tls_cert", settings.cert, b"CERTIFICATE-----")
    key = read_pem("tls_key", settings.key, b"PRIVATE KEY-----")
    if b"ENCRYPTED" in key:
        raise InvalidSetting("tls_key", f"{settings.key} has a passphrase; nobody is asked for one")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_chain(context, settings)
    _check_dates(context, settings.cert, cert)
    client_ca = None
    if settings.client_ca is not None:
        client_ca = read_pem("tls_client_ca", settings.client_ca, b"CERTIFICATE-----")
        _trust(context, settings.client_ca, client_ca)
    return ServerTls(cert, key, client_ca, context)


def read_pem(setting: str, path: Path, kind: bytes) -> bytes:
    """The file's bytes, which hold something of the kind. Raises InvalidSetting."""
    try:
        pem = path.read_bytes()
    except OSError as error:
        raise InvalidSetting(setting, f"cannot read {path}: {error.strerror}") from error
    if not pem.strip():
        raise InvalidSetting(setting, f"{path} is empty")
    if kind not in pem:
        what = kind.strip(b"-").decode().lower()
        raise InvalidSetting(setting, f"{path} holds no {what} in PEM form")
    return pem


def _load_chain(context: ssl.SSLContext, settings: TlsSettings) -> None:
    try:
        context.load_cert_chain(settings.cert, settings.key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            told = f"{settings.key} is not the key of {settings.cert}"
            raise InvalidSetting("tls_key", told) from error
        told = f"{settings.cert} and {settings.key} cannot be used: {error.reason or error}"
        raise InvalidSetting("tls_cert", told) from error


def _trust(context: ssl.SSLContext, path: Path, client_ca: bytes) -> None:
    try:
        context.load_verify_locations(cadata=client_ca.decode())
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise InvalidSetting("tls_client_ca", f"{path} cannot be used: {error}") from error
    context.verify_mode = ssl.CERT_REQUIRED


def _check_dates(context: ssl.SSLContext, path: Path, cert: bytes) -> None:
    """By a handshake with ourselves, in memory: what a client would find, its trust apart."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        client.load_verify_locations(cadata=cert.decode())
        _shake_hands(client, context)
    except (ssl.SSLCertVerificationError, UnicodeDecodeError) as error:
        why = _DATES.get(getattr(error, "verify_code", 0))
        if why is not None:
            raise InvalidSetting("tls_cert", f"{path} {why}") from error


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(_ROUNDS):
        for side in sides:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
