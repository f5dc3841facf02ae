"""What a server is told about keys and certificates is checked before anything is loaded; secrets stay out of sight."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme
from typer.testing import CliRunner

from coordinator.errors import InvalidSetting
from gateway.cli.app import app
from gateway.safety.settings import SafetySettings
from gateway.safety.tls import TlsSettings, open_tls, tls_settings
from gateway.settings import GrpcSettings, HttpSettings, ServeSettings

KEY = "sk-very-secret"
Pem = Callable[[str, bytes], Path]


@pytest.fixture
def pem(tmp_path: Path) -> Pem:
    """Writes a file and tells where."""

    def write(name: str, what: bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(what)
        return path

    return write


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def _issued(authority: trustme.CA, pem: Pem, name: str = "own", **dates: int) -> TlsSettings:
    given = {
        when: datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for when, year in dates.items()
    }
    made = authority.issue_cert("localhost", **given)
    chain = b"".join(each.bytes() for each in made.cert_chain_pems)
    key = pem(f"{name}.key", made.private_key_pem.bytes())
    return TlsSettings(pem(f"{name}.pem", chain), key)


def _refused(settings: TlsSettings) -> InvalidSetting:
    with pytest.raises(InvalidSetting) as refused:
        open_tls(settings)
    return refused.value


def test_a_certificate_its_key_and_an_authority_are_taken(authority: trustme.CA, pem: Pem) -> None:
    own = _issued(authority, pem)
    ca = pem("ca.pem", authority.cert_pem.bytes())
    opened = open_tls(TlsSettings(own.cert, own.key, ca))
    assert opened.client_ca == ca.read_bytes()
    assert "PRIVATE KEY" not in repr(opened)


@pytest.mark.parametrize(
    ("dates", "why"),
    [
        ({"not_before": 2019, "not_after": 2020}, "has expired"),
        ({"not_before": 2900, "not_after": 2901}, "is not valid yet"),
    ],
)
def test_a_certificate_out_of_its_time_is_refused(
    authority: trustme.CA, pem: Pem, dates: dict[str, int], why: str
) -> None:
    refused = _refused(_issued(authority, pem, **dates))
    assert (refused.setting, why in str(refused)) == ("tls_cert", True)


def test_a_key_of_another_certificate_is_refused(authority: trustme.CA, pem: Pem) -> None:
    own, other = _issued(authority, pem), _issued(authority, pem, "other")
    refused = _refused(TlsSettings(own.cert, other.key))
    assert (refused.setting, "is not the key of" in str(refused)) == ("tls_key", True)


@pytest.mark.parametrize("setting", ["cert", "key", "client_ca"])
@pytest.mark.parametrize(
    ("what", "why"),
    [
        (None, "cannot read"),
        (b" \n", "is empty"),
        (b"hello", "in PEM form"),
        (b"-----BEGIN CERTIFICATE-----\nPRIVATE KEY-----\n!\n", "cannot be used"),
    ],
)
def test_a_file_that_holds_no_such_thing_is_named(
    authority: trustme.CA, pem: Pem, setting: str, what: bytes | None, why: str
) -> None:
    own = _issued(authority, pem)
    files = {"cert": own.cert, "key": own.key, "client_ca": None}
    files[setting] = own.cert.with_name("absent") if what is None else pem("bad", what)
    refused = _refused(TlsSettings(**files))  # type: ignore[arg-type]
    assert why in str(refused)
    assert str(files[setting]) in str(refused)


def test_a_key_with_a_passphrase_is_refused_without_asking_for_it(
    authority: trustme.CA, pem: Pem
) -> None:
    own = _issued(authority, pem)
    key = pem("locked.key", b"-----BEGIN ENCRYPTED PRIVATE KEY-----\n")
    assert "passphrase" in str(_refused(TlsSettings(own.cert, key)))


def test_tls_takes_a_certificate_and_its_key() -> None:
    here = Path("here")
    assert tls_settings(None, None, None) is None
    assert tls_settings(here, here, None) == TlsSettings(here, here)
    for half in ((here, None, None), (None, here, None), (None, None, here)):
        with pytest.raises(InvalidSetting, match="missing"):
            tls_settings(*half)


def test_keys_and_client_certificates_keep_strangers_out_and_certificates_alone_do_not() -> None:
    here = Path("here")
    assert not SafetySettings().keeps_strangers_out
    assert not SafetySettings(tls=TlsSettings(here, here)).keeps_strangers_out
    assert SafetySettings(tls=TlsSettings(here, here, here)).keeps_strangers_out
    assert SafetySettings(api_keys=KEY).keeps_strangers_out
    assert SafetySettings(api_key_file=here).keeps_strangers_out


@pytest.mark.parametrize("front", [GrpcSettings, HttpSettings])
def test_a_host_that_others_reach_takes_a_guard_or_a_word(
    front: type[GrpcSettings] | type[HttpSettings],
) -> None:
    with pytest.raises(InvalidSetting, match="can be reached by others"):
        front(host="0.0.0.0")
    assert front(host="0.0.0.0", guarded=True).host == front(host="0.0.0.0", insecure=True).host
    with pytest.raises(InvalidSetting):
        ServeSettings(model="m", grpc=GrpcSettings(host="0.0.0.0", guarded=True))


@pytest.mark.parametrize(
    "wrong",
    [
        {"isolate_keys": True},
        {"operators": "alice"},
        {"key_max_jobs": 1},
        {"key_tokens_per_minute": 1},
        {"api_keys": KEY, "key_max_jobs": 0},
        {"api_keys": KEY, "key_tokens_per_minute": -1},
    ],
)
def test_what_is_of_each_key_takes_keys_and_a_size(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidSetting):
        SafetySettings(**wrong)  # type: ignore[arg-type]


def test_no_key_is_in_what_is_printed_of_the_settings() -> None:
    safety = SafetySettings(api_keys=KEY, key_max_jobs=2)
    assert KEY not in repr(ServeSettings(model="m", safety=safety))
    assert "key_max_jobs=2" in repr(safety)


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (("--host", "0.0.0.0"), "--host"),
        (("--tls-cert", "absent.pem", "--tls-key", "absent.key"), "--tls-cert"),
        (("--tls-cert", "absent.pem"), "--tls-key"),
        (("--api-key-file", "absent"), "--api-key-file"),
        (("--api-key", ""), "--api-key"),
        (("--isolate-keys",), "--isolate-keys"),
        (("--api-key", "alice sk-1", "--operators", "bob"), "--operators"),
        (("--api-key", "alice sk-1, alice sk-2"), "--api-key"),
    ],
)
def test_serve_says_in_one_line_what_is_wrong_before_it_looks_for_the_model(
    arguments: tuple[str, ...], about: str
) -> None:
    result = CliRunner().invoke(app, ["serve", "/no/such/model", "--ring", "local", *arguments])
    lines = [line for line in result.output.splitlines() if line]
    assert result.exit_code == 2, result.output
    assert [line.split(": ")[:2] for line in lines] == [["error", about]]
    assert "sk-" not in result.output
