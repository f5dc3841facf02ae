"""What `--detached` needs, how its rings are called, and where others are told that their gateway serves."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from coordinator.errors import InvalidSetting
from gateway.cli.app import app
from gateway.settings import RingKind, ServeSettings
from gateway.standing import Front, ring_name, ring_prefix

_DETACHED = ServeSettings("smollm2", detached=True, ray_address="192.0.2.1:6379")


def test_a_ring_of_a_cluster_may_outlive_its_gateway() -> None:
    assert _DETACHED.detached
    assert not ServeSettings("smollm2").detached


@pytest.mark.parametrize(
    "changes", [{"ray_address": None}, {"ring": RingKind.LOCAL}, {"ring": RingKind.FAKE}]
)
def test_one_of_a_ray_or_a_process_of_its_own_cannot(changes: dict[str, object]) -> None:
    with pytest.raises(
        InvalidSetting, match="detached: needs .* start one with `ray start --head`"
    ):
        replace(_DETACHED, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("address", ["", "auto", "somewhere", "ray://127.0.0.1:1", "127.0.0.1:0"])
@pytest.mark.parametrize("command", [("ps",), ("stop", "m-0"), ("drain", "m-0", "--json")])
def test_an_address_that_is_none_is_bad_usage_in_one_line(
    command: tuple[str, ...], address: str
) -> None:
    result = CliRunner().invoke(app, [*command, "--ray-address", address])
    told = f"error: --ray-address: must be HOST:PORT as for ray start --address, got {address!r}\n"
    assert (result.exit_code, result.output) == (2, told)


def test_its_name_is_the_models_without_what_names_are_put_together_with() -> None:
    assert ring_name(ring_prefix("meta/Llama-3 8B"), 2) == "meta-Llama-3 8B-2"


def test_others_are_told_an_address_that_they_can_use() -> None:
    front = Front()
    front.open(("127.0.0.1:50051", "[::1]:8000"), encrypted=False)
    assert (front.grpc, front.http) == ("127.0.0.1:50051", "[::1]:8000")
    front.open(("0.0.0.0:50051", "[::]:8000"), encrypted=True)
    host = socket.gethostname()
    assert (front.grpc, front.http) == (f"grpcs://{host}:50051", f"{host}:8000")
