"""What a ring of threads says of itself, refuses to start with, and does when it is lost or stopped."""

from __future__ import annotations

import asyncio
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.errors import InvalidSetting, ModelUnusable, NumericsNotExact, RingLost
from coordinator.frames import (
    Epoch,
    Frame,
    JobId,
    LaneId,
    OpenLane,
    Reply,
    Segment,
    SegmentKind,
    Seq,
)
from coordinator.prefixes import digest_of
from coordinator.requests import GREEDY
from coordinator.ring import StageProgress
from stage import build
from stage.build import StageReport, build_stage, ring_info
from stage.config import RingConfig
from stage.fingerprint import fingerprint
from stage.local_ring import LocalRing
from stage.messages import ReplyMessage
from stage.model.slice import ModelSlice
from stage.numerics import NumericsReport
from stage.replies import ReplyQueue


def config(model: Path, *splits: tuple[int, int], **rest) -> RingConfig:
    return RingConfig(model, "tiny", splits or ((0, 2), (2, 4)), lanes=3, max_rows=64, **rest)


def stage_threads() -> set[threading.Thread]:
    """Those of other tests' rings among them."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("stage-")}


def reports(config: RingConfig) -> list[StageReport]:
    return [build_stage(config, n, "cpu", lambda _: None)[1] for n in range(config.stages)]


def test_stages_of_different_models_make_no_ring(tiny_model: Path) -> None:
    whole = config(tiny_model)
    first, second = reports(whole)
    odd = replace(second, fingerprint="another")
    with pytest.raises(
        ModelUnusable, match="stage 1 on .* reads another model in .* than stage 0 on"
    ):
        ring_info(whole, [first, odd])


def test_stages_that_hold_too_few_layers_make_no_ring(tiny_model: Path) -> None:
    part = config(tiny_model, (0, 2))
    with pytest.raises(ModelUnusable, match="2 of 4 layers"):
        ring_info(part, reports(part))


@pytest.mark.parametrize("splits", [(), ((1, 4),), ((0, 2), (3, 4)), ((0, 2), (2, 2))])
def test_splits_that_leave_layers_out_are_refused(splits, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="splits"):
        RingConfig(tmp_path, "tiny", splits)


def test_a_fingerprint_tells_weights_apart_but_not_folders(
    tiny_model: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(tiny_model, tmp_path / "copy")
    assert fingerprint(copy) == fingerprint(tiny_model)
    weights = copy / "model.safetensors"
    changed = bytearray(weights.read_bytes())
    changed[-1] ^= 1
    weights.write_bytes(changed)
    assert fingerprint(copy) != fingerprint(tiny_model)


@pytest.mark.parametrize("numerics", ["auto", "fast"])
async def test_a_load_tells_that_it_gets_on_with_what_it_really_does(
    tiny_model: Path, numerics: str
) -> None:
    told: list[StageProgress] = []
    ring = LocalRing(config(tiny_model, numerics=numerics))
    await ring.start(told.append)
    await ring.stop()
    first = [each for each in told if each.stage == 0]
    probed = [each.steps for each in first if each.note == "probing numerics"]
    assert probed == list(range(len(probed)))
    assert (len(probed) > 5) == (numerics == "auto")
    assert [each.note for each in first][-1] == "ready"


@pytest.mark.parametrize(("numerics", "refused"), [("exact", True), ("auto", False)])
async def test_exact_numerics_are_had_or_the_ring_does_not_start(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, numerics: str, refused: bool
) -> None:
    monkeypatch.setattr(build, "probe_numerics", lambda *_: NumericsReport(False, 0.5))
    ring = LocalRing(config(tiny_model, numerics=numerics))
    before = stage_threads()
    if refused:
        with pytest.raises(NumericsNotExact, match="shape-dependent"):
            await ring.start(lambda _: None)
        assert stage_threads() == before
    else:
        info = await ring.start(lambda _: None)
        assert (info.exact, info.numerics[:15]) == (False, "shape-dependent")
        assert len(stage_threads() - before) == 2
    await ring.stop()


async def test_an_error_in_computing_costs_the_stage_and_no_other(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stage_threads()
    ring = LocalRing(config(tiny_model))
    await ring.start(lambda _: None)
    opening = OpenLane(LaneId(0), JobId(1), 0, digest_of(()))
    segment = Segment(LaneId(0), JobId(1), 0, (5, 17, 101), SegmentKind.PREFILL, GREEDY, 3)
    frame = Frame(Epoch(0), Seq(0), (opening,), (segment,))
    with monkeypatch.context() as patch:
        patch.setattr(ModelSlice, "forward", lambda *_: 1 / 0)
        ring.submit(frame)
        async with asyncio.timeout(5):
            with pytest.raises(RingLost, match=r"stage 0: epoch=0 seq=0 failed: ZeroDivision"):
                await ring.next_reply()
    assert not ring.health().ready
    with pytest.raises(RingLost):
        ring.submit(frame)
    stages = list(ring._stages)
    held = await ring.open_epoch(Epoch(1))
    assert all(len(lane.tokens) == 0 for lane in held.lanes)
    assert [old is new for old, new in zip(stages, ring._stages, strict=True)] == [False, True]
    assert (ring.health().ready, ring.health().replaced) == (True, 1)
    ring.submit(replace(frame, epoch=Epoch(1)))
    assert (await ring.next_reply()).refusals == ()
    held = await ring.open_epoch(Epoch(2))
    assert [len(lane.tokens) for lane in held.lanes][0] == 3
    await ring.stop()
    assert stage_threads() == before


async def test_a_stage_that_cannot_be_rebuilt_may_be_later(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    ring = LocalRing(config(folder))
    await ring.start(lambda _: None)
    opening = OpenLane(LaneId(0), JobId(1), 0, digest_of(()))
    segment = Segment(LaneId(0), JobId(1), 0, (5, 17, 101), SegmentKind.PREFILL, GREEDY, 3)
    frame = Frame(Epoch(0), Seq(0), (opening,), (segment,))
    with monkeypatch.context() as patch:
        patch.setattr(ModelSlice, "forward", lambda *_: 1 / 0)
        ring.submit(frame)
        with pytest.raises(RingLost):
            await ring.next_reply()
    away = folder.rename(tmp_path / "away")
    with pytest.raises(RingLost, match="stage 0: could not be replaced"):
        await ring.open_epoch(Epoch(1))
    assert not ring.health().ready
    away.rename(folder)
    await ring.open_epoch(Epoch(2))
    ring.submit(replace(frame, epoch=Epoch(2)))
    assert (await ring.next_reply()).refusals == ()
    await ring.stop()


async def test_stopping_wakes_whoever_waits_for_a_reply(tiny_model: Path) -> None:
    ring = LocalRing(config(tiny_model))
    await ring.start(lambda _: None)
    waiting = asyncio.create_task(ring.next_reply())
    await asyncio.sleep(0)
    await ring.stop()
    with pytest.raises(RingLost, match="stopped"):
        await waiting


async def test_replies_to_an_earlier_epochs_frames_are_dropped() -> None:
    replies = ReplyQueue(on_lost=lambda: None)
    replies.push(ReplyMessage(Epoch(0), Reply(Epoch(0), Seq(0))))
    await asyncio.sleep(0)
    replies.open_epoch(Epoch(1))
    replies.push(ReplyMessage(Epoch(0), Reply(Epoch(0), Seq(1))))
    replies.push(ReplyMessage(Epoch(1), Reply(Epoch(1), Seq(0))))
    assert (await replies.next()).epoch == 1
