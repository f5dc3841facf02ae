"""What a stage's process warns of reaches its gateway's log once, and its own."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from stage.news import _KEPT, Line, News


@pytest.fixture
def news() -> Iterator[News]:
    news = News()
    news.listen()
    yield news
    logging.getLogger("stage").removeHandler(news)


def test_warnings_of_stages_are_taken_once(news: News, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("stage.kv.disk").warning("stopped writing folder=%s", "/rows")
    logging.getLogger("stage.kv.disk").info("nothing to worry about")
    logging.getLogger("torch").warning("somebody else's")
    assert news.take() == (Line("stage.kv.disk", logging.WARNING, "stopped writing folder=/rows"),)
    assert news.take() == ()
    assert "stopped writing folder=/rows" in caplog.text


def test_one_cause_many_times_over_costs_no_memory(news: News) -> None:
    for number in range(3 * _KEPT):
        logging.getLogger("stage.x").error("%d", number)
    assert [line.text for line in news.take()] == [str(n) for n in range(2 * _KEPT, 3 * _KEPT)]


def test_a_line_is_told_under_its_own_name_and_says_whose_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Line("stage.kv.disk", logging.WARNING, "writing again folder=/rows").tell(1)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("stage.kv.disk", logging.WARNING)
    assert record.getMessage() == "writing again folder=/rows stage=1"
