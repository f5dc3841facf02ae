"""What Ray would print in the middle of our log."""

from __future__ import annotations

import logging

import pytest
import ray._private.worker

from stage.ray_ring.news import log_what_ray_says

_DEATH = "A worker died or was killed while executing a task by an unexpected system error. " * 9


def test_what_ray_says_is_a_line_of_our_log_and_none_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO)
    rays = ray._private.worker
    monkeypatch.setattr(rays, "print_to_stdstream", rays.print_to_stdstream)
    log_what_ray_says()
    for text in (_DEATH, "2 workers were killed\n due to memory pressure"):
        rays.print_to_stdstream({"lines": [text], "pid": "raylet", "is_err": False}, False)
    death, pressure = caplog.records
    assert death.levelno == logging.INFO, "the ring's own line says it"
    assert len(death.getMessage()) < 400
    assert (pressure.levelno, pressure.getMessage()) == (
        logging.WARNING,
        "ray says: 2 workers were killed due to memory pressure",
    )
    assert capsys.readouterr() == ("", "")
