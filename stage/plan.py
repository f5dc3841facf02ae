"""Where a model is cut into stages, and whether its weights and lanes fit, before anything is loaded.

It decides each stage's layers, the rows of a lane when none were asked for, and the one line that refuses a ring
that cannot fit. Pure arithmetic over a Footprint: no weights, no torch, no cluster; the caller says how much memory
each stage has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.errors import InvalidSetting, ModelDoesNotFit
from stage.model.footprint import DTYPE_BYTES, Footprint, read_footprint

# Attention reads the static buffer up to the next multiple of this, so buffers are allocated in these steps.
ROW_STEP = 512
# Rows of the one lane beside the sessions' lanes, which warm-up and probes use (stage/kv/rows.py).
SCRATCH_ROWS = 2 * ROW_STEP
# Rows of a lane when none were asked for, at most; on a CPU longer prompts take minutes to prefill.
DEFAULT_ROWS_LIMIT = 8192
# Resident size of a process that imported torch, transformers and ray and loaded nothing: 362 MiB (ru_maxrss).
RUNTIME_BYTES = 384 * 2**20
# Rows of the widest frame that a stage computes at once, and rows whose logits the tail makes at once.
_FRAME_ROWS, _SAMPLED_ROWS = 512, 64


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage: layers [first, last), and what it needs of the memory that it has."""

    index: int
    first: int
    last: int
    weight_bytes: int
    kv_bytes_per_lane: int
    state_bytes_per_lane: int
    workspace_bytes: int
    memory_bytes: int
    lanes: int

    @property
    def n_layers(self) -> int:
        return self.last - self.first

    @property
    def lanes_bytes(self) -> int:
        """KV rows and recurrent states of all lanes."""
        return (self.kv_bytes_per_lane + self.state_bytes_per_lane) * self.lanes

    @property
    def needed_bytes(self) -> int:
        return self.weight_bytes + self.lanes_bytes + self.workspace_bytes

    @property
    def free_bytes(self) -> int:
        """What is left; negative when the stage does not fit."""
        return self.memory_bytes - self.needed_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """A ring before it is loaded. `check` refuses what does not fit."""

    model: str
    dtype: str
    lanes: int
    max_rows: int
    max_positions: int
    stages: tuple[StagePlan, ...]
    lanes_that_fit: int
    """Lanes of `max_rows` rows that every stage has room for."""
    rows_that_fit: int
    """Rows of each of `lanes` lanes that every stage has room for."""
    largest_context: int
    """Rows of a single lane that every stage has room for."""

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The cuts, from 0 to the number of layers: stage i holds [boundaries[i], boundaries[i + 1])."""
        return (0, *(stage.last for stage in self.stages))

    @property
    def splits(self) -> tuple[tuple[int, int], ...]:
        """Each stage's layers [first, last)."""
        return tuple((stage.first, stage.last) for stage in self.stages)

    @property
    def store_rows_per_gib(self) -> int:
        """Rows that a GiB of every stage's host store holds; 0 for a model without KV."""
        row_bytes = max(stage.kv_bytes_per_lane for stage in self.stages) // padded(self.max_rows)
        return 2**30 // row_bytes if row_bytes else 0

    @property
    def fits(self) -> bool:
        return self.max_rows <= self.max_positions and all(s.free_bytes >= 0 for s in self.stages)

    def check(self) -> None:
        """Raises ModelDoesNotFit: one line with what was wanted, what there is, and the largest context that fits."""
        if self.max_rows > self.max_positions:
            raise ModelDoesNotFit(
                f"{self.model} takes at most {self.max_positions} rows; {self.max_rows} were asked for"
            )
        if not self.fits:
            raise ModelDoesNotFit(self._refusal())

    def _refusal(self) -> str:
        worst = min(self.stages, key=lambda stage: stage.free_bytes)
        return (
            f"{self.model} ({self.dtype}) does not fit: stage {worst.index} of {len(self.stages)} needs "
            f"{format_bytes(worst.needed_bytes)} (weights {format_bytes(worst.weight_bytes)}, "
            f"{self.lanes} x {self.max_rows} rows {format_bytes(worst.lanes_bytes)}, "
            f"workspace {format_bytes(worst.workspace_bytes)}) and has {format_bytes(worst.memory_bytes)}; "
            + self._largest()
        )

    def _largest(self) -> str:
        if self.largest_context == 0:
            return "no context fits: use more stages or a smaller dtype"
        if self.rows_that_fit in (0, self.largest_context):
            return f"the largest context that fits is {self.largest_context} rows in 1 lane"
        return (
            f"the largest context that fits is {self.rows_that_fit} rows in {self.lanes} lanes "
            f"or {self.largest_context} rows in 1 lane"
        )


def plan(
    model_dir: Path,
    stages: int,
    lanes: int,
    max_rows: int | None,
    dtype: str,
    memory_per_stage: Sequence[int],
    *,
    rows_limit: int = DEFAULT_ROWS_LIMIT,
    device: str = "cpu",
) -> Plan:
    """Plans a ring of `stages` stages; `max_rows=None` takes what the model and the memory allow, up to `rows_limit`.

    Raises ModelUnusable and InvalidSetting; whether the plan fits is for `Plan.check` to say.
    """
    return plan_footprint(
        read_footprint(model_dir, dtype, device),
        stages,
        lanes,
        max_rows,
        memory_per_stage,
        rows_limit=rows_limit,
    )


def plan_footprint(
    model: Footprint,
    stages: int,
    lanes: int,
    max_rows: int | None,
    memory_per_stage: Sequence[int],
    *,
    rows_limit: int = DEFAULT_ROWS_LIMIT,
) -> Plan:
    """The same, of a model whose sizes are known."""
    _refuse_nonsense(model, stages, lanes, max_rows, memory_per_stage)
    wanted = min(model.max_positions, rows_limit) if max_rows is None else max_rows
    cuts = balance(model, lanes, wanted, memory_per_stage)
    fit = _Fit(model, cuts, tuple(memory_per_stage))
    rows_that_fit = fit.rows(lanes)
    rows = wanted if max_rows is not None else min(wanted, rows_that_fit) or min(wanted, ROW_STEP)
    return Plan(
        model=model.name,
        dtype=model.dtype,
        lanes=lanes,
        max_rows=rows,
        max_positions=model.max_positions,
        stages=fit.stages(lanes, rows),
        lanes_that_fit=fit.lanes(rows),
        rows_that_fit=rows_that_fit,
        largest_context=fit.rows(1),
    )


def _refuse_nonsense(
    model: Footprint, stages: int, lanes: int, max_rows: int | None, memory: Sequence[int]
) -> None:
    if not 1 <= stages <= model.n_layers:
        raise InvalidSetting(
            "stages", f"{model.name} has {model.n_layers} layers, got {stages} stages"
        )
    if lanes < 1:
        raise InvalidSetting("lanes", f"must be at least 1, got {lanes}")
    if max_rows is not None and max_rows < 1:
        raise InvalidSetting("max_rows", f"must be at least 1, got {max_rows}")
    if len(memory) != stages:
        raise InvalidSetting("memory_per_stage", f"{stages} stages but {len(memory)} amounts")


def padded(rows: int) -> int:
    """Rows as they are allocated."""
    return -(-rows // ROW_STEP) * ROW_STEP


def workspace_bytes(model: Footprint, first: int, last: int, rows: int) -> int:
    """An estimate of what a stage of layers [first, last) needs beside its weights and the sessions' rows."""
    element = DTYPE_BYTES[model.dtype]
    # Residual stream, norms and attention in and out, and the MLP's three intermediates.
    activations = _FRAME_ROWS * (8 * model.hidden + 3 * model.intermediate) * element
    mask = _FRAME_ROWS * padded(rows) * element
    logits = 2 * _SAMPLED_ROWS * model.vocabulary * 4 if last == model.n_layers else 0
    return RUNTIME_BYTES + model.lane_bytes(first, last, SCRATCH_ROWS) + activations + mask + logits


@dataclass(frozen=True, slots=True)
class _Fit:
    """A model with its cuts and the memory of each stage: what fits."""

    model: Footprint
    cuts: tuple[int, ...]
    memory: tuple[int, ...]

    def stages(self, lanes: int, rows: int) -> tuple[StagePlan, ...]:
        spans = zip(self.cuts, self.cuts[1:], self.memory, strict=False)
        return tuple(
            StagePlan(
                index=index,
                first=first,
                last=last,
                weight_bytes=self.model.weight_bytes(first, last),
                kv_bytes_per_lane=self.model.kv_bytes(first, last, padded(rows)),
                state_bytes_per_lane=sum(self.model.state_bytes[first:last]),
                workspace_bytes=workspace_bytes(self.model, first, last, rows),
                memory_bytes=memory,
                lanes=lanes,
            )
            for index, (first, last, memory) in enumerate(spans)
        )

    def _fits(self, lanes: int, rows: int) -> bool:
        return all(stage.free_bytes >= 0 for stage in self.stages(lanes, rows))

    def rows(self, lanes: int) -> int:
        """The most rows, a whole number of steps or the model's limit, that fit in each of `lanes` lanes."""
        limit = self.model.max_positions
        steps = _largest(lambda n: self._fits(lanes, n * ROW_STEP), padded(limit) // ROW_STEP)
        return min(steps * ROW_STEP, limit)

    def lanes(self, rows: int) -> int:
        """The most lanes of `rows` rows; 0 when not one fits."""
        empty, single = self.stages(0, rows), self.stages(1, rows)
        if any(stage.free_bytes < 0 for stage in empty):
            return 0
        lane_bytes = [stage.lanes_bytes for stage in single]
        room = [
            stage.free_bytes // lane if lane else 2**16
            for stage, lane in zip(empty, lane_bytes, strict=True)
        ]
        return min(room)


def _largest(holds: Callable[[int], bool], limit: int) -> int:
    """The largest n in [0, limit] for which `holds`, which holds up to some n and not beyond; 0 if for none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def balance(model: Footprint, lanes: int, rows: int, memory: Sequence[int]) -> tuple[int, ...]:
    """The cuts of the best-balanced ring: by work where memory allows, else by how full the stages get.

    Work is the bytes of the layers that a stage reads for each frame; the embedding is a look-up. Prefill frames
    hardly touch the head, so the layers are balanced first; among equal splits the one wins whose tail does least,
    since verify frames read the head as well.
    """

    def full(stage: int, first: int, last: int) -> float:
        needed = model.weight_bytes(first, last) + workspace_bytes(model, first, last, rows)
        return (needed + lanes * model.lane_bytes(first, last, padded(rows))) / max(
            memory[stage], 1
        )

    def layers(stage: int, first: int, last: int) -> float:
        fits = full(stage, first, last) <= 1
        return float(sum(model.layer_bytes[first:last])) if fits else float("inf")

    most, _ = _split(model.n_layers, len(memory), layers)
    if most == float("inf"):
        return _split(model.n_layers, len(memory), full)[1]

    def with_head(stage: int, first: int, last: int) -> float:
        work = layers(stage, first, last)
        head = model.head_bytes if last == model.n_layers else 0
        return work + head if work <= most else float("inf")

    return _split(model.n_layers, len(memory), with_head)[1]


Cost = Callable[[int, int, int], float]
"""(stage, first layer, last layer) -> how much that stage has to carry."""


def _split(n_layers: int, stages: int, cost: Cost) -> tuple[float, tuple[int, ...]]:
    """The contiguous split whose most loaded stage carries least, and what that one carries; no stage is empty."""
    # best[last] = (load of the most loaded stage, cuts) for the stages so far holding layers [0, last).
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for stage in range(stages):
        after = {}
        for last in range(stage + 1, n_layers - (stages - stage - 1) + 1):
            after[last] = min(
                (max(load, cost(stage, first, last)), (*cuts, last))
                for first, (load, cuts) in best.items()
                if first < last
            )
        best = after
    return best[n_layers]


def format_bytes(count: int) -> str:
    """For people: 1.5 GiB, 113 MiB."""
    return f"{count / 2**30:.1f} GiB" if abs(count) >= 2**30 else f"{count / 2**20:.0f} MiB"
