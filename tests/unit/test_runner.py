"""A stage's loop is rested and run again: the frame in work ends, late calls are refused, what broke stays broken."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import zmq

from coordinator.errors import RingLost
from coordinator.frames import Epoch, Frame, Seq
from stage.messages import FrameMessage
from stage.runner import LoopEnd, Outdated, Runner
from stage.stage import Stage
from stage.transport import Endpoint, Link, Listener, Sender


class SlowStage:
    """Takes a frame, and is done with it when it is let go; sends it on, or breaks."""

    index = 3

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()
        self.breaks = False
        self.taken: list[int] = []

    def process(self, message: FrameMessage, waited: object) -> FrameMessage:
        self.has_begun.set()
        assert self.may_end.wait(5.0)
        if self.breaks:
            raise ValueError("no such row")
        self.taken.append(message.frame.seq)
        return message


class Bench:
    """A runner between two sockets of ours."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stage = SlowStage()
        self.runner = Runner()
        self.link = Link()
        self.inlet: Listener = self.link.listen(folder / "end")
        self.threads = ThreadPoolExecutor()
        self.senders: list[Sender] = []

    def wire(self, turn: int) -> Sender:
        at = self.runner.bind(turn, self.folder / str(turn))
        self.runner.connect(turn, None, self.inlet.endpoint)
        self.senders.append(self.link.connect(at))
        return self.senders[-1]

    def run(self, turn: int) -> Future[LoopEnd]:
        return self.threads.submit(self.runner.run, turn, cast("Stage", self.stage))

    def rest(self, turn: int, within_s: float = 5.0) -> bool:
        return self.runner.rest(turn, within_s)

    def close(self) -> None:
        self.stage.may_end.set()
        assert self.rest(99)
        self.threads.shutdown()
        self.inlet.close()
        for sender in self.senders:
            sender.close()
        self.link.close()


def frame(seq: int) -> FrameMessage:
    return FrameMessage(Epoch(0), Frame(Epoch(0), Seq(seq)))


@pytest.fixture
def bench() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="rings-") as folder:
        bench = Bench(Path(folder))
        yield bench
        bench.close()


def test_a_rest_waits_for_the_frame_in_work_and_drops_those_behind_it(bench: Bench) -> None:
    sender, end = bench.wire(1), bench.run(1)
    sender.send(frame(0))
    sender.send(frame(1))
    assert bench.stage.has_begun.wait(5.0)
    assert bench.runner.busy_s() > 0.0
    assert not bench.rest(2, 0.05)
    bench.stage.may_end.set()
    assert end.result(5.0) == LoopEnd()
    assert bench.stage.taken == [0]
    assert bench.rest(3)
    assert (bench.runner.busy_s(), bench.runner.broken) == (0.0, None)


def test_it_runs_again_and_nothing_of_the_turn_before_arrives(bench: Bench) -> None:
    bench.stage.may_end.set()
    old, ended = bench.wire(1), bench.run(1)
    assert bench.rest(2)
    assert ended.result(5.0) == LoopEnd()
    old.send(frame(7))
    new = bench.wire(2)
    bench.run(2)
    new.send(frame(0))
    delivery = bench.inlet.receive()
    assert delivery is not None
    assert delivery.message == frame(0)
    assert bench.stage.taken == [0]
    assert bench.rest(3), "a frame counts once it is done with, which is behind its sending"
    assert bench.runner.pulse.frames == 1


def test_calls_of_a_turn_that_is_over_are_refused(bench: Bench) -> None:
    bench.wire(1)
    assert bench.rest(2)
    late: list[Any] = [
        lambda: bench.rest(2),
        lambda: bench.rest(1),
        lambda: bench.runner.bind(1, bench.folder / "late"),
        lambda: bench.runner.connect(1, None, Endpoint("ipc://nowhere")),
        lambda: bench.run(1).result(5.0),
        lambda: bench.runner.within(1).__enter__(),
    ]
    for call in late:
        with pytest.raises(Outdated):
            call()
    bench.wire(2)


def test_an_error_in_computing_breaks_it_for_good(bench: Bench) -> None:
    bench.stage.breaks = True
    bench.stage.may_end.set()
    sender, end = bench.wire(1), bench.run(1)
    sender.send(frame(0))
    assert end.result(5.0).stage == 3
    assert bench.rest(2)
    assert bench.runner.broken is not None
    assert "ValueError: no such row" in bench.runner.broken


def all_end(name: str, but: Collection[threading.Thread] = ()) -> bool:
    """Of this process's threads, those of that name."""
    threads = [each for each in threading.enumerate() if each.name == name and each not in but]
    for thread in threads:
        thread.join(5.0)
    return not any(thread.is_alive() for thread in threads)


def test_a_turn_that_cannot_listen_leaves_no_threads_and_a_later_one_may() -> None:
    runner, before = Runner(), threading.enumerate()
    with pytest.raises(RingLost, match="cannot listen at"):
        runner.bind(1, "192.0.2.1")
    assert all_end("door", before)
    assert runner.bind(2, "127.0.0.1").public is not None
    assert runner.rest(3, 5.0)


def test_a_way_on_that_cannot_be_connected_does_not_keep_the_next_turn_waiting(
    bench: Bench,
) -> None:
    bench.runner.bind(1, bench.folder / "1")
    bench.runner.connect(1, None, Endpoint("no://such/way"))
    with pytest.raises(zmq.ZMQError):
        bench.runner.run(1, cast("Stage", bench.stage))
    assert bench.rest(2)
    assert all_end("rest")
