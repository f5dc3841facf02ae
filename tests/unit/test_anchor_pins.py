"""A pin is of the nodes that were there: what was lost and stored anew is pinned once, and by whoever wants it now."""

from __future__ import annotations

import pytest

from coordinator.anchors import Anchors
from coordinator.chain import ChainIndex
from coordinator.nodes import root_of

ROOT = root_of("model")
HEAD = tuple(range(8))  # two blocks


@pytest.fixture
def index() -> ChainIndex:
    return ChainIndex(64, node_rows=4, min_tail_rows=2)


def stored(index: ChainIndex, tokens: tuple[int, ...]) -> None:
    index.publish([span.node for span in index.store(tokens, ROOT)])


def test_a_head_that_lost_its_end_again_and_again_gives_way_to_newer_ones(
    index: ChainIndex,
) -> None:
    anchors = Anchors(index)
    for _ in range(3):
        stored(index, HEAD)
        anchors.want(HEAD, ROOT)
        index.lose([index.match(HEAD, ROOT).nodes[-1]])
    (first,) = index.match(HEAD, ROOT).nodes
    assert index.is_pinned(first), "what is left of it stays"
    for start in range(20, 60, 8):
        newer = tuple(range(start, start + 8))
        stored(index, newer)
        anchors.want(newer, ROOT)
    assert not index.is_pinned(first)
    assert index.pinned_rows <= 32


def test_a_head_that_was_lost_takes_no_pin_of_another_with_it(index: ChainIndex) -> None:
    anchors = Anchors(index)
    others = [(*HEAD[:4], *range(20 + n, 24 + n)) for n in range(2)]
    for head in others:
        stored(index, head)
        anchors.want(head, ROOT)
    index.lose([index.match(HEAD, ROOT).nodes[0]])
    stored(index, others[1])
    anchors.want(others[1], ROOT)
    stored(index, others[0])
    anchors.want(others[0], ROOT)
    index.unpin(index.match(others[0], ROOT).nodes)
    assert all(index.is_pinned(node) for node in index.match(others[1], ROOT).nodes)


def test_what_an_operator_pinned_can_be_pinned_again_when_it_was_lost(index: ChainIndex) -> None:
    anchors = Anchors(index)
    stored(index, HEAD)
    assert anchors.pin(HEAD, ROOT)
    room = anchors.room_by_hand(ROOT)
    for _ in range(3):
        index.lose([index.match(HEAD, ROOT).nodes[-1]])
        assert anchors.room_by_hand(ROOT) == room + 4
        stored(index, HEAD)
        assert anchors.pin(HEAD, ROOT)
        assert anchors.room_by_hand(ROOT) == room
    assert index.pinned_rows == 8


def test_what_is_pinned_already_takes_no_room_again(index: ChainIndex) -> None:
    anchors = Anchors(index)
    stored(index, HEAD)
    room = anchors.room_by_hand(ROOT, HEAD)
    assert anchors.pin(HEAD, ROOT)
    assert anchors.room_by_hand(ROOT, HEAD) == room, (
        "to pin it twice is no more than to pin it once"
    )
    assert anchors.room_by_hand(ROOT, (99,)) == room - len(HEAD)
