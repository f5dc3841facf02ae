"""How our commands are told to reach a server: when the way is encrypted, which key is shown, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from coordinator.errors import InvalidSetting
from gateway.server_address import ClientTls, ServerAddress


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, authority = tmp_path_factory.mktemp("pem"), trustme.CA()
    own = authority.issue_cert("client")
    made = {
        "ca": authority.cert_pem.bytes(),
        "own": own.private_key_and_cert_chain_pem.bytes(),
        "no_key": own.cert_chain_pems[0].bytes(),
        "empty": b"",
        "junk": b"-----BEGIN CERTIFICATE-----\nPRIVATE KEY-----\n!\n",
    }
    for name, pem in made.items():
        (folder / name).write_bytes(pem)
    return {name: folder / name for name in (*made, "absent")}


def test_the_way_is_plain_unless_something_says_otherwise(files: dict[str, Path]) -> None:
    for plain in ("127.0.0.1:1", "grpc://127.0.0.1:1"):
        assert ServerAddress(plain).tls() is None
        assert ServerAddress(plain).host_port == "127.0.0.1:1"
    public = ServerAddress("grpcs://example.org:1/")
    assert (public.host_port, public.tls()) == ("example.org:1", ClientTls())
    named = ServerAddress("h:1", tls_ca=files["ca"], client_cert=files["own"]).tls()
    assert named == ClientTls(files["ca"].read_bytes(), files["own"].read_bytes())
    assert "PRIVATE" not in repr(named)


@pytest.mark.parametrize(
    ("given", "key"),
    [(None, ""), ("", ""), ("sk-1", "sk-1"), ("alice sk-1, sk-2", "sk-1"), (" a  sk-1 ", "sk-1")],
)
def test_the_key_is_the_first_that_the_variable_names(given: str | None, key: str) -> None:
    assert ServerAddress("h:1", given).key == key


@pytest.mark.parametrize("file", ["absent", "empty", "junk"])
def test_a_file_that_holds_no_such_thing_is_refused(files: dict[str, Path], file: str) -> None:
    for server in (
        ServerAddress("h:1", tls_ca=files[file]),
        ServerAddress("h:1", client_cert=files[file]),
    ):
        with pytest.raises(InvalidSetting):
            server.tls()


def test_a_certificate_without_its_key_is_refused(files: dict[str, Path]) -> None:
    with pytest.raises(InvalidSetting, match="key too"):
        ServerAddress("h:1", client_cert=files["no_key"]).tls()
