"""Makes a stage ready to take frames: loads its slice, probes its numerics, warms it up, and reports what it is.

Decides what has to be true before a stage may serve, and how the stages' reports become one RingInfo. May touch the
scratch lane only. It knows no transport: threads and actors call it alike.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from coordinator.errors import ModelDoesNotFit, ModelUnusable, NumericsNotExact
from coordinator.frames import PROTOCOL_VERSION, NodeId
from coordinator.held import Holding, held_by_all
from coordinator.nodes import Node
from coordinator.ring import RingInfo, StageProgress
from stage.attention import Numerics, RowSegment
from stage.config import RingConfig
from stage.cores import Cores, cores_of
from stage.fingerprint import fingerprint
from stage.kv.outbox import Outbox
from stage.kv.states import STATE_ROWS
from stage.model.damage import in_one_line, unusable
from stage.model.slice import ModelSlice, RowBatch, SliceOutput, load_slice
from stage.numerics import probe_cores, probe_numerics
from stage.stage import Stage
from stage.stores import host_budget, open_stores

log = logging.getLogger(__name__)

Progress = Callable[[StageProgress], None]

# A decode step and a prefill chunk: the two shapes of call that a job begins with.
_WARM_UP_ROWS = (1, 64)


@dataclass(frozen=True, slots=True)
class StageReport:
    """What a loaded stage says of itself."""

    protocol_version: int
    fingerprint: str
    vocab_size: int
    layers: int  # of the whole model
    numerics: str
    exact: bool
    device: str
    lends_cores: bool
    host_bytes: int = 0  # of its host's memory that its store may take
    host_rows: int = 0  # rows that its store has room for
    stored: tuple[Node, ...] = ()  # what lies on its disk from before
    recurrent: bool = False  # some of its layers keep a state
    checkpoints: int = 0  # of which its store has room for so many
    resumable: tuple[NodeId, ...] = ()  # nodes on its disk with the state at their end
    memos: int = 0  # prompts whose last logits it has room for; only the tail has any
    host: str = ""  # where it runs, for people


READY = "ready"  # the last note of a load


@dataclass(frozen=True, slots=True)
class LoadedSlice:
    """A slice that computes, without a store: a spare's, or what becomes a stage next."""

    index: int
    model: ModelSlice
    cores: Cores
    device: str
    numerics: str
    exact: bool


def build_stage(
    config: RingConfig, index: int, device: str, progress: Progress, stages_here: int = 1
) -> tuple[Stage, StageReport]:
    """Raises SetupError. `device` is torch's name for it; `stages_here` is how many stages share its host."""
    loaded = load_stage(config, index, device, progress, stages_here)
    return open_stage(config, loaded, stages_here)


def load_stage(
    config: RingConfig, index: int, device: str, progress: Progress, stages_here: int
) -> LoadedSlice:
    """What takes long. Touches neither the disk nor the memory that chain nodes lie in. Raises SetupError."""
    cores = cores_of(config, device, stages_here)
    cores.use()
    note = _Notes(index, progress)
    with _memory_for(config, index):
        model = _load(config, index, device, note)
        what = f"{_layers(config, index)} cannot be called"
        with unusable(what, passing=(torch.OutOfMemoryError,)):
            note.say("warming up")
            _warm_up(config, index, model, note.step)
            if config.numerics != "fast":
                note.say("probing numerics")
            exact, words = _probe(config, index, model, note.step)
            if not (exact and probe_cores(model, cores, note.step)):
                cores = Cores(cores.shared, cores.shared)
    note.say(READY)
    log.info("ready stage=%d layers=%d-%d numerics=%s", index, *config.splits[index], words)
    return LoadedSlice(index, model, cores, device, words, exact)


def open_stage(
    config: RingConfig, loaded: LoadedSlice, stages_here: int, outbox: Outbox | None = None
) -> tuple[Stage, StageReport]:
    """Makes a stage of a slice, with a store of config.kv_host_bytes. Raises SetupError. `outbox`: is told what the
    store keeps.
    """
    model, cores = loaded.model, loaded.cores
    identity = fingerprint(config.model_dir)
    budget = host_budget(config, stages_here)
    store, checkpoints, memos = open_stores(config, model, identity, budget, outbox)
    report = StageReport(
        protocol_version=PROTOCOL_VERSION,
        fingerprint=identity,
        vocab_size=model.decoder.vocab_size,
        layers=model.decoder.n_layers,
        numerics=loaded.numerics,
        exact=loaded.exact,
        device=loaded.device,
        lends_cores=cores.alone > cores.shared,
        host_bytes=budget,
        host_rows=store.capacity_rows,
        stored=store.on_disk(),
        recurrent=model.states.layers > 0,
        checkpoints=checkpoints.capacity,
        resumable=checkpoints.on_disk(),
        memos=memos.slots,
        host=socket.gethostname(),
    )
    return Stage(loaded.index, model, cores, store, checkpoints, memos), report


def check_belongs(info: RingInfo, before: StageReport, report: StageReport) -> None:
    """Whether a stage may take the place of one that the ring lost: nothing that RingInfo promises may get less.
    Raises ModelUnusable.
    """

    def identity(of: StageReport) -> tuple[object, ...]:
        return of.protocol_version, of.fingerprint, of.vocab_size, of.layers, of.recurrent

    if identity(report) != identity(before):
        raise ModelUnusable("the new stage reads another model or runs another version")
    if info.exact and not report.exact:
        raise ModelUnusable(f"the new stage is not as exact as the ring: {report.numerics}")
    # Less room for chain nodes only costs nodes, of which the coordinator hears; slots it counts on.
    if report.memos < before.memos:
        raise ModelUnusable(f"the new stage has room for {report.memos} of {before.memos} memos")


@contextmanager
def _memory_for(config: RingConfig, index: int) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ModelDoesNotFit(f"{_layers(config, index)}: {in_one_line(error)}") from error


def _layers(config: RingConfig, index: int) -> str:
    first, last = config.splits[index]
    return f"{config.model_dir.name}, layers {first} to {last - 1}"


def _load(config: RingConfig, index: int, device: str, note: _Notes) -> ModelSlice:
    first, last = config.splits[index]
    return load_slice(
        config.model_dir,
        first,
        last,
        lanes=config.lanes,
        max_rows=config.max_rows,
        dtype=getattr(torch, config.dtype),
        device=torch.device(device),
        numerics=Numerics.FAST if config.numerics == "fast" else Numerics.EXACT,
        progress=note.loading,
    )


def ring_info(config: RingConfig, reports: Sequence[StageReport]) -> RingInfo:
    """Raises ModelUnusable when the stages do not belong together."""
    _check_alike(config, reports)
    head = reports[0]
    if config.splits[-1][1] != head.layers:
        raise ModelUnusable(f"the stages hold {config.splits[-1][1]} of {head.layers} layers")
    recurrent = any(report.recurrent for report in reports)
    held = held_by_all([_on_disk(report) for report in reports])
    # The stage with the worst verdict speaks for the ring.
    numerics = min(reports, key=lambda report: report.exact).numerics
    return RingInfo(
        protocol_version=head.protocol_version,
        model=config.model,
        model_fingerprint=head.fingerprint,
        stages=config.stages,
        lanes=config.lanes,
        max_rows=config.max_rows,
        vocab_size=head.vocab_size,
        numerics=numerics,
        exact=all(report.exact for report in reports),
        devices=tuple(report.device for report in reports),
        host_rows=min(report.host_rows for report in reports),
        held=held if recurrent else replace(held, checkpoints=frozenset()),
        state_rows=STATE_ROWS if recurrent else 0,
        checkpoints=min(report.checkpoints for report in reports) if recurrent else 0,
        memos=reports[-1].memos,
        lends_cores=any(report.lends_cores for report in reports),
    )


def _on_disk(report: StageReport) -> Holding:
    """A stage without recurrent layers can go on from anywhere."""
    ids = report.resumable if report.recurrent else (node.id for node in report.stored)
    return Holding(nodes=report.stored, checkpoints=frozenset(ids))


def _check_alike(config: RingConfig, reports: Sequence[StageReport]) -> None:
    """Raises ModelUnusable, which names the first stage that differs from stage 0."""
    head = reports[0]
    for index, report in enumerate(reports):
        here = f"stage {index} on {report.host}"
        if report.protocol_version != head.protocol_version:
            theirs, ours = report.protocol_version, head.protocol_version
            raise ModelUnusable(f"{here} speaks protocol {theirs}, stage 0 on {head.host} {ours}")
        if report.fingerprint != head.fingerprint:
            raise ModelUnusable(
                f"{here} reads another model in {config.model_dir} than stage 0 on {head.host}: "
                "copy the same folder to every machine"
            )


class _Notes:
    """Turns what the loader counts into progress of this stage, ten times a second at most."""

    def __init__(self, index: int, progress: Progress) -> None:
        self._last = StageProgress(index, 0, 0)
        self._progress = progress
        self._told_at = 0.0

    def loading(self, done: int, total: int) -> None:
        self._last = StageProgress(self._last.stage, done, total, "loading")
        now = time.monotonic()
        if done == total or now - self._told_at >= 0.1:
            self._told_at = now
            self._progress(self._last)

    def say(self, note: str) -> None:
        self._last = replace(self._last, note=note, steps=0)
        self._progress(self._last)

    def step(self) -> None:
        self._last = replace(self._last, steps=self._last.steps + 1)
        self._progress(self._last)


def _probe(
    config: RingConfig, index: int, model: ModelSlice, step: Callable[[], None]
) -> tuple[bool, str]:
    if config.numerics == "fast":
        return False, "fast (not probed)"
    report = probe_numerics(model, step)
    if not math.isfinite(report.max_difference) and not model.decoder.length_dependent_rope:
        raise _not_finite(config, index)
    if config.numerics == "exact" and not report.exact:
        raise NumericsNotExact(f"stage {index} on {model.decoder.device}: {report}")
    return report.exact, str(report)


def _warm_up(config: RingConfig, index: int, model: ModelSlice, step: Callable[[], None]) -> None:
    """The first calls, which also tell damaged weights: a NaN anywhere in a layer reaches every row behind it."""
    lane = model.rows.scratch_lane
    try:
        for rows in _WARM_UP_ROWS:
            batch = RowBatch((0,) * rows, (RowSegment(lane, 0, rows),), asked=(rows - 1,))
            hidden = None
            if not model.decoder.is_head:
                hidden = torch.ones((rows, model.decoder.hidden_size), dtype=model.decoder.dtype)
            if not _is_finite(model.forward(batch, hidden)):
                raise _not_finite(config, index)
            step()
    finally:
        model.rows.clear(lane, 0)
        model.states.clear(lane)


def _is_finite(output: SliceOutput) -> bool:
    if output.logits is not None:
        # Tokens that a model never says may have -inf.
        return bool(output.logits.max(dim=-1).values.isfinite().all())
    return output.hidden is not None and bool(output.hidden.isfinite().all())


def _not_finite(config: RingConfig, index: int) -> ModelUnusable:
    return ModelUnusable(
        f"{_layers(config, index)} give values that are not finite: "
        f"the weights are damaged, or too large for {config.dtype}"
    )
