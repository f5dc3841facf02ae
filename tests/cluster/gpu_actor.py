"""A stage's actor that was given a GPU where there is none: it loads on the CPU, and tells what it would have used."""

from __future__ import annotations

import os
from dataclasses import replace

import stage.actor
from stage.actor import LoadFailure, StageActor
from stage.build import LoadedSlice, Progress, load_stage
from stage.config import RingConfig


class StageActorWithGpu(StageActor):
    def load(self, index: int, stages_here: int) -> LoadFailure | None:
        stage.actor.load_stage = _load_stage
        return super().load(index, stages_here)


def _load_stage(
    config: RingConfig, index: int, device: str, note: Progress, stages_here: int = 1
) -> LoadedSlice:
    loaded = load_stage(replace(config, device="cpu"), index, "cpu", note, stages_here)
    return replace(loaded, device=f"{device} of {os.environ.get('CUDA_VISIBLE_DEVICES')}")
