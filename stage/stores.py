"""Opens a stage's store of chain nodes: how many bytes it may take, and which files on disk are its own.

Decides the default budget and what must be the same for rows of an earlier run to be used: the model, the layers, the
dtype and whatever they were computed by. A folder that cannot be used costs a log line, not the stage.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
import transformers

from stage.config import RingConfig
from stage.host_memory import available_bytes
from stage.kv.checkpoints import Checkpoints
from stage.kv.disk import DiskTier
from stage.kv.kept import DiskShelf
from stage.kv.node_file import STATE, FileKind
from stage.kv.outbox import Outbox
from stage.kv.records import RowRecords
from stage.kv.states import LaneStates
from stage.kv.store import HostStore
from stage.memos import Memos, memo_slots, row_bytes
from stage.model.slice import ModelSlice

log = logging.getLogger(__name__)

# Of the memory that is available once the weights are loaded, for the stages of a host together.
_SHARE = 4


def host_budget(config: RingConfig, stages_here: int) -> int:
    """Bytes of a stage's host memory for chain nodes; without a setting, of what is available now. With a mirror, so
    many again are for another stage's.
    """
    if config.kv_host_bytes is not None:
        return config.kv_host_bytes
    copies = 2 if config.mirror else 1
    return available_bytes() // _SHARE // (stages_here * config.rings * copies)


def open_stores(
    config: RingConfig,
    model: ModelSlice,
    fingerprint: str,
    budget: int,
    outbox: Outbox | None = None,
) -> tuple[HostStore, Checkpoints, Memos]:
    """Reads the headers of the files on disk, and nothing else of them. Recurrent layers get half of each budget."""
    decoder = model.decoder
    records = RowRecords(model.rows, decoder.dtype, decoder.device)
    rows = FileKind(
        fingerprint=fingerprint,
        first=decoder.first,
        last=decoder.last,
        dtype=config.dtype,
        shapes=records.shapes,
        recipe=_recipe(decoder.device, config.numerics == "fast"),
    )
    states = kind_of_states(model.states, rows)
    # Both kinds always: what another model's states left in the folder counts too, and goes when room is wanted.
    disk = None if budget == 0 else _open_disk(config, (rows, states))
    memos = memo_slots(budget, decoder.vocab_size, config.lanes) if decoder.is_tail else 0
    budget -= memos * row_bytes(decoder.vocab_size)
    share = 2 if model.states.layers else 1
    for_rows = budget - budget // 2 if model.states.layers else budget
    rows_shelf = states_shelf = None
    if disk is not None:
        rows_shelf = DiskShelf(disk, rows, config.kv_disk_bytes // share)
        states_shelf = DiskShelf(disk, states, config.kv_disk_bytes // share)
    mirrored = [None if outbox is None else outbox.of(kind) for kind in (rows, states)]
    store = HostStore(records, for_rows, rows_shelf, mirrored[0])
    checkpoints = Checkpoints(model.states, budget - for_rows, states_shelf, mirrored[1])
    return store, checkpoints, Memos(memos)


def kind_of_states(states: LaneStates, rows: FileKind) -> FileKind:
    """What else states must have in common, beside what rows must: the layout of one."""
    layout = states.layout(states.block - 1)
    return replace(
        rows,
        holds=STATE,
        dtype=",".join(str(dtype) for _, dtype in layout),
        # With a row for all but one of a block's, so that the shapes also tell how many a block has.
        shapes=tuple(shape for shape, _ in layout),
    )


def _open_disk(config: RingConfig, kinds: Sequence[FileKind]) -> DiskTier | None:
    if config.kv_disk is None:
        return None
    try:
        return DiskTier(config.kv_disk, kinds, config.kv_disk_bytes)
    except OSError as error:
        log.error("no rows are kept on disk folder=%s reason=%s", config.kv_disk, error)
        return None


def _recipe(device: torch.device, is_fast: bool) -> str:
    """Other kernels round otherwise: their rows are not the ones that a cold ring would compute here."""
    if device.type == "cuda":
        processor = torch.cuda.get_device_name(device)
    else:
        processor = torch.backends.cpu.get_cpu_capability()
    way = "fast" if is_fast else "padded"
    return f"torch {torch.__version__}, transformers {transformers.__version__}, {processor}, {way}"
