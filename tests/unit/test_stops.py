"""Stop strings over any cut of the text: never leaked in part, never missed, the same streamed or not."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.errors import InvalidValue
from gateway.chat.stops import StopMatcher, StopResult


def _run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.feed(piece).text for piece in pieces)
    last = matcher.flush()
    return text + last.text, last.stop


def _naive(stops: list[str], text: str) -> tuple[str, str | None]:
    """Looks at every beginning of the whole text until one ends with a stop string."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


letters = st.text("ab界é", max_size=12)


@given(
    stops=st.lists(st.text("ab界é", min_size=1, max_size=4), max_size=3),
    pieces=st.lists(letters, max_size=8),
)
@example(stops=["abab"], pieces=["ab", "a", "bab"])
@example(stops=["aab"], pieces=["aaa", "b"])
@example(stops=["ab", "b"], pieces=["aab"])
def test_any_cut_gives_what_the_whole_text_gives(stops: list[str], pieces: list[str]) -> None:
    assert _run(stops, pieces) == _naive(stops, "".join(pieces))


@given(stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), text=letters)
def test_nothing_that_was_sent_belongs_to_a_stop_string(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    sent = ""
    for letter in text:
        sent += matcher.feed(letter).text
        assert _naive(stops, text)[0].startswith(sent)


@pytest.mark.parametrize(
    ("stop", "pieces", "shown"),
    [
        ("beta gamma", ["alpha be", "ta ", "gam", "ma delta"], "alpha "),
        ("\nUser:", ["Hello", "\n", "Us", "er", ": hi"], "Hello"),
        ("\nUser:", ["Hello\nUse", "ful"], "Hello\nUseful"),
        ("終わり👩‍👩‍👧", ["はい終", "わり👩‍", "👩‍👧!"], "はい"),
    ],
)
def test_a_stop_string_over_several_deltas_is_found_and_never_leaks(
    stop: str, pieces: list[str], shown: str
) -> None:
    """Reports SharpAI/SwiftLM#126 and #133, mzau/mlx-knife#68."""
    found = stop if stop in "".join(pieces) else None
    assert _run([stop], pieces) == (shown, found)


def test_text_is_held_only_while_it_may_become_a_stop_string() -> None:
    matcher = StopMatcher(["</s>"])
    assert matcher.feed("a <").text == "a "
    assert matcher.feed("b").text == "<b"
    assert matcher.feed("</").text == ""
    assert matcher.flush().text == "</"


def test_tokens_are_counted_up_to_the_one_that_completed_the_stop_string() -> None:
    matcher = StopMatcher(["stop"])
    results = [matcher.feed(piece) for piece in ("go ", "st", "", "op and", " on")]
    assert [result.tokens for result in results] == [1, 2, 3, 4, 4]
    assert results[3] == StopResult("", "stop", 4)
    assert results[4] == StopResult("", "stop", 4)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidValue, match="stop"):
        StopMatcher(["fine", ""])


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert StopMatcher([]).feed("abc").text == "abc"
