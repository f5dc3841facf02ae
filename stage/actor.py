"""The Ray actor around one stage.

Decides nothing of its own but its end, once nobody probes it any more, or its node's raylet is gone. It loads a slice,
makes a stage of it, and has its loop run, both in one thread of its own. Its methods come in any of Ray's threads.
Ray carries these calls only, never a frame. A call that belongs to a wiring of the ring carries its turn.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import threading
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import ray
import torch

from coordinator.errors import SetupError
from coordinator.frames import PROTOCOL_VERSION, Epoch, LaneId
from coordinator.held import Holding
from coordinator.ring import StageProgress
from stage.build import LoadedSlice, StageReport, load_stage, open_stage
from stage.compute_thread import ComputeThread
from stage.config import RingConfig
from stage.kv.outbox import Outbox
from stage.lease import Owner, Tenure
from stage.mirroring import Mirror, MirrorPlace
from stage.news import Line, News
from stage.processes import process_space
from stage.runner import LoopEnd, Runner
from stage.stage import Stage
from stage.tenancy import Tenancy
from stage.transport import Endpoint
from stage.watchdog import Watchdog

log = logging.getLogger(__name__)

# live, run, probe, load and progress beside each other, and late calls of turns that are over.
CONCURRENT_CALLS = 10


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor runs."""

    node: str
    host: str  # the address that other hosts reach it by
    pid: int
    space: str  # where `pid` means this process: processes.process_space()


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """A SetupError as a value: an exception would arrive wrapped in one of Ray's."""

    error: type[SetupError]
    message: str


@dataclass(frozen=True, slots=True)
class Rested:
    """Whether the loop has ended, and the stage can go on with what it has."""

    reason: str | None = None  # why not


@dataclass(frozen=True, slots=True)
class Probe:
    """What a stage says of itself beside its frames."""

    turn: int
    frames: int  # messages done with since its start
    busy_s: float  # that the frame in work has taken so far
    stored: int = 0  # bytes of nodes in host memory
    mirrored: int = 0  # of another stage's, which are kept here too
    news: tuple[Line, ...] = ()  # what it has warned of since


@dataclass(frozen=True, slots=True)
class About:
    """What an actor of a detached ring tells whoever finds it."""

    config: RingConfig
    bundle: int  # its place in the placement group
    place: Place
    loaded: int | None  # the stage whose slice it has
    report: StageReport | None  # None: it waits as a spare
    turn: int
    epoch: Epoch
    rows: tuple[int, ...]  # of each lane
    tenure: Tenure | None


class StageActor:
    """Life: load, take, then for each turn rest, bind, connect, open_epoch and run; end."""

    def __init__(self, config: RingConfig, bundle: int = 0, owner: Owner | None = None) -> None:
        """`owner`: of a detached ring; it is his before anybody else can ask for it."""
        self._config = config
        self._bundle = bundle
        self._progress = StageProgress(0, 0, 0, "starting")
        self._loaded: LoadedSlice | None = None
        self._stage: Stage | None = None
        self._report: StageReport | None = None
        self._mirror: Mirror | None = None
        self._news = News()
        self._news.listen()
        self._compute = ComputeThread()
        self._runner = Runner()
        self._tenancy = Tenancy(config.lease_s, self._runner)
        if owner is not None:
            self._tenancy.claim(owner)
        self._watchdog = Watchdog(config.fence_s)
        self._raylet = os.getppid()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def place(self) -> Place:
        node = ray.get_runtime_context().get_node_id()
        return Place(node, ray.util.get_node_ip_address(), os.getpid(), process_space())

    def live(self) -> Owner:
        """Returns only to a gateway in whose place another one came, which it names: that this call fails is how the
        death of this process is noticed.
        """
        return self._tenancy.wait()

    def probe(self) -> Probe:
        self._watchdog.heard()
        pulse = self._runner.pulse
        stored = 0 if self._stage is None else self._stage.stored_bytes
        mirrored = 0 if self._mirror is None else self._mirror.shelf.nbytes
        return Probe(
            self._runner.turn,
            pulse.frames,
            self._runner.busy_s(),
            stored,
            mirrored,
            self._news.take(),
        )

    # Loading

    def load(self, index: int, stages_here: int) -> LoadFailure | None:
        """Loads a stage's slice, after giving up the one there was. `stages_here`: the ring's stages on this node,
        this one included.
        """
        # Nobody probes a process that loads.
        self._watchdog.hold()
        self._give_up()
        # Ray shows a process its own GPU only.
        device = "cuda:0" if self._config.device == "cuda" else "cpu"
        try:
            self._loaded = self._compute.call(
                partial(load_stage, self._config, index, device, self._note, stages_here)
            )
        except SetupError as error:
            return LoadFailure(type(error), str(error))
        finally:
            self._watchdog.release()
        return None

    def progress(self) -> StageProgress:
        return self._progress

    def take(self, host_bytes: int | None, stages_here: int) -> StageReport | LoadFailure:
        """Makes the loaded slice the ring's stage. Not before: what lies on disk belongs to one process at a time.

        `host_bytes`: what the stage before it had for chain nodes; None: as the config says.
        """
        assert self._loaded is not None
        config = self._config
        if host_bytes is not None:
            config = replace(config, kv_host_bytes=host_bytes)
        try:
            outbox = Outbox() if config.mirror else None
            self._stage, report = open_stage(config, self._loaded, stages_here, outbox)
        except SetupError as error:
            return LoadFailure(type(error), str(error))
        self._mirror = None if outbox is None else Mirror(outbox, report.host_bytes)
        # What lies on disk is told once: it may be long.
        self._report = replace(report, stored=(), resumable=())
        return report

    def _give_up(self) -> None:
        if self._loaded is None:
            return
        if self._mirror is not None:
            self._mirror.rest()
        self._loaded = self._stage = self._report = self._mirror = None
        gc.collect()
        if self._config.device == "cuda":
            torch.cuda.empty_cache()

    # Turns

    def rest(self, turn: int, within_s: float) -> Rested:
        is_still = self._runner.rest(turn, within_s)
        if self._mirror is not None:
            self._mirror.rest()
        if not is_still:
            return Rested(f"it did not rest within {within_s:g} s")
        return Rested(self._runner.broken)

    def bind(self, turn: int, where: Path | str) -> Endpoint:
        return self._runner.bind(turn, where)

    def connect(
        self, turn: int, previous: bytes | None, following: Endpoint, state_rows: int
    ) -> Holding:
        """Returns what this stage could go on from. `state_rows`: RingInfo's, which holds for the whole ring."""
        self._runner.connect(turn, previous, following)
        stage = self._ready()
        stage.join(state_rows)
        if self._mirror is not None:
            self._open(self._mirror, turn, stage)
        return stage.holding()

    def bind_mirror(self, turn: int, where: Path | str) -> MirrorPlace:
        with self._runner.within(turn):
            return self._mirrored().bind(turn, where)

    def admit_mirror(self, turn: int, owner: int, public: bytes | None, keeper: Endpoint) -> None:
        """Which stage's nodes are kept here too, and where this stage's are. To be called before any `connect`."""
        with self._runner.within(turn):
            self._mirrored().admit(owner, public, keeper)

    def open_epoch(self, turn: int, epoch: Epoch, held: Holding) -> None:
        with self._runner.within(turn):
            self._ready().open_epoch(epoch, held)

    def run(self, turn: int) -> LoopEnd:
        return self._compute.call(partial(self._runner.run, turn, self._ready()))

    def end(self, turn: int, within_s: float) -> None:
        """What is to outlive the stage reaches the disk."""
        if self._runner.rest(turn, within_s) and self._stage is not None:
            self._stage.close()

    # A detached ring's

    def protocol(self) -> int:
        """To be asked first: what the others answer belongs to this version."""
        return PROTOCOL_VERSION

    def about(self) -> About:
        stage, loaded = self._stage, self._loaded
        rows: tuple[int, ...] = ()
        if stage is not None:
            lanes = range(stage.ledger.lanes)
            rows = tuple(stage.ledger.valid_rows(LaneId(lane)) for lane in lanes)
        return About(
            self._config,
            self._bundle,
            self.place(),
            None if loaded is None else loaded.index,
            self._report,
            self._runner.turn,
            Epoch(0) if stage is None else stage.ledger.epoch,
            rows,
            self._tenancy.tenure(),
        )

    def summary(self) -> str:
        """The same for whoever may be of another version: JSON."""
        told = self.about()
        report, tenure = told.report, told.tenure
        return json.dumps(
            {
                "model": told.config.model,
                "fingerprint": "" if report is None else report.fingerprint,
                "stage": None if report is None else told.loaded,
                "node": told.place.host,
                "pid": told.place.pid,
                "epoch": told.epoch,
                "rows": told.rows,
                "max_rows": told.config.max_rows,
                "splits": told.config.splits,
                "tenure": None if tenure is None else asdict(tenure),
            }
        )

    def claim(self, owner: Owner, ended: str) -> Tenure | None:
        return self._tenancy.claim(owner, ended)

    def renew(self, owner: str) -> bool:
        return self._tenancy.renew(owner)

    def release(self, owner: str) -> None:
        self._tenancy.release(owner)

    # Inside

    def _ready(self) -> Stage:
        assert self._stage is not None
        return self._stage

    def _mirrored(self) -> Mirror:
        assert self._mirror is not None
        return self._mirror

    def _open(self, mirror: Mirror, turn: int, stage: Stage) -> None:
        given = mirror.open(turn, stage if stage.is_new else None, self._config.mirror_s)
        if given.records or given.absent:
            log.warning(
                "took back stage=%d records=%d bytes=%d absent=%d seconds=%.3f",
                stage.index,
                given.records,
                given.nbytes,
                given.absent,
                given.seconds,
            )

    def _note(self, progress: StageProgress) -> None:
        self._progress = progress

    def _watch(self) -> None:
        """The thread of the watchdog. Nothing is tidied up: whoever stopped probing has given this process up."""
        while (reason := self._unwanted()) is None:
            time.sleep(self._watchdog.step_s)
        log.error("fenced pid=%d reason=%s", os.getpid(), reason)
        os._exit(1)

    def _unwanted(self) -> str | None:
        """Why nobody can want this process any more."""
        if os.getppid() != self._raylet:
            # No call reaches it, and nobody else would end it: Ray's own way goes through the raylet.
            return "the raylet of its node has ended"
        if not self._config.detached and self._watchdog.is_fenced():
            return f"no probe for {self._config.fence_s:g} s"
        return None
