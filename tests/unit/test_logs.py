"""Log lines: one a turn, valid JSON whatever comes, and never what was said."""

from __future__ import annotations

import json
import logging
import warnings
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING

import pytest

from coordinator.errors import ModelNotFound
from coordinator.requests import SessionId
from gateway.observing.logs import formatter, log_to_stderr
from gateway.observing.settings import LogFormat, ObserveSettings
from gateway.observing.turn_log import TurnLine, TurnLog
from gateway.turns import TextPrompt, TurnDelta, TurnRequest
from tests.unit.watched_service import GREEDY, turn, watched

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = "the launch code is 0000"


@pytest.fixture
def turns(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, logger="gateway.observing.turn_log")
    return caplog


def digest(session: SessionId) -> str:
    return f"d{len(session)}"


def lines(caplog: pytest.LogCaptureFixture) -> list[TurnLine]:
    return [
        record.fields for record in caplog.records if record.name == "gateway.observing.turn_log"
    ]


async def test_a_turn_that_has_ended_is_one_line(turns: pytest.LogCaptureFixture) -> None:
    async with watched(also=(TurnLog(digest),)) as it:
        asked = turn(SECRET, tokens=6, session="somebody")
        await it.run(asked)
        await it.run(
            TurnRequest(TextPrompt(SECRET), request_id="r-7", sampling=GREEDY, max_tokens=2)
        )
    first, second = lines(turns)
    assert (first.session, first.request_id, first.outcome) == ("d8", "", "length")
    assert (first.prompt_tokens, first.cached_tokens, first.generated_tokens) == (len(SECRET), 0, 6)
    assert (first.ring, first.miss) == ("ring-0", "new_session")
    assert first.ttft_s is not None
    assert first.decode_s is not None
    assert 0 < first.ttft_s <= first.total_s
    assert (second.session, second.request_id, second.miss) == (None, "r-7", None)
    assert second.cached_tokens == len(SECRET), "an exact resend computes nothing"


async def test_how_a_turn_ended_early_is_told_without_its_words(
    turns: pytest.LogCaptureFixture,
) -> None:
    async with watched(also=(TurnLog(digest),)) as it:
        with pytest.raises(ModelNotFound):
            await it.run(TurnRequest(TextPrompt(SECRET), model=SECRET))
        async with aclosing(it.service.generate(turn(SECRET, 400))) as events:
            async for event in events:
                if isinstance(event, TurnDelta):
                    break
    refused, left = lines(turns)
    assert (refused.outcome, refused.ring, refused.queue_s) == ("model_not_found", None, None)
    assert (left.outcome, left.ring, left.queue_s) == ("abort", "ring-0", None)
    for kind in LogFormat:
        shown = "\n".join(formatter(kind).format(record) for record in turns.records)
        assert SECRET not in shown
        assert "launch" not in shown


def record(message: str, *args: object, **more: object) -> logging.LogRecord:
    made = logging.LogRecord("a.b", logging.WARNING, __file__, 1, message, args, None)
    for name, value in more.items():
        setattr(made, name, value)
    return made


HARD = [
    "two\nlines",
    'a "quote" \\ and {brace}',
    "half a pair \ud83d",
    "\x00\x1b[31m",
    "zwölf 十二",
]


@pytest.mark.parametrize("message", HARD)
def test_json_is_one_valid_line_whatever_is_in_it(message: str) -> None:
    text = formatter(LogFormat.JSON).format(record("said %s", message))
    assert "\n" not in text
    assert text.isascii()
    told = json.loads(text)
    assert told["message"] == f"said {message}"
    assert (told["level"], told["logger"]) == ("warning", "a.b")
    assert told["time"].endswith("+00:00")


def test_an_exception_stays_in_its_line() -> None:
    try:
        raise ValueError("bad\nvalue")
    except ValueError as error:
        failed = record("failed", exc_info=(type(error), error, error.__traceback__))
    told = json.loads(formatter(LogFormat.JSON).format(failed))
    assert "ValueError: bad\nvalue" in told["exception"]
    assert "ValueError: bad" in formatter(LogFormat.TEXT).format(failed)


def test_fields_are_members_in_json_and_pairs_in_text() -> None:
    line = TurnLine("r", "s", "stop", total_s=1.5, generated_tokens=3)
    told = json.loads(formatter(LogFormat.JSON).format(record("turn", fields=line)))
    assert (told["request_id"], told["total_s"], told["ring"]) == ("r", 1.5, None)
    text = formatter(LogFormat.TEXT).format(record("turn", fields=line))
    assert text.endswith("turn request_id=r session=s outcome=stop total_s=1.5 generated_tokens=3")
    assert "None" not in text


@contextmanager
def bare_root() -> Iterator[None]:
    """A process whose logging nobody has set up."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    others = {name: logging.getLogger(name).level for name in ("uvicorn", "uvicorn.error", "ray")}
    root.handlers[:] = []
    logging.captureWarnings(False)  # a command that ran in this process may have begun it
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers[:] = handlers
        root.setLevel(level)
        for name, each in others.items():
            logging.getLogger(name).setLevel(each)


def test_stderr_gets_our_news_and_others_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    with bare_root():
        log_to_stderr(ObserveSettings(log_format=LogFormat.JSON))
        logging.getLogger("gateway.rings").info("added ring=%s", "ring-1")
        logging.getLogger("gateway.rings").debug("a frame")
        logging.getLogger("uvicorn.error").info("Started server process")
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
        with warnings.catch_warnings(action="always"):
            warnings.warn("careful", stacklevel=1)
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    ours, others, warned = [each["message"] for each in told]
    assert (ours, others) == ("added ring=ring-1", "Invalid HTTP request received.")
    assert "careful" in warned
