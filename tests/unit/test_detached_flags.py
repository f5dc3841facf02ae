"""A detached ring under a gateway with other flags: what it was made with is refused in one line, and waits are new."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.errors import SetupError
from coordinator.frames import Epoch
from stage.actor import About, Place
from stage.config import RingConfig
from stage.ray_ring.detached import _check, gone_on_with

MADE = RingConfig(Path("m"), "m", ((0, 1), (1, 2)), detached=True, name="m-0")


def about(config: RingConfig) -> About:
    place = Place("node", "192.0.2.1", 1, "")
    return About(config, 0, place, None, None, 0, Epoch(0), (), None)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"kv_host_bytes": 7}, "has kv_host_bytes None, wanted 7"),
        ({"kv_disk": Path("/rows/m-0")}, "has kv_disk None, wanted /rows/m-0"),
        ({"kv_disk_bytes": 7}, "has kv_disk_bytes 17179869184, wanted 7"),
        ({"mirror": True}, "has mirror False, wanted True"),
        ({"spares": 1}, "has spares 0, wanted 1"),
    ],
)
def test_what_it_was_made_with_cannot_be_changed_without_a_word(
    changes: dict[str, object], told: str
) -> None:
    with pytest.raises(SetupError, match=f"the detached ring m-0 .* {told}: end it with"):
        _check(replace(MADE, **changes), [about(MADE)])  # type: ignore[arg-type]


def test_its_gateway_of_now_says_how_long_it_waits() -> None:
    patient = replace(MADE, probe_s=3.0, probe_timeout_s=20.0, load_s=900.0, rest_s=60.0)
    _check(patient, [about(MADE)])
    assert gone_on_with(MADE, patient) == patient


def test_what_lives_in_its_processes_stays_as_it_was() -> None:
    other = replace(MADE, lease_s=50.0, mirror_s=7.0, threads=3)
    assert gone_on_with(MADE, other) == MADE
