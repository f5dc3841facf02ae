"""A small whole model that drafts for many jobs at once, in one thread of its own.

Decides which rows the model computes next and what a job's drafter may answer at once. Jobs that wait for drafts go
together through one call; a job that is far behind is caught up in chunks beside them and proposes nothing until then,
so that nobody waits for its prefill. It may not block the caller, nor fail a job: a draft model that raises proposes
nothing ever after.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from threading import Condition, Thread

import torch

from coordinator.drafters import Drafter
from coordinator.errors import ModelDoesNotFit, ModelUnusable
from coordinator.frames import JobId
from stage.attention import Numerics, RowSegment
from stage.draft_lanes import DraftJob, DraftLanes, DraftPart, Pace, Thought
from stage.model.load import Progress, read_config
from stage.model.slice import ModelSlice, RowBatch, load_slice
from stage.model.vocabulary import check_same_vocabulary

log = logging.getLogger(__name__)


class DraftModel:
    """Owns the model's rows and its thread, from its making until `close`. Thread-safe.

    Rows and lanes' tokens are written by the thread alone, and it alone gives a lane to a job; all state is guarded by
    one lock, which is never held while the model computes.
    """

    def __init__(self, model: ModelSlice, threads: int = 1) -> None:
        self._model = model
        self._threads = threads
        self._lanes = DraftLanes(model.rows.lanes)
        self._pending: dict[DraftJob, None] = {}  # whose thought goes on, the longest waiting first
        self._changed = Condition()
        self._pace = Pace()
        self._over = False
        self._thread = Thread(target=self._run, name="draft-model", daemon=True)
        self._thread.start()

    def drafter(self, job: JobId, wake: Callable[[], object], tenant: str = "") -> Drafter:
        """The DrafterFactory of this model, for any number of rings."""
        return ModelDrafter(self, DraftJob(wake, tenant))

    def close(self) -> None:
        """Ends the thread, after the call that it is in. Drafters propose nothing from then on."""
        with self._changed:
            self._over = True
            self._changed.notify()
        self._thread.join()

    @property
    def idle_lanes(self) -> int:
        """Lanes that no job holds."""
        with self._changed:
            return self._lanes.idle

    # What drafters call, on the event loop

    def extend(self, job: DraftJob, tokens: Sequence[int]) -> None:
        with self._changed:
            job.context.extend(tokens)
            thought = job.thought
            if job.waited_for and thought and not thought.covers(job.context[thought.base :]):
                self._forget(job)

    def ask(self, job: DraftJob, guess: Sequence[int], limit: int) -> tuple[int, ...] | None:
        with self._changed:
            # The last proposal needs no row.
            limit = min(limit, self._model.rows.max_rows + 1 - len(job.context) - len(guess))
            if self._over or limit < 1:
                return ()
            self._lanes.note_ask(job)
            return self._answer(job, guess, limit)

    def leave(self, job: DraftJob) -> None:
        with self._changed:
            self._forget(job)
            job.unseat()

    def _answer(self, job: DraftJob, guess: Sequence[int], limit: int) -> tuple[int, ...] | None:
        thought = job.thought
        line = [*job.context[thought.base :], *guess] if thought is not None else []
        if thought is not None and not thought.covers(line):
            thought = None
        if thought is not None:
            rest = thought.tail[len(line) :]
            if len(rest) >= limit or (rest and not thought.thinking):
                return tuple(rest[:limit])
        base, behind = len(job.context), job.behind()
        if behind is None or behind > self._pace.rows:
            self._think(job, Thought(base, [], 0, 0))
            return ()
        if thought is None:
            thought = Thought(base, list(guess), len(guess), limit)
        else:
            thought.go_on(base, len(guess), limit)
        self._think(job, thought)
        return None

    def _think(self, job: DraftJob, thought: Thought) -> None:
        job.thought = thought
        thought.thinking = True
        self._pending[job] = None
        self._changed.notify()

    def _forget(self, job: DraftJob) -> None:
        job.thought = None
        self._pending.pop(job, None)

    # The thread

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            while self._step():
                pass
        except Exception:
            log.exception("the draft model failed: nothing is drafted by it from now on")
        self._end()

    def _step(self) -> bool:
        """One call of the model; False when there will be none any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._over)
            if self._over:
                return False
            parts = self._plan()
        if not parts:
            return True
        began = time.perf_counter()
        found = self._compute(parts)
        seconds = time.perf_counter() - began
        with self._changed:
            self._pace.took(max(len(part.tokens) for part in parts), seconds)
            ready = [part.job for part in parts if self._learn(part, found)]
        for job in ready:
            _wake(job)
        return True

    def _plan(self) -> list[DraftPart]:
        """Everyone who is waited for, and one chunk of whoever catches up and waits longest."""
        waited_for = [job for job in self._pending if job.waited_for]
        parts = [part for job in waited_for if (part := job.next_part(None)) is not None]
        for job in [job for job in self._pending if not job.waited_for]:
            seated = self._lanes.seat(job, self._pending)
            part = job.next_part(self._pace.rows) if seated else None
            self._pending.pop(job)
            if part is not None:
                self._pending[job] = None  # behind the others
                return [*parts, part]
            job.thought = None  # it has caught up, or there is no lane to be had
        return parts

    def _compute(self, parts: Sequence[DraftPart]) -> dict[DraftJob, int]:
        """The likeliest token behind each part that asks."""
        ends = list(accumulate(len(part.tokens) for part in parts))
        batch = RowBatch(
            token_ids=tuple(token for part in parts for token in part.tokens),
            segments=tuple(RowSegment(p.lane.number, p.start, len(p.tokens)) for p in parts),
            asked=tuple(end - 1 for part, end in zip(parts, ends, strict=True) if part.asks),
        )
        logits = self._model.forward(batch).logits  # [asked, vocab]
        assert logits is not None
        best = logits.argmax(-1).tolist() if batch.asked else []
        return dict(zip([part.job for part in parts if part.asks], best, strict=True))

    def _learn(self, part: DraftPart, found: Mapping[DraftJob, int]) -> bool:
        """Notes the rows, which are there whether or not anyone still wants the thought; says whether the job
        has its answer.
        """
        part.lane.write(part.start, part.tokens)
        job, thought = part.job, part.thought
        if not part.asks or job.thought is not thought or not thought.thinking:
            return False
        thought.tail.append(found[job])
        thought.thinking = not thought.satisfied
        if thought.thinking:
            return False
        self._pending.pop(job, None)
        return True

    def _end(self) -> None:
        """Whoever waits is woken, to hear that there are no drafts."""
        with self._changed:
            self._over = True
            waiting = [job for job in self._pending if job.waited_for]
            self._pending.clear()
        for job in waiting:
            _wake(job)


class ModelDrafter:
    """Implements coordinator.drafters.Drafter for one job."""

    def __init__(self, model: DraftModel, job: DraftJob) -> None:
        self._model = model
        self._job = job

    def extend(self, tokens: Sequence[int]) -> None:
        self._model.extend(self._job, tokens)

    def draft(self, guess: Sequence[int], limit: int) -> tuple[int, ...] | None:
        return self._model.ask(self._job, guess, limit)

    def close(self) -> None:
        self._model.leave(self._job)


def load_draft_model(
    folder: Path,
    served: Path,
    *,
    lanes: int,
    max_rows: int,
    dtype: str,
    device: str,
    progress: Progress | None = None,
) -> DraftModel:
    """The model in `folder`, to draft for the one in `served`. Raises ModelUnusable, ModelDoesNotFit."""
    check_same_vocabulary(served, folder)
    config = read_config(folder)
    rows = min(max_rows, getattr(config, "max_position_embeddings", None) or max_rows)
    try:
        model = load_slice(
            folder,
            0,
            config.num_hidden_layers,
            lanes=lanes,
            max_rows=rows,
            dtype=getattr(torch, dtype),
            device=torch.device(device),
            numerics=Numerics.FAST,  # a draft need not be exact: it is checked
            progress=progress,
        )
    except torch.OutOfMemoryError as error:
        raise ModelDoesNotFit(f"the draft model {folder.name} does not fit: {error}") from error
    if model.states.layers:
        raise ModelUnusable(
            f"{folder.name} cannot draft: its recurrent layers cannot be rewound far"
        )
    return DraftModel(model)


def _wake(job: DraftJob) -> None:
    try:
        job.wake()
    except RuntimeError as error:  # its event loop has ended meanwhile
        log.debug("a job was not woken: %s", error)
