"""What the bench reckons with: the reuse reference, percentiles, occupancy, and texts that do not change."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from coordinator.errors import SetupError
from gateway.bench.endpoints import Answered
from gateway.bench.figures import median, p95, ratio
from gateway.bench.pipeline import Book
from gateway.bench.plots import Phase, TtftCurves, check_plotting, plot_multiturn, plot_occupancy
from gateway.bench.prompts import TWENTY, prose, quoting_prompt
from gateway.bench.request_log import reusable_tokens
from gateway.bench.watch import Sample, busy_shares
from gateway.bench.workload import head, unseen, user_turn


def turn(
    prompt: str, answer: str, *, started_s: float, last_s: float, ring: str = "ring-0"
) -> Answered:
    """A turn of one-letter tokens."""
    return Answered(
        prompt_tokens=len(prompt),
        cached_tokens=0,
        n_tokens=len(answer),
        text=answer,
        sent_s=started_s,
        started_s=started_s,
        first_s=last_s,
        last_s=last_s,
        ring=ring,
        prompt=tuple(map(ord, prompt)),
        tokens=tuple(map(ord, answer)),
    )


def test_a_turn_could_reuse_what_its_own_ring_had_seen() -> None:
    turns = [
        turn("head one", "xyz", started_s=1, last_s=2),
        turn("head onexyz two", "ab", started_s=3, last_s=4),  # z was sampled last: no row of it
        turn("head three", "cd", started_s=1.5, last_s=2.5),  # a prompt counts from its beginning
        turn("head one", "ef", started_s=5, last_s=6, ring="ring-1"),
        turn("head one", "xyz", started_s=7, last_s=8),  # the whole prompt is known: all but one
    ]
    assert reusable_tokens(turns) == [0, 10, 5, 0, 7]


def test_an_answer_that_has_not_ended_cannot_be_reused_but_its_prompt_can() -> None:
    running = turn("abc", "defg", started_s=1, last_s=9)
    assert reusable_tokens([running, turn("abcdefgh", "x", started_s=5, last_s=6)]) == [0, 3]


def test_percentiles_are_of_what_was_measured() -> None:
    values = [float(n) for n in range(1, 21)]
    assert (median(values), p95(values), p95([3.0]), p95([])) == (10.5, 19.0, 3.0, None)
    assert (median([1.0, None, 3.0]), median([None])) == (2.0, None)
    assert (ratio(1.0, 3.0), ratio(1.0, 0.0), ratio(None, 1.0)) == (0.333, None, None)


def test_occupancy_is_read_between_samples() -> None:
    samples = [
        Sample(0.0, (0.0, 0.0), 0, 0, ("a", "b")),
        Sample(2.0, (2.0, 1.0), 0, 0, ("a", "b")),
        Sample(4.0, (2.0, 2.0), 0, 0, ("a", "b")),
    ]
    assert busy_shares(samples, 0.0, 2.0) == (1.0, 0.5)
    assert busy_shares(samples, 1.0, 3.0) == (0.5, 0.5)
    assert busy_shares(samples, 3.0, 3.0) == busy_shares([], 0.0, 1.0) == ()


def test_every_token_that_differs_is_counted_once() -> None:
    book = Book()
    book.check((1,), (5, 6, 7))
    book.check((1,), (5, 6))
    assert book.wrong_tokens == 0
    book.check((1,), (5, 9, 9, 4))
    book.check((2,), (8,))
    assert book.wrong_tokens == 2


def test_the_texts_are_the_same_in_every_run_and_differ_from_one_another() -> None:
    assert user_turn(3, 2) == user_turn(3, 2)
    assert len({user_turn(s, t).content for s in range(8) for t in range(6)}) == 48
    assert len(set(TWENTY)) == 20
    assert (prose(1, 5), prose(1, 5) == prose(2, 5)) == (prose(1, 5), False)
    assert quoting_prompt().count("def format_day") == 2


def test_an_unseen_prompt_has_the_same_words_and_another_beginning() -> None:
    messages = (head(), user_turn(0, 1))
    control = unseen(messages, 0)
    for before, after in zip(messages, control, strict=True):
        assert before.content is not None
        assert after.content is not None
        assert sorted(before.content.split(" ")) == sorted(after.content.split(" "))
    assert (control[0].content or "")[:20] != (messages[0].content or "")[:20]


def test_pictures_are_drawn_and_a_path_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    curves = TtftCurves([900.0, 80.0], [950.0, 90.0], [850.0, 70.0], [850.0, 900.0], 910.0)
    samples = [Sample(float(n), (n * 0.9, n * 0.7), 0, 0, ("a", "b")) for n in range(5)]
    phases = [Phase("decode", 0.0, 2.0), Phase("prefill", 2.0, 4.0)]
    plot_multiturn(tmp_path / "ttft.png", curves, samples, phases)
    plot_occupancy(tmp_path / "busy.png", samples, phases)
    for name in ("ttft.png", "busy.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SetupError, match="cannot be written"):
        plot_occupancy(tmp_path / "nowhere" / "busy.png", samples, phases)


def test_a_missing_extra_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SetupError, match=r"pip install 'ringserve\[bench\]'"):
        check_plotting()
