"""The chain index: what it finds, what it gives up, and that it never holds more than there is room for."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.chain import ChainIndex, ChainMatch
from coordinator.frames import NodeId, NodeSpan
from coordinator.nodes import Node, NodeTable, root_of
from coordinator.prefixes import common_prefix

ROOT = root_of("model")
NODE_ROWS = 64
MIN_TAIL_ROWS = 16


def index_of(capacity: int, stored: Sequence[Node] = ()) -> ChainIndex:
    return ChainIndex(capacity, stored, node_rows=NODE_ROWS, min_tail_rows=MIN_TAIL_ROWS)


def tokens(seed: int, count: int) -> tuple[int, ...]:
    dice = random.Random(seed)
    return tuple(dice.randrange(1000) for _ in range(count))


def keep(index: ChainIndex, lane: Sequence[int]) -> tuple[NodeSpan, ...]:
    """Stores and publishes at once."""
    spans = index.store(lane, ROOT)
    index.publish(span.node for span in spans)
    return spans


def test_a_chain_is_found_up_to_where_a_prompt_differs() -> None:
    index = index_of(10_000)
    lane = tokens(1, 200)
    spans = keep(index, lane)
    assert [(span.start, span.end) for span in spans] == [(0, 64), (64, 128), (128, 192)]
    assert index.match(lane, ROOT).rows == 192
    assert index.match((*lane[:100], 5000, *lane[101:]), ROOT) == ChainMatch(
        (spans[0].node, spans[1].node), 100
    )
    assert index.match((5000, *lane), ROOT) == ChainMatch()


def test_a_rest_is_kept_from_a_few_rows_on_and_superseded_by_the_whole_block() -> None:
    index = index_of(10_000)
    lane = tokens(1, NODE_ROWS + MIN_TAIL_ROWS)
    first = keep(index, lane)
    assert index.match(tokens(1, 300), ROOT).rows == len(lane)
    longer = keep(index, tokens(1, 200))
    assert index.take_drops() == (first[-1].node,)
    assert index.match(tokens(1, 300), ROOT).rows == 192
    assert index.rows == 192
    assert first[0].node not in {span.node for span in longer}


def test_what_no_stage_has_acknowledged_is_not_found() -> None:
    index = index_of(10_000)
    spans = index.store(tokens(1, 128), ROOT)
    assert index.match(tokens(1, 128), ROOT).rows == 0
    index.publish([spans[0].node])
    assert index.match(tokens(1, 128), ROOT).rows == NODE_ROWS
    assert index.store(tokens(1, 128), ROOT) == ()


def test_a_lost_node_takes_with_it_all_that_hangs_on_it() -> None:
    index = index_of(10_000)
    spans = keep(index, tokens(1, 256))
    branch = keep(index, (*tokens(1, 128), *tokens(2, 64)))
    index.lose([spans[1].node])
    assert set(index.take_drops()) == {s.node for s in (*spans[1:], *branch)}
    assert index.match(tokens(1, 256), ROOT).rows == NODE_ROWS
    assert index.rows == NODE_ROWS


def test_a_node_that_is_lost_unknown_is_dropped_all_the_same() -> None:
    index = index_of(10_000)
    stray = NodeId(b"x" * 16)
    index.lose([stray])
    assert index.take_drops() == (stray,)
    assert index.take_drops() == ()


def test_leaves_go_first_and_the_conversation_used_longest_ago_before_others() -> None:
    index = index_of(6 * NODE_ROWS)
    old, new = keep(index, tokens(1, 192)), keep(index, tokens(2, 192))
    index.use(s.node for s in new)
    index.use(s.node for s in old)
    keep(index, tokens(3, 128))
    assert index.take_drops() == (new[2].node, new[1].node)
    assert index.match(tokens(1, 192), ROOT).rows == 192
    assert index.match(tokens(2, 192), ROOT).rows == NODE_ROWS


def test_pinned_nodes_stay_and_what_finds_no_room_is_not_stored() -> None:
    index = index_of(3 * NODE_ROWS)
    head = keep(index, tokens(1, 128))
    index.pin([s.node for s in head])
    assert [s.start for s in keep(index, tokens(2, 192))] == [0]
    assert index.match(tokens(1, 128), ROOT).rows == 128
    assert index.pinned_rows == 128
    index.unpin([s.node for s in head])
    assert index.pinned_rows == 0
    assert len(keep(index, tokens(3, 192))) == 3


def test_nodes_from_before_a_restart_are_found_and_orphans_are_dropped() -> None:
    index, table = index_of(10_000), NodeTable()
    lane = tokens(1, 192)
    for span in keep(index, lane):
        node = table.make(span, lane, ROOT)
        assert node is not None
        table.add(node)
    nodes = [table[node] for node in table.ids()]
    again = index_of(10_000, [nodes[0], nodes[2]])
    assert again.match(lane, ROOT).rows == NODE_ROWS
    assert again.take_drops() == (nodes[2].id,)


_BASES = [tokens(seed, 400) for seed in range(3)]
_LANES = st.tuples(
    st.sampled_from(range(3)), st.integers(1, 400), st.sampled_from(range(3)), st.integers(0, 150)
).map(lambda cut: (*_BASES[cut[0]][: cut[1]], *_BASES[cut[2]][: cut[3]]))
_STEPS = st.one_of(
    st.tuples(st.just("store"), _LANES),
    st.tuples(st.just("publish"), _LANES),
    st.tuples(st.just("use"), _LANES),
    st.tuples(st.just("lose"), _LANES),
    st.tuples(st.just("pin"), _LANES),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(_STEPS, max_size=25), st.integers(0, 12))
def test_the_index_and_the_table_that_follows_it_agree_and_stay_within_their_room(
    steps: list[tuple[str, tuple[int, ...]]], blocks: int
) -> None:
    index, table = index_of(blocks * NODE_ROWS), NodeTable()
    pinned: set[NodeId] = set()
    for what, lane in steps:
        if what == "store":
            spans = index.store(lane, ROOT)
            table.drop(index.take_drops())
            for span in spans:
                node = table.make(span, lane, ROOT)
                assert node is not None
                table.add(node)
        elif what == "publish":
            # As tickets do: all of a lane's nodes whose parents are published.
            parents = {ROOT, *(node.id for node in index.nodes())}
            for node in [table[n] for n in table.ids()]:
                if node.parent in parents:
                    index.publish([node.id])
                    parents.add(node.id)
        elif what == "lose":
            index.lose(index.match(lane, ROOT).nodes[-1:])
        elif what == "use":
            index.use(index.match(lane, ROOT).nodes)
        elif what == "pin":
            index.pin(index.match(lane, ROOT).nodes)
            pinned.update(index.match(lane, ROOT).nodes)
        table.drop(index.take_drops())
        assert index.rows == sum(table[node].rows for node in table.ids()) <= index.capacity
        assert all(node in index for node in table.ids())
        assert len(index) == len(table)
        for node in (table[n] for n in table.ids()):
            assert node.parent == ROOT or node.parent in table
        assert index.match(lane, ROOT).rows == _deepest(index, table, lane)
        pinned &= set(table.ids())  # what is lost and stored again is not pinned any more
        assert all(index.is_pinned(n) for n in pinned)


def _deepest(index: ChainIndex, table: NodeTable, lane: Sequence[int]) -> int:
    """By brute force: the longest prefix of the lane that any published chain begins with."""
    best = 0
    for node in index.nodes():
        path = [node]
        while path[0].start:
            path.insert(0, table[path[0].parent])
        chain = [token for part in path for token in part.tokens]
        best = max(best, common_prefix(chain, lane))
    return best


@pytest.mark.parametrize("rows", [0, NODE_ROWS - 1])
def test_a_store_without_room_for_a_block_stores_nothing_and_ends(rows: int) -> None:
    index = index_of(rows)
    assert index.store(tokens(1, 300), ROOT) == ()
    assert index.rows == 0


@pytest.mark.parametrize("block", [4, 2])
def test_a_checkpoint_on_its_way_is_not_given_up_in_the_same_frame(block: int) -> None:
    """A drop goes out before what stores: stages would keep for ever what the index has forgotten."""
    index = ChainIndex(1000, node_rows=4, min_tail_rows=1, checkpoints=1)
    first, other = tuple(range(1, 1 + block)), tuple(range(11, 11 + block))
    index.publish(span.node for span in index.store(first, ROOT))
    marked = index.store(first, ROOT, ends=(block,))
    assert [span.checkpoint for span in marked] == [True]
    beside = index.store(other, ROOT, ends=(block,))
    assert index.take_checkpoint_drops() == ()
    assert index.take_drops() == ()
    assert not any(span.checkpoint for span in beside)
    index.publish(span.node for span in (*marked, *beside))
    assert any(span.checkpoint for span in index.store(other, ROOT, ends=(block,)))
    assert index.take_checkpoint_drops() or index.take_drops(), "acknowledged, it may go"
