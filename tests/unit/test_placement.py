"""Where stages go: refused when there is too little, spread where there are nodes enough, few crossings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.errors import ClusterTooSmall
from stage.config import RingConfig
from stage.placement import along_nodes, for_stages, keeper_shift, next_spare, share_of

CONFIG = RingConfig(Path("m"), "m", ((0, 1), (1, 2)), cpu_share=0.5)
ON_GPUS = share_of(replace(CONFIG, device="cuda"))
BIG, NONE, GPU = {"CPU": 8.0}, {"node:here": 1.0}, {"CPU": 8.0, "GPU": 1.0}


def test_a_cluster_with_too_little_is_refused_in_one_line() -> None:
    share_of(CONFIG).check({"CPU": 1.0})
    with pytest.raises(ClusterTooSmall) as refused:
        share_of(CONFIG).check({"CPU": 0.9})
    assert (refused.value.wanted, refused.value.available) == (
        "1 CPU (2 stages with 0.5 each)",
        "0.9 CPU",
    )
    with pytest.raises(ClusterTooSmall, match="available 0 GPU"):
        ON_GPUS.check(BIG)


@pytest.mark.parametrize(
    ("spread", "nodes", "strategy"),
    [
        (True, [BIG, BIG], "STRICT_SPREAD"),
        (True, [BIG, BIG, BIG], "STRICT_SPREAD"),
        (True, [BIG], "PACK"),
        (True, [BIG, NONE], "PACK"),
        (False, [BIG, BIG], "PACK"),
    ],
)
def test_each_stage_gets_a_node_when_that_is_asked_for_and_can_be(
    spread: bool, nodes: list[dict[str, float]], strategy: str
) -> None:
    assert share_of(CONFIG).strategy(spread, nodes) == strategy


def test_spares_are_asked_for_too_and_may_share_a_node_where_stages_need_not() -> None:
    share = share_of(replace(CONFIG, spares=1))
    with pytest.raises(ClusterTooSmall, match=r"wanted 1\.5 CPU \(2 stages and 1 spare with 0\.5"):
        share.check({"CPU": 1.0})
    assert share.strategy(True, [BIG, BIG, BIG]) == "STRICT_SPREAD"
    assert share.strategy(True, [BIG, BIG]) == "SPREAD"
    assert share.strategy(True, [BIG]) == "PACK"


def test_a_node_without_a_gpu_takes_no_stage_of_a_ring_on_gpus() -> None:
    assert ON_GPUS.strategy(True, [GPU, BIG]) == "PACK"
    assert ON_GPUS.strategy(True, [GPU, GPU]) == "STRICT_SPREAD"


def test_stages_of_one_node_follow_each_other_and_our_own_node_comes_first() -> None:
    order = along_nodes(["b", "a", "here", "a", "b"], "here")
    assert [["b", "a", "here", "a", "b"][place] for place in order] == ["here", "a", "a", "b", "b"]
    assert sorted(order) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("nodes", "spread", "chosen"),
    [
        (["a", "here", "here"], False, [1, 2]),
        (["a", "here", "here"], True, [1, 0]),
        (["b", "b", "a", "a"], False, [2, 3]),
        (["b", "b", "a", "a"], True, [2, 0]),
        (["here", "here", "here"], True, [0, 1]),
    ],
)
def test_stages_get_the_nearest_places_or_one_on_each_node_and_spares_the_others(
    nodes: list[str], spread: bool, chosen: list[int]
) -> None:
    assert for_stages(nodes, "here", 2, spread) == chosen


def test_spares_are_dealt_from_the_tail_backwards_and_where_one_is_missing() -> None:
    held: list[int] = []
    for _ in range(5):
        held.append(next_spare(held, 3))
    assert held == [2, 1, 0, 2, 1]
    held.remove(1)
    held.remove(1)
    assert next_spare(held, 3) == 1


@pytest.mark.parametrize(
    ("nodes", "shift"),
    [("aa", 1), ("ab", 1), ("abc", 1), ("aaaa", 1), ("aabb", 2), ("aaab", 1), ("aaabbb", 3)],
)
def test_another_machine_keeps_what_a_stage_has_where_that_can_be(nodes: str, shift: int) -> None:
    assert keeper_shift(nodes, [None] * len(nodes)) == shift


def test_whoever_keeps_a_stages_nodes_stays_their_keeper() -> None:
    """Also where a spare took a stage to another machine, and some keep nothing yet."""
    assert keeper_shift("aacb", [2, 3, 0, 1]) == 2
    assert keeper_shift("aabb", [3, None, 1, None]) == 1
    assert keeper_shift("aabb", [None, None, None, 2]) == 1
