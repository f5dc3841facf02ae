"""A detached stage outlives its gateway's silence, but not the raylet of its node, by which alone it is reached."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from stage.processes import ProcessHandle

_FENCE_S = 0.1
_STAGE = f"""
import os, threading
from pathlib import Path
from stage.actor import StageActor
from stage.config import RingConfig

actor = StageActor(RingConfig(Path(), "m", ((0, 1),), fence_s={_FENCE_S}, detached=True))
actor.probe()
print(os.getpid(), flush=True)
threading.Event().wait()
"""
_ENDS_S = 60.0  # on a crowded machine


def test_a_detached_stage_ends_itself_with_its_raylet_and_not_before() -> None:
    # The shell is to it what a raylet is: its parent.
    raylet = subprocess.Popen(
        ["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", _STAGE],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    with raylet:
        assert raylet.stdout is not None
        stage = ProcessHandle(int(raylet.stdout.readline()))
        try:
            assert not stage.await_exit(5 * _FENCE_S)
            raylet.kill()
            assert stage.await_exit(_ENDS_S)
        finally:
            stage.kill()
            stage.close()
