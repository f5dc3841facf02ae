"""Two stages that keep each other's nodes over real sockets: none waits for the other, and no turn leaves anything."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from stage import mirroring
from stage.kv.mirror import Key, MirrorShelf, Record
from stage.kv.node_file import ROWS, STATE
from stage.kv.outbox import Outbox
from stage.mirror_wire import Absent, Dropped, Hello, Shelved, Wanted, decode, encode
from stage.mirroring import GivenBack, Mirror, Telling
from stage.transport import Channel, Endpoint, Link
from tests.unit.mirror_rig import PLENTY, KeepingStage, chain, shelved, told

NODES = chain((1, 2, 3, 4, 5, 6, 7, 8))
WITHIN_S = 10.0
IN_FLIGHT = 8  # records on their way, at most
Heard = TypeVar("Heard")
NOBODY = Endpoint("ipc:///nobody/listens/here")


class WatchedShelf(MirrorShelf):
    """Tells whoever waits for what it keeps."""

    def __init__(self, budget: int) -> None:
        super().__init__(budget)
        self.changed = threading.Condition()
        self.puts = 0

    def put(self, record: Record) -> bool:
        with self.changed:
            self.puts += 1
            self.changed.notify_all()
            return super().put(record)

    def drop(self, keys) -> None:
        with self.changed:
            self.changed.notify_all()
            super().drop(keys)

    def becomes(self, contents: dict[Key, bytes]) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: shelved(self) == contents, WITHIN_S)


class Side:
    """A stage's process."""

    def __init__(self, index: int, budget: int = PLENTY) -> None:
        self.index = index
        self.stage = KeepingStage(Outbox(), budget)
        self.mirror = Mirror(self.stage.outbox, budget)
        self.shelf = self.mirror.shelf = WatchedShelf(budget)
        self.is_new = True

    def open(self, turn: int, within_s: float = WITHIN_S) -> GivenBack:
        is_new, self.is_new = self.is_new, False
        return self.mirror.open(turn, self.stage if is_new else None, within_s)


class Pair:
    """Stage 0 and stage 1, of which each keeps the other's nodes."""

    def __init__(self, where: Callable[[str], Path | str]) -> None:
        self.sides = [Side(0), Side(1)]
        self._where = where
        self._turn = 0

    def wire(self, within_s: float = WITHIN_S) -> list[GivenBack]:
        self._turn += 1
        self.rest()
        names = [f"{self._turn}-{side.index}" for side in self.sides]
        places = [
            side.mirror.bind(self._turn, self._where(name))
            for side, name in zip(self.sides, names, strict=True)
        ]
        for side, other in zip(self.sides, reversed(places), strict=True):
            side.mirror.admit(1 - side.index, other.endpoint.public, other.endpoint)
        return [side.open(self._turn, within_s) for side in self.sides]

    def replace(self, index: int, budget: int = PLENTY) -> None:
        self.sides[index].mirror.rest()
        self.sides[index] = Side(index, budget)

    def rest(self) -> None:
        for side in self.sides:
            side.mirror.rest()

    def are_in_step(self) -> bool:
        there = zip(self.sides, reversed(self.sides), strict=True)
        return all(other.shelf.becomes(side.stage.contents) for side, other in there)


def mirror_threads() -> set[str]:
    return {each.name for each in threading.enumerate() if each.name.startswith("mirror")}


@pytest.fixture(params=["ipc", "tcp"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Path | str]:
    return (lambda name: tmp_path / name) if request.param == "ipc" else (lambda name: "127.0.0.1")


@pytest.fixture
def pair(where: Callable[[str], Path | str]) -> Iterator[Pair]:
    pair = Pair(where)
    pair.wire()
    yield pair
    pair.rest()
    assert mirror_threads() == set()


def keep_all(side: Side) -> None:
    for node in NODES:
        assert side.stage.keep(node, ROWS)
    for node in NODES[::3]:
        assert side.stage.keep(node, STATE)


def test_what_each_stage_keeps_and_drops_the_other_one_keeps_and_drops(pair: Pair) -> None:
    for side in pair.sides:
        keep_all(side)
    assert pair.are_in_step()
    for side in pair.sides:
        side.stage.drop(NODES[3], STATE)
        side.stage.drop(NODES[side.index], ROWS)
        assert side.stage.keep(NODES[side.index], ROWS)
    assert pair.are_in_step()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_new_stage_gets_back_what_the_one_before_it_had_and_is_told_the_others(
    pair: Pair, lost: int
) -> None:
    for side in pair.sides:
        keep_all(side)
    assert pair.are_in_step()
    had, sent = pair.sides[lost].stage.contents, pair.sides[1 - lost].shelf.puts
    pair.replace(lost)
    given = pair.wire()
    assert pair.sides[lost].stage.contents == had
    assert given[lost].records == len(had)
    assert given[lost].nbytes == sum(map(len, had.values()))
    assert (given[lost].absent, given[1 - lost]) == (0, GivenBack())
    assert pair.are_in_step()
    pair.sides[lost].stage.drop(NODES[0])
    assert pair.are_in_step()
    assert pair.sides[1 - lost].shelf.puts == sent


def test_a_wiring_without_a_loss_gives_nothing_back_and_sends_what_was_missed(pair: Pair) -> None:
    keep_all(pair.sides[0])
    assert pair.are_in_step()
    pair.rest()
    pair.sides[0].stage.drop(NODES[7])
    pair.sides[1].stage.keep(NODES[0])
    assert pair.wire() == [GivenBack(), GivenBack()]
    assert pair.are_in_step()


def test_two_stages_that_are_lost_at_once_begin_with_nothing(pair: Pair) -> None:
    for side in pair.sides:
        keep_all(side)
    assert pair.are_in_step()
    for index in (0, 1):
        pair.replace(index)
    pair.wire()
    assert [side.stage.contents for side in pair.sides] == [{}, {}]
    assert pair.are_in_step()


def test_what_does_not_come_in_time_is_absent_and_the_mirror_goes_on(pair: Pair) -> None:
    keep_all(pair.sides[0])
    assert pair.are_in_step()
    pair.replace(0)
    given = pair.wire(within_s=0.0)[0]
    assert given.records < len(NODES)
    pair.sides[0].stage.keep(NODES[5])
    assert pair.are_in_step()


def test_a_new_stage_with_less_memory_takes_back_what_it_has_room_for(pair: Pair) -> None:
    keep_all(pair.sides[0])
    assert pair.are_in_step()
    pair.replace(0, budget=400)
    given = pair.wire()[0]
    assert 0 < given.records < len(NODES)
    assert given.absent > 0
    assert pair.are_in_step()


def test_a_stage_that_keeps_for_another_one_than_before_forgets(pair: Pair, tmp_path: Path) -> None:
    """Also how little room the other one had."""
    pair.replace(0, budget=400)
    pair.wire()
    pair.sides[0].stage.keep(NODES[0])
    assert pair.are_in_step()
    assert pair.sides[1].shelf.budget == 400
    pair.rest()
    mirror = pair.sides[1].mirror
    assert mirror.bind(9, tmp_path / "anew").keeps == 0
    mirror.admit(7, None, NOBODY)
    assert (mirror.keeps, len(mirror.shelf), mirror.shelf.budget) == (7, 0, PLENTY)


class Neighbour:
    """By hand: one that does with what it hears as a test likes."""

    def __init__(self, folder: Path) -> None:
        self._link = Link()
        self.channel, self.endpoint = self._link.answer(folder / "by-hand")

    def expect(self, kind: type[Heard]) -> Heard:
        parts = self.channel.receive(WITHIN_S)
        assert parts is not None
        said = decode(parts)
        assert isinstance(said, kind)
        return said

    def close(self) -> None:
        self.channel.close()
        self._link.close()


@contextmanager
def beside(folder: Path, budget: int = PLENTY) -> Iterator[tuple[Side, Neighbour]]:
    """A stage that is about to open its mirror."""
    side, neighbour = Side(0, budget), Neighbour(folder)
    side.mirror.bind(1, folder / "stage")
    side.mirror.admit(1, None, neighbour.endpoint)
    try:
        yield side, neighbour
    finally:
        side.mirror.rest()
        neighbour.close()
    assert mirror_threads() == set()


def test_nothing_that_a_stage_stores_waits_for_a_neighbour_that_does_not_read(
    tmp_path: Path,
) -> None:
    """With a bound that a frame could run into, this would not end. And what is given up again costs no memory."""
    nodes = [chain((16_000,), first=first)[0] for first in range(40)]  # of 256 KB each
    with beside(tmp_path, budget=2**30) as (side, neighbour):
        side.is_new = False
        side.open(1)
        neighbour.expect(Hello)
        neighbour.channel.send(encode(Shelved(())))
        for node in nodes:
            assert side.stage.keep(node)
        store = side.stage.stores[ROWS]
        found = [store.get(node.id) for node in nodes]
        data = [weakref.ref(kept.data) for kept in found if kept is not None]
        del found
        assert len(data) == len(nodes)
        for node in nodes:
            side.stage.drop(node)
        gc.collect()
        assert sum(each() is not None for each in data) <= IN_FLIGHT


def opened(side: Side) -> tuple[threading.Thread, list[GivenBack]]:
    given: list[GivenBack] = []
    thread = threading.Thread(target=lambda: given.append(side.open(1, within_s=600.0)))
    thread.start()
    return thread, given


def test_a_turn_that_ends_while_a_stage_waits_for_its_nodes_ends_the_wait(tmp_path: Path) -> None:
    with beside(tmp_path) as (side, neighbour):
        thread, given = opened(side)
        neighbour.expect(Hello)
        neighbour.channel.send(encode(Shelved((((NODES[0].id, ROWS), 5),))))
        neighbour.expect(Wanted)
        side.mirror.rest()
        thread.join(WITHIN_S)
        assert not thread.is_alive()
        assert [each.records for each in given] == [0]


def test_a_neighbour_that_is_gone_keeps_nobody_waiting_who_has_questions_for_it() -> None:
    link = Link()
    stage = KeepingStage(Outbox())
    telling = Telling(link.call(NOBODY), stage.outbox, PLENTY, lambda: False)
    telling._there = {(node.id, ROWS): 5 for node in NODES}
    given = telling.take_back(stage, 0.2)
    assert (given.records, given.absent) == (0, len(NODES))
    telling.close()
    link.close()


def test_answers_that_say_nothing_are_nodes_that_are_absent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    keys = tuple((node.id, ROWS) for node in NODES[:3])
    with beside(tmp_path) as (side, neighbour):
        thread, given = opened(side)
        neighbour.expect(Hello)
        neighbour.channel.send(encode(Shelved(tuple((key, 5) for key in keys))))
        for _ in keys:
            neighbour.expect(Wanted)
        neighbour.channel.send([b"\xc1garbage"])
        neighbour.channel.send(encode(Record(NODES[1].id, NODES[1].parent, ROWS, 5, b"head", b"")))
        neighbour.channel.send(encode(Absent(keys[2])))
        thread.join(WITHIN_S)
        assert [(each.records, each.absent) for each in given] == [(0, 3)]
        assert side.stage.contents == {}


def test_what_comes_too_late_is_passed_over_and_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirroring, "_SILENT_S", 0.2)
    before = KeepingStage(Outbox())
    for node in NODES:
        before.keep(node)
    records = [each for each in told(before.outbox) if isinstance(each, Record)]
    with beside(tmp_path) as (side, neighbour):
        thread, given = opened(side)
        neighbour.expect(Hello)
        neighbour.channel.send(encode(Shelved(tuple((each.key, each.stamp) for each in records))))
        for record in records[:2]:
            neighbour.expect(Wanted)
            neighbour.channel.send(encode(record))
        thread.join(WITHIN_S)
        assert [(each.records, each.absent) for each in given] == [(2, len(NODES) - 2)]
        for record in records[2:5]:
            neighbour.expect(Wanted)
            neighbour.channel.send(encode(record))
        assert neighbour.expect(Dropped).keys == tuple(each.key for each in records[2:])
        assert len(side.stage.contents) == 2


def test_a_first_answer_that_cannot_be_read_has_everything_sent_anew(tmp_path: Path) -> None:
    with beside(tmp_path) as (side, neighbour):
        side.stage.keep(NODES[0])
        thread, given = opened(side)
        neighbour.expect(Hello)
        neighbour.channel.send([b""])
        neighbour.expect(Record)
        thread.join(WITHIN_S)
        assert [each.records for each in given] == [0]


def test_an_opening_of_a_turn_that_is_over_does_nothing(tmp_path: Path) -> None:
    with beside(tmp_path) as (side, _):
        assert side.open(2) == GivenBack()
        assert mirror_threads() == {"mirror-shelf"}


def test_a_shelf_hears_garbage_and_goes_on(tmp_path: Path) -> None:
    side, link = Side(0), Link()
    place = side.mirror.bind(1, tmp_path / "stage")
    side.mirror.admit(1, None, NOBODY)
    channel = link.call(place.endpoint)
    for garbage in ([b""], [b"\xc1"], [b"\x80", b"x"], encode(Hello(5))[:0] or [b"\x91\x01"]):
        channel.send(garbage)
    channel.send(encode(Wanted((NODES[0].id, ROWS))))
    parts = channel.receive(WITHIN_S)
    assert parts is not None
    assert decode(parts) == Absent((NODES[0].id, ROWS))
    channel.close()
    side.mirror.rest()
    link.close()


def test_a_stranger_is_not_kept_for_nor_answered() -> None:
    side, owner, stranger = Side(0), Link(), Link()
    place = side.mirror.bind(1, "127.0.0.1")
    answers, known = owner.answer("127.0.0.1")
    answers.close()
    side.mirror.admit(1, known.public, NOBODY)
    for link, answered in ((stranger, False), (owner, True)):
        channel: Channel = link.call(place.endpoint)
        channel.send(encode(Hello(PLENTY)))
        assert (channel.receive(WITHIN_S if answered else 0.3) is not None) == answered
        channel.close()
    side.mirror.rest()
    for link in (owner, stranger):
        link.close()
