"""A short storm over a ring of processes: kills in the midst of what it does, and nobody notices more than a pause."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.chaos.faults import Patience
from gateway.chaos.options import StormOptions
from gateway.chaos.run import run_chaos
from gateway.chaos.storm import parse_faults
from gateway.chaos.traffic import Shape
from gateway.progress import SilentBoard
from gateway.settings import RingKind, ServeSettings

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(240)]

SHAPE = Shape(pool=3, turns=3, answer_tokens=24)


async def test_stages_are_killed_in_prefill_in_speculation_and_in_restore_and_every_token_is_right(
    small_model: Path,
) -> None:
    settings = ServeSettings(model=str(small_model), lanes=3, max_rows=2048)
    options = StormOptions(
        seed=1,
        faults=parse_faults("kill-prefill,kill-speculation,kill-restore"),
        streams=3,
        every_s=0.1,
        shape=SHAPE,
        patience=Patience(heal_s=60.0),
    )
    told = await run_chaos(settings, options, SilentBoard())
    assert told.is_clean, told
    assert (told.kills, told.lost_streams, told.wrong_streams) == (3, 0, 0)
    assert all(kind.streams_hit for kind in told.faults)
    assert all(kind.detection_s_p50 < 2.0 for kind in told.faults if kind.detection_s_p50)


async def test_stages_of_threads_fail_wait_and_lose_their_disk_and_every_token_is_right(
    small_model: Path,
) -> None:
    settings = ServeSettings(model=str(small_model), ring=RingKind.LOCAL, lanes=3, max_rows=2048)
    options = StormOptions(
        seed=2,
        faults=parse_faults("kill-decode,kill-publish,slow,disk"),
        streams=3,
        every_s=0.1,
        shape=SHAPE,
    )
    told = await run_chaos(settings, options, SilentBoard())
    assert told.is_clean, told
    assert (told.kills, len(told.faults)) == (2, 4)
