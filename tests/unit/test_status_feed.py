"""One snapshot serves all viewers, is made only while somebody looks, and waits for nobody."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack

import pytest

from coordinator.errors import TooManyViewers
from gateway.http.status.feed import Feed, Viewer


class Maker:
    """Counts the snapshots that it made."""

    def __init__(self) -> None:
        self.made = 0
        self.breaks = False
        self.failed = asyncio.Event()

    def __call__(self) -> bytes:
        self.made += 1
        if self.breaks:
            self.failed.set()
            raise KeyError("a bug")
        return json.dumps(self.made).encode()


async def number(viewer: Viewer) -> int:
    snapshot = await viewer.next()
    assert snapshot is not None
    seen: int = json.loads(snapshot)
    return seen


async def test_all_viewers_see_the_same_snapshots() -> None:
    make = Maker()
    feed = Feed(make, every_s=0.001)
    with feed.watched() as one, feed.watched() as two:
        for made in (1, 2, 3):
            assert await number(one) == await number(two) == make.made == made


async def test_nothing_is_made_while_nobody_looks() -> None:
    make = Maker()
    feed = Feed(make, every_s=0.001)
    with feed.watched() as viewer:
        await number(viewer)
    made = make.made
    tasks = [task for task in asyncio.all_tasks() if task.get_name() == "status-page"]
    await asyncio.gather(*tasks, return_exceptions=True)
    assert make.made == made
    assert feed.viewers == 0
    # Whoever asks once gets one made for the occasion, and whoever comes again a new one.
    assert json.loads(feed.current()) == made + 1
    with feed.watched() as viewer:
        assert await number(viewer) == made + 2


async def test_who_comes_late_sees_the_current_one_at_once() -> None:
    make = Maker()
    feed = Feed(make, every_s=3600.0)
    with feed.watched() as first:
        await number(first)
        with feed.watched() as second:
            assert await number(second) == 1
        assert json.loads(feed.current()) == 1
    assert make.made == 1


async def test_a_slow_viewer_misses_snapshots_and_holds_one_only() -> None:
    make = Maker()
    feed = Feed(make, every_s=0.001)
    with feed.watched() as slow, feed.watched() as quick:
        for _ in range(5):
            latest = await number(quick)
        assert await number(slow) == latest == 5


async def test_no_more_than_so_many_may_look() -> None:
    feed = Feed(Maker(), most_viewers=2)
    with ExitStack() as viewers:
        for _ in range(2):
            viewers.enter_context(feed.watched())
        with pytest.raises(TooManyViewers):
            feed.check_room()
        with pytest.raises(TooManyViewers), feed.watched():
            pass
    feed.check_room()


async def test_viewers_are_let_go_when_the_server_ends() -> None:
    feed = Feed(Maker(), every_s=3600.0)
    with feed.watched() as viewer:
        await number(viewer)
        feed.close()
        assert await viewer.next() is None
    with feed.watched() as late:
        assert await late.next() is None


async def test_a_snapshot_that_fails_is_logged_and_the_next_one_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    make = Maker()
    make.breaks = True
    feed = Feed(make, every_s=0.001)
    with feed.watched() as viewer:
        coming = asyncio.create_task(number(viewer))
        await make.failed.wait()
        assert not coming.done()
        make.breaks = False
        assert await coming > 1
    assert "no snapshot" in caplog.text
