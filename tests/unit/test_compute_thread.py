"""A stage computes in one thread, whichever thread asks: working memory is kept by thread, and would be there twice."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from stage import actor as actor_module
from stage.actor import StageActor
from stage.build import LoadedSlice
from stage.compute_thread import ComputeThread
from stage.config import RingConfig
from stage.runner import LoopEnd
from stage.stage import Stage


def test_calls_of_many_threads_are_carried_out_by_one_and_one_by_one() -> None:
    compute, at_work, most = ComputeThread(), [0], [0]

    def work(number: int) -> tuple[int, int]:
        at_work[0] += 1
        most[0] = max(most[0], at_work[0])
        at_work[0] -= 1
        return number, threading.get_ident()

    with ThreadPoolExecutor(8) as threads:
        done = list(threads.map(lambda number: compute.call(lambda: work(number)), range(200)))
    assert [number for number, _ in done] == list(range(200))
    assert len({thread for _, thread in done}) == most[0] == 1
    assert done[0][1] != threading.get_ident()


def test_what_a_call_raises_reaches_its_caller_and_ends_nothing() -> None:
    compute = ComputeThread()
    with pytest.raises(ZeroDivisionError):
        compute.call(lambda: 1 // 0)
    assert compute.call(lambda: 2) == 2


def test_a_stage_loads_and_runs_all_its_turns_in_the_same_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []

    def load(*_: object) -> LoadedSlice:
        seen.append(threading.get_ident())
        return cast("LoadedSlice", object())

    def run(*_: object) -> LoopEnd:
        seen.append(threading.get_ident())
        return LoopEnd()

    monkeypatch.setattr(actor_module, "load_stage", load)
    monkeypatch.setattr(actor_module.News, "listen", lambda _: None)
    actor = StageActor(RingConfig(Path(), "m", ((0, 1),), detached=True))
    monkeypatch.setattr(actor, "_stage", cast("Stage", object()))
    monkeypatch.setattr(actor._runner, "run", run)
    monkeypatch.setattr(actor, "_give_up", lambda: None)
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        assert first.submit(actor.load, 0, 1).result() is None
        for threads, turn in ((first, 1), (second, 2)):
            assert threads.submit(actor.run, turn).result() == LoopEnd()
    assert len(seen) == 3
    assert len(set(seen)) == 1
