"""What replicas hold in common: never more than each of them, and whatever they agree on."""

from __future__ import annotations

from array import array
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.frames import NodeId
from coordinator.held import NOTHING, HeldLane, Holding, held_by_all
from coordinator.nodes import Node, node_id, root_of

ROOTS = [root_of("model", tenant) for tenant in ("", "a")]


def lane(tokens: list[int], root: NodeId = ROOTS[0], first: int = 0) -> HeldLane:
    return HeldLane(array("i", tokens), root, first)


def chain(*blocks: list[int], root: NodeId = ROOTS[0]) -> tuple[Node, ...]:
    made, parent, start = [], root, 0
    for block in blocks:
        made.append(Node(node_id(parent, block), parent, start, array("i", block)))
        parent, start = made[-1].id, start + len(block)
    return tuple(made)


lanes = st.builds(
    lane,
    st.lists(st.integers(0, 1), max_size=4),
    st.sampled_from(ROOTS),
    st.integers(0, 4),
)
blocks = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=2), max_size=3)


@st.composite
def holdings(draw: st.DrawFn) -> Holding:
    chains = [chain(*draw(blocks), root=root) for root in ROOTS for _ in range(2)]
    known = {node.id: node for nodes in chains for node in nodes}
    kept = [node for node in known.values() if draw(st.integers(0, 3))]
    kept.sort(key=lambda node: node.start)
    marked = frozenset(node.id for node in kept if draw(st.booleans()))
    return Holding(tuple(draw(lanes) for _ in range(2)), tuple(kept), marked)


@given(st.lists(holdings(), min_size=1, max_size=3))
def test_no_replica_is_asked_for_what_it_does_not_hold(replicas: list[Holding]) -> None:
    held = held_by_all(replicas)
    for number, common in enumerate(held.lanes):
        for replica in replicas if common.tokens else ():
            own = replica.lane(number)
            assert own.tokens[: len(common.tokens)] == common.tokens
            assert own.root == common.root
            assert own.first <= common.first <= len(common.tokens)
    for replica in replicas:
        assert {node.id for node in held.nodes} <= {node.id for node in replica.nodes}
        assert held.checkpoints <= replica.checkpoints
    known = {node.id: node.end for node in held.nodes}
    for node in held.nodes:
        assert node.start == 0 or known[node.parent] == node.start
    assert held.checkpoints <= known.keys()


@given(st.lists(holdings(), min_size=1, max_size=3))
def test_the_order_of_the_replicas_does_not_matter(replicas: list[Holding]) -> None:
    told = {
        (
            tuple((tuple(lane.tokens), lane.root, lane.first) for lane in held.lanes),
            frozenset(node.id for node in held.nodes),
            held.checkpoints,
        )
        for held in map(held_by_all, permutations(replicas))
    }
    assert len(told) == 1


def test_replicas_that_agree_lose_nothing() -> None:
    nodes = chain([1, 2], [3, 4])
    one = Holding((lane([1, 2, 3]), HeldLane()), nodes, frozenset({nodes[1].id}))
    assert held_by_all([one, one, one]) == one


def test_a_replica_that_holds_nothing_leaves_nothing() -> None:
    full = Holding((lane([1, 2, 3]),), chain([1, 2]))
    held = held_by_all([full, NOTHING])
    assert (held.lanes, held.nodes) == ((HeldLane(),), ())


def test_a_lane_that_some_replica_cannot_go_on_in_is_empty() -> None:
    """The shorter one ends before the state that the longer one still has."""
    long, short = lane([1, 2, 3, 4], first=3), lane([1, 2], first=1)
    assert held_by_all([Holding((long,)), Holding((short,))]).lanes == (HeldLane(),)
    near = lane([1, 2, 3], first=1)
    assert held_by_all([Holding((long,)), Holding((near,))]).lanes == (lane([1, 2, 3], first=3),)


def test_a_node_goes_with_what_it_hangs_on() -> None:
    head, middle, end = chain([1], [2], [3])
    held = held_by_all([Holding(nodes=(head, middle, end)), Holding(nodes=(head, end))])
    assert held.nodes == (head,)
