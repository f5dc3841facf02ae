"""Amounts of memory as operators write them, and where the rows that a ring keeps on disk go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.errors import InvalidSetting, SetupError
from gateway.cli.sizes import parse_size
from gateway.kv_folder import usable_folder
from gateway.launch import _named
from gateway.settings import RingKind, ServeSettings
from stage import stores
from stage.config import RingConfig


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512M", 512 * 2**20),
        ("4g", 4 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("2 KB", 2048),
        (7, 7),
    ],
)
def test_an_amount_is_read_as_it_is_meant(written: str | int, size: int) -> None:
    assert parse_size(written) == size


@pytest.mark.parametrize("written", ["", "G", "-1", "4X", "1e9", "4GG", "inf"])
def test_what_is_no_amount_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match="no amount"):
        parse_size(written)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kv_host_bytes": -1},
        {"kv_disk_bytes": 0},
        {"kv_disk": Path("rows"), "ring": RingKind.FAKE},
    ],
)
def test_a_store_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidSetting, match="kv_"):
        ServeSettings(**{"model": "m", **wrong})


@pytest.mark.parametrize("wrong", [{"kv_host_bytes": -1}, {"kv_disk_bytes": 0}, {"rings": 0}])
def test_a_ring_refuses_it_too(wrong: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting):
        RingConfig(tmp_path, "m", ((0, 1),), **wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"ring": RingKind.LOCAL}, {"ring": RingKind.FAKE}, {"stages": 1}, {"kv_host_bytes": 0}],
)
def test_a_mirror_without_another_process_or_rows_is_refused(wrong: dict[str, object]) -> None:
    assert ServeSettings("m", mirror=True).mirror
    with pytest.raises(InvalidSetting, match="mirror"):
        ServeSettings("m", mirror=True, **wrong)


def test_a_mirror_gets_half_of_what_stages_take_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "available_bytes", lambda: 1600)
    alone = RingConfig(tmp_path, "m", ((0, 1), (1, 2)))
    mirrored = replace(alone, mirror=True)
    with pytest.raises(InvalidSetting, match="mirror"):
        replace(mirrored, splits=((0, 2),))
    assert [stores.host_budget(config, 2) for config in (alone, mirrored)] == [200, 100]
    told = [replace(config, kv_host_bytes=5) for config in (alone, mirrored)]
    assert [stores.host_budget(config, 2) for config in told] == [5, 5]


def test_each_ring_has_a_folder_of_its_own(tmp_path: Path) -> None:
    config = RingConfig(tmp_path, "m", ((0, 1),))
    assert _named(config, "ring-0") == config
    kept = replace(config, kv_disk=tmp_path / "rows")
    assert _named(kept, "ring-1").kv_disk == tmp_path / "rows" / "ring-1"


def test_a_folder_that_cannot_be_is_refused_before_anything_loads(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert usable_folder(None) is None
    assert usable_folder(tmp_path / "new") == tmp_path / "new"
    with pytest.raises(SetupError, match="--kv-disk .*rows: Not a directory; give a folder"):
        usable_folder(tmp_path / "file" / "rows")
    with pytest.raises(SetupError, match="--kv-disk ~nobody-of-that-name/rows: .*; give a folder"):
        usable_folder(Path("~nobody-of-that-name/rows"))
