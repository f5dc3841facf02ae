"""What metrics say right after turns of which everything is known, over a real coordinator and a fake ring."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import fields
from typing import TYPE_CHECKING

import pytest

from coordinator.config import SchedulerSettings
from coordinator.counts import RingCounts
from coordinator.errors import InvalidSetting, InvalidValue, ModelNotFound
from coordinator.requests import MissKind
from fakering.faults import Drop, Refuse, Restart
from gateway.observing.metrics.idle import IdleWindow
from gateway.observing.settings import LogFormat, LogLevel, ObserveSettings
from gateway.turns import TextPrompt, TurnDelta, TurnRequest, TurnStarted
from tests.unit.watched_service import Figures, turn, watched

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.unit.watched_service import Watched

PROMPT = "the quick brown fox jumps over the lazy dog"


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to hold")


async def test_tokens_and_times_of_a_turn_are_counted_once() -> None:
    async with watched() as it:
        events = await it.run(turn(PROMPT, tokens=5))
        seen = it.figures()
    assert seen["prompt_tokens_total"] == len(PROMPT)
    assert seen["prompt_tokens_cached_total"] == 0
    assert seen["generation_tokens_total"] == 5
    assert seen["request_success_total", "length"] == 1
    assert seen["request_success_total", "stop"] == 0
    pieces = sum(isinstance(event, TurnDelta) and bool(event.token_ids) for event in events)
    assert seen["time_to_first_token_seconds_count"] == 1
    assert seen["inter_token_latency_seconds_count"] == pieces - 1
    assert seen["request_time_per_output_token_seconds_count"] == 1
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert seen[f"{name}_seconds_count"] == 1
    assert seen["request_prompt_tokens_sum"] == len(PROMPT)
    assert seen["request_prefill_kv_computed_tokens_sum"] == len(PROMPT)
    assert seen["request_generation_tokens_sum"] == 5
    first, whole = seen["time_to_first_token_seconds_sum"], seen["e2e_request_latency_seconds_sum"]
    assert 0 < first <= whole


async def test_a_follow_up_turn_counts_what_it_reused() -> None:
    async with watched() as it:
        first = await it.run(turn(PROMPT, session="s"))
        said = "".join(event.text for event in first if isinstance(event, TurnDelta))
        again = await it.run(turn(PROMPT + said + " and then?", session="s"))
        seen = it.figures()
    assert isinstance(again[0], TurnStarted)
    cached = again[0].cached_prefix
    assert cached >= len(PROMPT)
    assert seen["prompt_tokens_cached_total"] == cached
    assert seen["prefix_cache_hits_total"] == cached
    assert seen["prefix_cache_queries_total"] == seen["prompt_tokens_total"]
    assert seen["prefix_miss_total", "new_session"] == 1
    assert seen["prefix_miss_total", "diverged"] == 0
    assert seen["sessions"] == 1


async def test_a_miss_is_counted_by_its_reason_and_no_other() -> None:
    async with watched() as it:
        await it.run(turn(PROMPT, session="s"))
        await it.run(turn("something else altogether", session="s"))
        seen = it.figures()
    found = {kind: seen["prefix_miss_total", str(kind)] for kind in MissKind}
    assert {kind for kind, turns in found.items() if turns} == {
        MissKind.NEW_SESSION,
        MissKind.DIVERGED,
    }


async def test_rows_from_host_memory_are_hits_of_their_own() -> None:
    long = PROMPT * 4
    async with watched(host_rows=2000) as it:
        await it.run(turn(long))
        for other in range(3):  # their rows take both lanes
            await it.run(turn(f"{other} is another prompt " * 12))
        await it.run(turn(long))
        seen = it.figures()
        restored = it.router.counts().restored_rows
    assert restored > 0
    assert seen["external_prefix_cache_hits_total"] == restored
    hits = seen["prefix_cache_hits_total"] + restored
    assert hits == seen["prompt_tokens_cached_total"]
    assert seen["host_store_rows"] > 0
    assert seen["host_store_room_rows"] == 2000


async def test_a_ring_without_a_host_store_says_nothing_of_one() -> None:
    async with watched() as it:
        await it.run(turn(PROMPT))
        names = it.figures().families.keys()
    assert not [name for name in names if "host_store" in name or "external" in name]


async def test_drafts_and_what_was_right_of_them_are_counted() -> None:
    async with watched() as it:
        events = await it.run(turn("ab" * 60, tokens=40, draft=True))
        seen = it.figures()
    timings = events[-1].timings  # type: ignore[union-attr]
    assert timings.drafted > 0
    assert seen["spec_decode_num_draft_tokens_total"] == timings.drafted
    assert seen["spec_decode_num_accepted_tokens_total"] == timings.accepted
    assert 1 <= seen["spec_decode_num_drafts_total"] <= timings.drafted


async def test_a_client_that_leaves_is_an_abort_and_no_error() -> None:
    async with watched() as it:
        async with aclosing(it.service.generate(turn(PROMPT, tokens=400))) as events:
            async for event in events:
                if isinstance(event, TurnDelta):
                    break
        seen = it.figures()
    assert seen["request_success_total", "abort"] == 1
    assert seen["e2e_request_latency_seconds_count"] == 0, "only whole turns have a length"
    assert "ringserve:request_errors" in seen.families
    assert not seen.families["ringserve:request_errors"].samples


async def test_errors_are_counted_by_code_and_never_by_their_text() -> None:
    async with watched() as it:
        for model in ("one", "two"):
            with pytest.raises(ModelNotFound):
                await it.run(TurnRequest(TextPrompt("x"), model=model))
        with pytest.raises(InvalidValue):
            await it.run(turn("x", tokens=0))
        seen = it.figures()
    assert seen["request_errors_total", "model_not_found"] == 2
    assert seen["request_errors_total", "invalid_value"] == 1
    assert all(seen["request_success_total", end] == 0 for end in ("stop", "length", "abort"))


async def test_lanes_and_frames_are_as_they_are_while_a_turn_runs() -> None:
    async with watched() as it:
        async with aclosing(it.service.generate(turn(PROMPT, tokens=400))) as events:
            await anext(events)
            await anext(events)
            seen = it.figures()
        await until(lambda: it.router.rings()[0].running_jobs == 0)
        after = it.figures()
    assert seen["num_requests_running"] == 1
    assert seen["num_requests_waiting"] == 0
    assert seen["kv_cache_usage_perc"] == 0.5
    assert seen["lane_state", "decode"] == 1
    assert seen["lane_state", "empty"] == 1
    assert seen["frames_in_flight"] >= 1
    assert after["kv_cache_usage_perc"] == 0
    assert after["lane_state", "resting"] == 1
    assert after["lane_rows"] >= len(PROMPT)


async def test_the_state_of_a_ring_is_one_of_five() -> None:
    async with watched() as it:
        ready = it.figures()
        await it.rings.stop()
        down = it.figures()
    states = ("ready", "loading", "recovering", "draining", "down")
    assert [ready["ring_state", state] for state in states] == [1, 0, 0, 0, 0]
    assert [down["ring_state", state] for state in states] == [0, 0, 0, 0, 1]


async def test_stages_are_timed_by_their_replies() -> None:
    async with watched() as it:
        await it.run(turn(PROMPT, tokens=5))
        frames = it.router.counts().frames
        seen, later = it.figures(), it.figures()
    for stage in ("0", "1"):
        steps = seen["stage_step_seconds_count", "ring-0", stage]
        assert 5 <= steps <= frames
        assert seen["stage_queue_seconds_total", "ring-0", stage] >= 0
        assert 0 <= later["stage_idle_ratio", "ring-0", stage] <= 1


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (Refuse(stage=1, nth=3), None),
        (Restart(stage=1, nth=3), None),
        (Drop(leg=1, nth=3), "refused"),
        (Drop(leg=2, nth=3), "bad_reply"),
    ],
)
async def test_refusals_and_epochs_are_counted_with_how_long_they_cost(
    fault: object, cause: str | None
) -> None:
    async with watched(faults=(fault,)) as it:
        events = await it.run(turn(PROMPT * 6, tokens=20))
        seen = it.figures()
    assert sum(len(e.token_ids) for e in events if isinstance(e, TurnDelta)) == 20
    refusals = sum(s.value for s in seen.families["ringserve:refusals"].samples if "_total" in s[0])
    assert bool(refusals) == (cause != "bad_reply")
    assert seen["restore_seconds_count"] == (cause is not None)
    if cause is not None:
        assert seen["epochs_total", cause] == 1
        assert seen["restore_seconds_sum"] > 0


async def test_an_overdue_reply_is_a_cause_of_its_own() -> None:
    settings = SchedulerSettings(reply_timeout_s=0.2)
    async with watched(faults=(Drop(leg=1, nth=0),), settings=settings) as it:
        await it.run(turn("short", tokens=1))
        seen = it.figures()
    assert seen["epochs_total", "overdue"] == 1
    assert seen["restore_seconds_sum"] >= 0


async def test_counters_only_rise_while_rings_come_and_go() -> None:
    async with watched(rings=2) as it:
        scrapes = [it.figures().counted()]

        async def turns(mark: str) -> None:
            await asyncio.gather(
                *(it.run(turn(f"{mark}{n} " + PROMPT, 6, draft=True)) for n in range(4))
            )
            scrapes.append(it.figures().counted())

        await turns("a")
        assert all(ring.counts.frames for ring in it.router.rings()), "both rings worked"
        it.rings.drain("ring-0")
        scrapes.append(it.figures().counted())
        await until(lambda: len(it.router.rings()) == 1)
        scrapes.append(it.figures().counted())
        await turns("b")
        await it.rings.add()
        await turns("c")
    for before, after in zip(scrapes, scrapes[1:], strict=False):
        assert before.keys() <= after.keys(), "no series goes"
        fell = [each for each, value in before.items() if after[each] < value]
        assert fell == []
    frames = "ringserve:frames_total", (("model_name", "fake"),)
    assert scrapes[0][frames] < scrapes[1][frames] == scrapes[3][frames] < scrapes[4][frames]


def test_every_count_of_two_rings_is_added_up() -> None:
    one = RingCounts(**{each.name: 1 for each in fields(RingCounts) if each.type == "int"})
    misses = ((MissKind.EVICTED, 2),)
    both = RingCounts(stage_busy_s=(1.0, 2.0), misses=misses).plus(one).plus(one)
    assert both.stage_busy_s == (1.0, 2.0)
    assert both.misses == misses
    rest = {each.name for each in fields(RingCounts)} - {"stage_busy_s", "misses"}
    assert {getattr(both, name) for name in rest} == {2}
    twice = both.plus(both)
    assert (twice.stage_busy_s, twice.misses) == ((2.0, 4.0), ((MissKind.EVICTED, 4),))


def test_idle_is_the_share_of_the_last_minute_whoever_looks_how_often() -> None:
    window = IdleWindow(0.0, (0.0,))
    assert window.ratios(0.0, (0.0,)) == ()
    assert window.ratios(10.0, (5.0,)) == (0.5,)
    assert window.ratios(10.0, (5.0,)) == (0.5,), "another one that looks"
    assert window.ratios(70.0, (5.0,)) == (1.0,), "what was busy was more than a minute ago"
    assert window.ratios(80.0, (95.0,)) == (0.0,), "a frame's time is booked at its end"


async def test_two_services_of_one_process_count_for_themselves() -> None:
    async with watched() as one, watched(prefix="vllm:") as other:
        await one.run(turn(PROMPT))
        text = other.metrics.text("")[0].decode()
    assert 'vllm:prompt_tokens_total{model_name="fake"} 0.0' in text
    assert "ringserve:" not in text


async def test_an_event_costs_its_observer_microseconds() -> None:
    async with watched() as it:
        events = await it.run(turn(PROMPT, tokens=200))
        best = min(_seconds_an_event(it, events) for _ in range(5))
    assert best < 50e-6, f"{best * 1e6:.1f} us"


def _seconds_an_event(it: Watched, events: list[object]) -> float:
    began = time.perf_counter()
    watch = it.metrics.turns.opened(turn(PROMPT), 0.0)
    for at, event in enumerate(events):
        watch.told(event, float(at))  # type: ignore[arg-type]
    watch.ended(None, float(len(events)))
    return (time.perf_counter() - began) / len(events)


@pytest.mark.parametrize("prefix", ["", "1x:", "a-b:", "a b", "x{"])
def test_a_prefix_that_no_metric_may_have_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidSetting):
        ObserveSettings(metrics_prefix=prefix)


def test_json_logs_tell_of_turns_unless_they_are_told_not_to() -> None:
    assert ObserveSettings().level is LogLevel.WARNING
    assert ObserveSettings(log_format=LogFormat.JSON).level is LogLevel.INFO
    quiet = ObserveSettings(log_format=LogFormat.JSON, log_level=LogLevel.ERROR)
    assert quiet.level is LogLevel.ERROR


def test_a_scrape_is_read_by_labels() -> None:
    assert Figures('ringserve:a_total{b="c"} 3\n')["a_total", "c"] == 3
