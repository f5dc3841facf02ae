"""What the gateway's storm does about processes of its own that do not do as they should."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.errors import SetupError
from gateway.chaos import gateway_storm
from gateway.chaos.book import Book
from gateway.chaos.gateway_storm import GatewayStorm
from gateway.chaos.options import StormOptions
from gateway.chaos.waiting import until
from gateway.progress import SilentBoard
from gateway.settings import ServeSettings

_STUBBORN = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


@pytest.fixture
def storm() -> GatewayStorm:
    settings = ServeSettings(model="m", max_rows=64)
    return GatewayStorm(settings, StormOptions(), Book(), SilentBoard())


@pytest.mark.parametrize(
    ("says", "told"),
    [("import sys; sys.exit('error: no room for it')", "error: no room for it"), ("", "no word")],
)
async def test_a_gateway_that_does_not_start_is_told_by_its_own_last_line(
    storm: GatewayStorm, monkeypatch: pytest.MonkeyPatch, says: str, told: str
) -> None:
    monkeypatch.setattr(gateway_storm, "_COMMAND", (sys.executable, "-c", says))
    with pytest.raises(SetupError, match=f"the detached gateway did not start: {told}"):
        await storm._serve()
    assert storm._gateway is not None
    assert await gateway_storm._ended(storm._gateway)


async def test_what_does_not_end_when_it_is_asked_to_is_ended_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway_storm, "_END_S", 0.1)
    ready = tmp_path / "ready"
    command = (sys.executable, "-c", _STUBBORN, str(ready))
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert await until(ready.exists, 30.0)
    assert not await gateway_storm._ended(process)
    assert process.returncode == -9
    await process.communicate()
    assert await gateway_storm._ended(process), "whoever has ended already did so by itself"
