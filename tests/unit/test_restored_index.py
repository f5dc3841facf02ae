"""What a ring says at its start of recurrent states from before: which it names, and which the index takes in."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from coordinator.chain import ChainIndex
from coordinator.frames import NodeId
from coordinator.nodes import Node, node_id, root_of
from stage.build import StageReport, ring_info
from stage.config import RingConfig

ROOT = root_of("model")
TOKENS = tuple(range(200))


def chain(*cuts: int) -> list[Node]:
    """Whole blocks under one another; what is shorter hangs on the last whole one."""
    nodes, parent, start = [], ROOT, 0
    for end in cuts:
        tokens = array("i", TOKENS[start:end])
        nodes.append(Node(node_id(parent, tokens), parent, start, tokens))
        if len(tokens) == 64:
            parent, start = nodes[-1].id, end
    return nodes


NODES = chain(40, 64, 128, 150, 160)  # [0, 40) and [0, 64), [64, 128), [128, 150) and [128, 160)


def index_of(resumable: Sequence[Node], checkpoints: int | None = 9) -> ChainIndex:
    return ChainIndex(
        10_000,
        NODES,
        node_rows=64,
        min_tail_rows=16,
        checkpoints=checkpoints,
        resumable=[node.id for node in resumable],
    )


def test_a_restored_conversation_goes_on_from_its_deepest_checkpoint() -> None:
    head, first, second, shorter, longer = NODES
    index = index_of([head, second, longer])
    assert index.match(TOKENS, ROOT).rows == 160
    assert index.match(TOKENS, ROOT).nodes == (first.id, second.id, longer.id)
    assert index.match(TOKENS[:159], ROOT).rows == 128
    assert index.match(TOKENS[:100], ROOT).rows == 40
    assert set(index.resumable()) == {head.id, second.id, longer.id}
    # A part of a block without its state is worth nothing; whole blocks may get theirs again.
    assert index.take_drops() == (shorter.id,)
    assert [span.end for span in index.store(TOKENS[:64], ROOT, ends=(64,))] == [64]
    assert index.store(TOKENS[:128], ROOT, ends=(128,)) == ()


def test_without_their_states_restored_nodes_are_no_place_to_go_on_from() -> None:
    index = index_of([])
    assert (index.match(TOKENS, ROOT).rows, tuple(index.resumable())) == (0, ())
    assert not index.loadable([NODES[1].id])


def test_models_without_recurrent_layers_take_all_nodes() -> None:
    index = index_of([], checkpoints=None)
    assert (index.match(TOKENS, ROOT).rows, index.take_drops()) == (160, ())
    assert tuple(index.resumable()) == ()


def test_more_checkpoints_than_there_is_room_for_are_dropped_the_deepest_last() -> None:
    head, _, second, _, longer = NODES
    index = index_of([head, second, longer], checkpoints=1)
    assert tuple(index.resumable()) == (longer.id,)
    assert head.id in index.take_drops()
    assert index.take_checkpoint_drops() == (second.id,)
    assert tuple(index_of([head, second, longer], checkpoints=0).resumable()) == ()


def index_that_gave_up() -> tuple[ChainIndex, Node]:
    """And the node whose checkpoint it had no room for."""
    _, _, second, _, longer = NODES
    index = index_of([second, longer], checkpoints=1)
    assert tuple(index.resumable()) == (longer.id,)
    return index, second


def test_a_checkpoint_whose_drop_was_lost_with_its_epoch_is_dropped_again() -> None:
    index, second = index_that_gave_up()
    dropped, bare = index.take_drops(), index.take_checkpoint_drops()
    assert bare == (second.id,)
    index.undelivered(dropped, bare)
    # No stage has heard of it, and there would be room for it now.
    index.reconcile(NODES, [second.id])
    assert tuple(index.resumable()) == ()
    assert index.take_checkpoint_drops() == (second.id,)
    index.reconcile(NODES, [])
    assert index.take_checkpoint_drops() == ()


def test_a_checkpoint_drop_that_was_never_sent_stays_due_in_the_next_epoch() -> None:
    index, second = index_that_gave_up()
    index.reconcile(NODES, [second.id])
    assert tuple(index.resumable()) == ()
    assert index.take_checkpoint_drops() == (second.id,)


def report(resumable: Sequence[Node], *, recurrent: bool = True) -> StageReport:
    ids: tuple[NodeId, ...] = tuple(node.id for node in resumable)
    return StageReport(
        1,
        "model",
        100,
        3,
        "exact",
        True,
        "cpu",
        False,
        host_rows=1000,
        stored=tuple(NODES),
        recurrent=recurrent,
        checkpoints=9,
        resumable=ids,
    )


def test_a_ring_names_the_states_that_all_stages_with_recurrent_layers_have(tmp_path) -> None:
    head, first, second, _, longer = NODES
    config = RingConfig(tmp_path, "x", ((0, 1), (1, 2), (2, 3)), 1, 1000)
    without = report([], recurrent=False)
    reports = [report([head, second, longer]), without, report([first, second, longer])]
    assert ring_info(config, reports).held.checkpoints == {second.id, longer.id}
    # A node that some stage has no rows of is not named, whoever has its state.
    reports[1] = StageReport(1, "model", 100, 3, "exact", True, "cpu", False, stored=NODES[:3])
    assert ring_info(config, reports).held.nodes == tuple(NODES[:3])
    assert ring_info(config, reports).held.checkpoints == {second.id}
    assert ring_info(config, [without] * 3).held.checkpoints == frozenset()
