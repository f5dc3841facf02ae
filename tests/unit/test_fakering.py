"""The fake ring keeps its own promises: wrong rows show, right rows do not, faults happen as scripted."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest

from coordinator.errors import BrokenInvariant, InvalidSetting, RingLost
from coordinator.frames import Epoch, Frame, JobId, LaneId, RefusalCode, Reply
from coordinator.ledger import Ledger
from coordinator.requests import GREEDY, SamplingSpec
from fakering import texts
from fakering.clock import VirtualClock
from fakering.faults import (
    ALL_FAULTS,
    CorruptRow,
    Delay,
    Drop,
    Duplicate,
    FaultScript,
    Lose,
    Refuse,
    Reorder,
    Restart,
    Stall,
    random_script,
)
from fakering.hand import Hand
from fakering.model import FakeModel
from fakering.network import Network, Pace, check_sizes
from fakering.ring import FakeRing

VOCAB = 97
PROMPT = texts.novel(12, 1, VOCAB)
MODEL = FakeModel(VOCAB)


async def start(stages: int = 3, faults: FaultScript = (), **kinds) -> Hand:
    ring = FakeRing(stages, 3, 64, vocab_size=VOCAB, faults=faults, **kinds)
    return Hand(ring, await ring.start(lambda progress: None), reply_timeout_s=1.0)


# The language


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("spec", [GREEDY, SamplingSpec(temperature=0.7, seed=3)])
async def test_any_number_of_stages_says_what_the_oracle_says(
    stages: int, spec: SamplingSpec
) -> None:
    hand = await start(stages)
    for prompt in (PROMPT, texts.repetitive(15, 2, VOCAB), texts.shifted(PROMPT)):
        turn = await hand.turn(0, prompt, 12, spec=spec)
        assert turn.tokens == MODEL.oracle(prompt, 12, spec)


def test_a_seed_counts_only_where_something_is_drawn() -> None:
    def answers(temperature: float) -> set[tuple[int, ...]]:
        specs = [SamplingSpec(temperature=temperature, seed=seed) for seed in range(5)]
        return {MODEL.oracle(PROMPT, 8, spec) for spec in specs}

    assert len(answers(0.0)) == 1
    assert len(answers(0.8)) == 5


def test_other_prompts_and_other_models_say_other_things() -> None:
    prompts = [PROMPT, texts.shifted(PROMPT), PROMPT[1:]]
    prompts += [texts.changed(PROMPT, row, VOCAB) for row in range(len(PROMPT))]
    models = (MODEL, FakeModel(VOCAB, seed=1))
    answers = {model.oracle(prompt, 8) for prompt in prompts for model in models}
    assert len(answers) == 2 * len(prompts)


def test_a_quoting_model_repeats_itself_sometimes_but_not_always() -> None:
    prompt = texts.repetitive(28, 3, VOCAB)
    text = prompt + MODEL.oracle(prompt, 300)
    followers: dict[tuple[int, ...], int] = {}
    right = []
    for row in range(2, len(text)):
        pair = text[row - 2 : row]
        if row >= len(prompt) and pair in followers:
            right.append(followers[pair] == text[row])
        followers[pair] = text[row]
    assert len(right) > 50
    assert 0.3 < sum(right) / len(right) < 0.7
    silent = FakeModel(10_007, quoting=0.0).oracle(prompt, 200)
    assert len(set(silent)) > 180


def test_an_answer_ends_with_the_end_token_and_stays_in_its_range() -> None:
    model = FakeModel(VOCAB, end_token=0, end_one_in=16, low=10, high=20, quoting=0.0)
    answer = model.oracle(PROMPT, 500, stop={0})
    assert answer[-1] == 0
    assert set(answer[:-1]) <= set(range(10, 20))


@pytest.mark.parametrize("wrong", [{"low": 97}, {"high": 98}, {"quoting": 2}, {"end_one_in": 0}])
def test_an_impossible_language_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidSetting):
        FakeModel(VOCAB, **wrong)


# Wrong rows show


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("row", [0, 5, 11])
async def test_one_wrong_row_on_any_stage_changes_the_text(stage: int, row: int) -> None:
    hand = await start(faults=(CorruptRow(stage, 0, row=row, in_ledger=False),))
    await hand.turn(0, PROMPT, 4)
    prompt = (*PROMPT, 1)
    turn = await hand.turn(0, prompt, 6, cached_prefix=len(PROMPT))
    assert turn.tokens != MODEL.oracle(prompt, 6)
    healed = await hand.turn(0, prompt, 6)
    assert healed.tokens == MODEL.oracle(prompt, 6)


async def test_rows_computed_from_wrong_activations_stay_wrong() -> None:
    """Stage 0 reads a wrong row while stage 1 writes; the row is mended, what was made of it is not."""
    hand = await start(2, faults=(CorruptRow(0, 0, row=3, in_ledger=False),))
    await hand.turn(0, PROMPT, 1)
    await hand.turn(0, (*PROMPT, 5), 1, cached_prefix=len(PROMPT))
    hand.ring.network.stages[0].rows.tokens[0, 3] ^= 1
    prompt = (*PROMPT, 5, 6)
    turn = await hand.turn(0, prompt, 6, cached_prefix=len(PROMPT) + 1)
    assert turn.tokens != MODEL.oracle(prompt, 6)


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_a_wrong_row_that_its_ledger_knows_is_refused(stage: int) -> None:
    hand = await start(faults=(CorruptRow(stage, 0, row=5),))
    await hand.turn(0, PROMPT, 4)
    reply = await hand.exchange((hand.open(0, hand.new_job(), PROMPT, len(PROMPT)),))
    assert [(r.code, r.stage) for r in reply.refusals] == [(RefusalCode.KV_CONTENT, stage)]


async def test_reuse_of_another_prompts_rows_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """An oracle that counts positions only would let this pass."""
    monkeypatch.setattr(Ledger, "_content_guard", lambda *_: None)
    hand = await start()
    await hand.turn(0, texts.changed(PROMPT, 2, VOCAB), 1)
    turn = await hand.turn(0, PROMPT, 6, cached_prefix=len(PROMPT) - 1)
    assert turn.tokens != MODEL.oracle(PROMPT, 6)


async def test_a_restarted_stage_has_no_rows() -> None:
    hand = await start(faults=(Restart(1, nth=1),))
    job = hand.new_job()
    frames = hand.send_prefill(0, job, PROMPT, chunk=6)
    reply = await hand.reply_to(frames[1])
    assert [(r.code, r.stage, r.lane) for r in reply.refusals] == [(RefusalCode.KV_GAP, 1, 0)]
    assert reply.lanes[0].valid_rows == 0
    assert hand.ledger.valid_rows(LaneId(0)) == 0
    assert (await hand.turn(0, PROMPT, 6)).tokens == MODEL.oracle(PROMPT, 6)


async def test_a_scripted_refusal_blocks_the_lane_on_every_stage() -> None:
    hand = await start(faults=(Refuse(1, nth=1, code=RefusalCode.NO_STATE),))
    frames = hand.send_prefill(0, hand.new_job(), PROMPT, chunk=4)
    replies = [await hand.reply_to(frame) for frame in frames]
    assert [[r.code for r in reply.refusals] for reply in replies] == [
        [],
        [RefusalCode.NO_STATE],
        [RefusalCode.NO_STATE],
    ]
    assert (await hand.turn(0, PROMPT, 6)).tokens == MODEL.oracle(PROMPT, 6)


# Legs and time


def frames_of(count: int) -> list[Frame]:
    """`count` frames, each a chunk of two rows in lane 0."""
    hand = Hand(None, FakeRing(1, 1, 64, vocab_size=VOCAB).capacity())  # type: ignore[arg-type]
    parts = [hand.prefill(0, JobId(1), 2 * n, (n, n)) for n in range(count)]
    opening = hand.open(0, JobId(1))
    return [Frame(Epoch(0), n, (opening,) if n == 0 else (), (parts[n],)) for n in range(count)]


def seqs(network: Network, until: float) -> list[tuple[int, bool]]:
    """Which frames were answered by then, and whether whole ones were refused."""
    outcomes = network.advance(until)
    assert all(isinstance(outcome, Reply) for outcome in outcomes)
    return [(reply.seq, any(r.lane is None for r in reply.refusals)) for reply in outcomes]


@pytest.mark.parametrize("leg", [0, 1, 2])
@pytest.mark.parametrize(
    ("fault", "early", "late"),
    [
        (Delay(0, 1, 2.0), [0], [1, 2]),
        (Stall(0, 1, 2.0), [0], [1, 2]),
        (Stall(0, 1, math.inf), [0], []),
    ],
)
def test_a_late_frame_holds_those_behind_it(
    leg: int, fault: Delay | Stall, early: list[int], late: list[int]
) -> None:
    if isinstance(fault, Stall):
        fault = Stall(min(leg, 1), fault.nth, fault.seconds)
    else:
        fault = Delay(leg, fault.nth, fault.seconds)
    network = Network(2, 1, 64, MODEL, (fault,))
    for frame in frames_of(3):
        network.send(frame, 0.0)
    assert seqs(network, 1.0) == [(seq, False) for seq in early]
    assert network.next_due() == (2.0 if late else None)
    assert seqs(network, 2.0) == [(seq, False) for seq in late]


@pytest.mark.parametrize("leg", [0, 1])
def test_a_dropped_frame_makes_the_next_one_out_of_order(leg: int) -> None:
    network = Network(2, 1, 64, MODEL, (Drop(leg, 1),))
    for frame in frames_of(3):
        network.send(frame, 0.0)
    assert seqs(network, 0.0) == [(0, False), (2, True)]


@pytest.mark.parametrize("leg", [0, 1])
def test_an_overtaken_frame_is_applied_when_it_comes(leg: int) -> None:
    network = Network(2, 1, 64, MODEL, (Reorder(leg, 1, 1.0),))
    for frame in frames_of(3):
        network.send(frame, 0.0)
    assert seqs(network, 0.5) == [(0, False), (2, True)]
    assert seqs(network, 1.0) == [(1, False)]


def test_a_duplicate_on_the_way_is_swallowed_and_a_reply_twice_is_not() -> None:
    network = Network(2, 1, 64, MODEL, (Duplicate(0, 0), Duplicate(1, 1), Duplicate(2, 2)))
    for frame in frames_of(3):
        network.send(frame, 0.0)
    assert seqs(network, 0.0) == [(0, False), (1, False), (2, False), (2, False)]


def test_stages_work_on_consecutive_frames_at_once() -> None:
    network = Network(2, 1, 64, MODEL, pace=Pace(step_s=1.0))
    for frame in frames_of(3):
        network.send(frame, 0.0)
    assert [len(network.advance(when)) for when in (1.9, 2.0, 3.0, 4.0)] == [0, 1, 1, 1]


def test_a_new_epoch_drops_what_is_on_its_way_and_ends_a_stall() -> None:
    network = Network(2, 1, 64, MODEL, (Stall(0, 1, math.inf), Delay(2, 0, 5.0)))
    old = frames_of(2)
    for frame in old:
        network.send(frame, 0.0)
    network.advance(0.0)
    assert network.next_due() == 5.0
    network.open_epoch(Epoch(1))
    assert network.next_due() is None
    network.send(Frame(Epoch(1), 0, old[0].ops, old[0].segments), 1.0)
    (reply,) = network.advance(1.0)
    assert (reply.epoch, reply.refusals) == (1, ())


def test_a_lost_stage_loses_the_ring_until_an_epoch_opens() -> None:
    network = Network(2, 1, 64, MODEL, (Lose(1, nth=1),))
    first, second = frames_of(2)
    network.send(first, 0.0)
    assert seqs(network, 0.0) == [(0, False)]
    network.send(second, 0.0)
    assert [(lost.stage, type(lost)) for lost in network.advance(0.0)] == [(1, RingLost)]
    with pytest.raises(RingLost):
        network.send(second, 0.0)
    survivor = network.stages[0]
    held = network.open_epoch(Epoch(1))
    assert (network.stages[0] is survivor, network.replaced) == (True, 1)
    assert [len(lane.tokens) for lane in held.lanes] == [0]
    assert [stage.ledger.valid_rows(LaneId(0)) for stage in network.stages] == [0, 0]
    network.send(replace(first, epoch=Epoch(1)), 0.0)
    assert seqs(network, 0.0) == [(0, False)]


def test_what_all_stages_hold_outlives_an_epoch() -> None:
    """The second frame never reaches the second stage."""
    network = Network(2, 1, 64, MODEL, (Drop(1, nth=1),))
    first, second = frames_of(2)
    network.send(first, 0.0)
    network.send(second, 0.0)
    network.advance(0.0)
    rows = [stage.ledger.valid_rows(LaneId(0)) for stage in network.stages]
    assert rows[0] > rows[1] > 0
    held = network.open_epoch(Epoch(1))
    assert [len(lane.tokens) for lane in held.lanes] == [rows[1]]
    assert [stage.ledger.holding().lanes for stage in network.stages] == [held.lanes] * 2


def test_the_same_seed_gives_the_same_script() -> None:
    scripts = [random_script(seed, 2, 10, count=4) for seed in (1, 1, 2)]
    assert scripts[0] == scripts[1] != scripts[2]
    kinds = {type(fault) for seed in range(50) for fault in random_script(seed, 2, 10)}
    assert kinds == set(ALL_FAULTS)
    assert {type(f) for f in random_script(1, 2, 10, count=20, kinds=(Drop,))} == {Drop}


# The port


async def test_a_lost_ring_says_so_until_an_epoch_opens() -> None:
    hand = await start(2, faults=(Lose(1, nth=0),))
    waiting = asyncio.ensure_future(hand.ring.next_reply())
    await asyncio.sleep(0)
    hand.send_prefill(0, JobId(1), PROMPT, chunk=64)
    with pytest.raises(RingLost, match="stage 1: died"):
        await waiting
    assert not hand.ring.health().ready
    with pytest.raises(RingLost):
        await hand.ring.next_reply()
    with pytest.raises(RingLost):
        hand.ring.submit(hand.frame())
    await hand.open_epoch(Epoch(1))
    assert hand.ring.health().ready
    assert (await hand.turn(0, PROMPT, 3)).tokens == MODEL.oracle(PROMPT, 3)
    await hand.ring.stop()
    with pytest.raises(RingLost, match="stopped"):
        await hand.open_epoch(Epoch(2))
    await hand.ring.start(lambda progress: None)
    await hand.open_epoch(Epoch(1))
    assert (await hand.turn(0, PROMPT, 3)).tokens == MODEL.oracle(PROMPT, 3)


async def test_waiting_ends_when_the_ring_is_stopped() -> None:
    hand = await start()
    waiting = asyncio.ensure_future(hand.ring.next_reply())
    await asyncio.sleep(0)
    await hand.ring.stop()
    with pytest.raises(RingLost, match="stopped"):
        await waiting


async def test_a_cancelled_wait_loses_no_reply() -> None:
    hand = await start()
    waiting = asyncio.ensure_future(hand.ring.next_reply())
    await asyncio.sleep(0)
    frame = hand.send(segments=(hand.prefill(0, JobId(1), 0, (1,)),))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await hand.ring.next_reply()).seq == frame.seq


async def test_a_virtual_clock_makes_a_slow_turn_take_no_time() -> None:
    clock = VirtualClock()
    ring = FakeRing(2, 1, 64, vocab_size=VOCAB, clock=clock, step_s=10.0)
    hand = Hand(ring, await ring.start(lambda progress: None), reply_timeout_s=5.0)
    turn = await clock.drive(hand.turn(0, PROMPT, 3, chunk=64))
    assert turn.tokens == MODEL.oracle(PROMPT, 3)
    assert clock.now() == 60.0


async def test_the_virtual_clock_runs_timers_in_order_and_tells_of_a_deadlock() -> None:
    clock = VirtualClock()
    ran: list[tuple[str, float]] = []
    clock.call_at(2.0, lambda: ran.append(("b", clock.now())))
    clock.call_at(1.0, lambda: ran.append(("a", clock.now())))
    clock.call_at(1.5, lambda: ran.append(("never", clock.now()))).cancel()
    clock.advance(1.2)
    assert (ran, clock.now()) == ([("a", 1.0)], 1.2)
    await clock.run_until_idle()
    assert (ran[1:], clock.now()) == ([("b", 2.0)], 2.0)
    with pytest.raises(BrokenInvariant, match="no timer"):
        await clock.drive(asyncio.Event().wait())


@pytest.mark.parametrize(
    ("sizes", "setting"),
    [
        ((99_999_999, 4, 4096), "stages"),
        ((2, 10**9, 4096), "lanes"),
        ((2, 4, 10**14), "max_rows"),
        ((900, 4, 32_768), "max_rows"),
        ((1000, 60_000, 2), "lanes"),  # lanes take memory beside their rows
        ((0, 4, 64), "stages"),
        ((2, -1, 64), "lanes"),
    ],
)
def test_sizes_that_no_memory_holds_are_refused_before_any_is_taken(
    sizes: tuple[int, int, int], setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*_: object) -> None:
        raise AssertionError("rows were allocated")

    monkeypatch.setattr("fakering.network.FakeStage", allocate)
    for make in (
        lambda: Network(*sizes, MODEL),
        lambda: FakeRing(*sizes, vocab_size=VOCAB),
        lambda: check_sizes(*sizes),
    ):
        with pytest.raises(InvalidSetting) as caught:
            make()
        assert caught.value.setting == setting


def test_many_small_rings_are_counted_together() -> None:
    check_sizes(2, 4, 4096, rings=1)
    with pytest.raises(InvalidSetting, match="too many to pretend"):
        check_sizes(2, 4, 4096, rings=10_000)
