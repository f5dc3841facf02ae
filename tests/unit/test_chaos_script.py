"""The storm's script and its traffic: pure, the same for the same seed, and with all that is promised in them."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from coordinator.errors import InvalidSetting
from coordinator.requests import GREEDY
from gateway.chaos.options import StormOptions
from gateway.chaos.storm import KILLS, Act, Fault, Moment, parse_faults, storm
from gateway.chaos.traffic import Ask, Chatter, Kind, Shape, Talk

SHAPE = Shape(pool=4, turns=3, answer_tokens=8)


def encode(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def answer(ask: Ask) -> tuple[int, ...]:
    """As a model gives it: by the ask alone."""
    dice = random.Random(hash((ask.prompt, ask.sampling)))
    return tuple(dice.randrange(256) for _ in range(ask.max_tokens))


def said(seed: int, stream: int, turns: int) -> list[tuple[str, Ask]]:
    chatter = Chatter(seed, stream, encode, SHAPE)
    found = []
    for _ in range(turns):
        step = chatter.next()
        found.append((step.session, step.ask))
        chatter.answered(step, answer(step.ask))
    return found


def test_the_same_seed_makes_the_same_storm_and_another_one_another() -> None:
    first, again, other = (list(islice(storm(seed, tuple(Fault), 3), 40)) for seed in (5, 5, 6))
    assert first == again
    assert first != other
    assert [planned.number for planned in first] == list(range(40))


def test_in_each_round_every_fault_strikes_once_and_stages_take_turns() -> None:
    rounds = 30
    planned = list(islice(storm(1, KILLS, 3), rounds * len(KILLS)))
    for begin in range(0, len(planned), len(KILLS)):
        assert {each.fault for each in planned[begin : begin + len(KILLS)]} == set(KILLS)
    assert {each.stage for each in planned} == {0, 1, 2}
    assert all(0 <= each.depth < 1 for each in planned)


def test_in_a_soak_the_faults_stay_with_one_stage_so_that_the_others_live_for_long() -> None:
    soak = StormOptions(minutes=30, every_s=60, soak=Path("soak.json"))
    spell = soak.spell(2)
    assert spell == 15
    stages = [each.stage for each in islice(storm(4, KILLS, 2, spell), 60)]
    assert stages == [stages[0]] * 15 + [1 - stages[0]] * 15 + stages[:30]
    assert StormOptions(minutes=30, every_s=60).spell(2) is None


def test_a_kill_has_the_moment_of_its_name_and_what_has_none_gets_one() -> None:
    for planned in islice(storm(2, tuple(Fault), 2), 100):
        if planned.fault.act is Act.KILL:
            assert str(planned.fault) == f"kill-{planned.moment}"
        else:
            assert planned.moment in (Moment.PREFILL, Moment.DECODE, Moment.SPECULATION)


def test_faults_are_chosen_by_name_and_each_only_once() -> None:
    assert parse_faults("kill") == KILLS
    assert parse_faults("stop, kill-load,stop") == (Fault.STOP, Fault.KILL_LOAD)
    assert parse_faults("all") == tuple(Fault)
    with pytest.raises(InvalidSetting, match="'fire' is none of all, kill, kill-prefill"):
        parse_faults("kill,fire")


def test_the_same_seed_has_every_stream_say_the_same_and_streams_differ() -> None:
    assert said(1, 0, 40) == said(1, 0, 40)
    assert said(1, 0, 40) != said(1, 1, 40)
    assert said(1, 0, 40) != said(2, 0, 40)


def test_traffic_extends_asks_again_branches_calls_aside_and_samples() -> None:
    chatter, steps = Chatter(3, 0, encode, SHAPE), []
    for _ in range(200):
        step = chatter.next()
        steps.append(step)
        chatter.answered(step, answer(step.ask))
    assert set(Counter(step.kind for step in steps)) == set(Kind)
    assert {step.ask.draft for step in steps} == {True, False}
    sampled = [step.ask.sampling for step in steps if step.ask.sampling != GREEDY]
    assert all(spec.temperature == 0.8 and spec.seed for spec in sampled)
    assert 0.3 < len(sampled) / len(steps) < 0.7


def test_however_long_it_goes_on_there_are_only_so_many_different_turns() -> None:
    asks = {ask for stream in range(4) for _, ask in said(1, stream, 400)}
    per_conversation = SHAPE.turns * (1 + 1 + 2 + 2)
    assert len(asks) <= SHAPE.pool * per_conversation


def test_a_conversation_grows_by_its_extensions_only() -> None:
    talk, dice = Talk(1, "s", encode, SHAPE), random.Random(0)
    first = talk.next(Kind.EXTEND, dice)
    talk.answered(first, (1, 2, 3))
    aside = talk.next(Kind.ASIDE, dice)
    talk.answered(aside, (9,))
    branch = talk.next(Kind.BRANCH, dice)
    talk.answered(branch, (8,))
    again = talk.next(Kind.AGAIN, dice)
    talk.answered(again, (7,))
    second = talk.next(Kind.EXTEND, dice)
    assert again.ask.prompt == first.ask.prompt
    assert second.ask.prompt[: len(first.ask.prompt) + 3] == (*first.ask.prompt, 1, 2, 3)
    assert branch.ask.prompt[: len(encode("The"))] == first.ask.prompt[: len(encode("The"))]
    assert branch.ask.prompt != first.ask.prompt
    assert talk.turns == 1


def test_a_conversation_is_over_before_its_lane_is_full() -> None:
    talk, dice = Talk(0, "s", encode, Shape(turns=99, rows=900)), random.Random(0)
    while not talk.over:
        step = talk.next(Kind.EXTEND, dice)
        assert len(step.ask.prompt) < 900 + 500
        talk.answered(step, (1,) * 40)
    assert talk.turns < 9


def test_every_stream_has_some_sessions_of_its_own_however_long_it_talks() -> None:
    streams = [{session for session, _ in said(4, stream, 200)} for stream in range(3)]
    assert [len(sessions) for sessions in streams] == [8, 8, 8]
    assert len(set.union(*streams)) == 24
