"""Opens a stage's store of chain nodes: how many bytes it may take, and which rows on disk are its own.

Decides the default budget and what must be the same for rows of an earlier run to be used: the model, the layers, the
dtype and whatever they were computed by. A folder that cannot be used costs a log line, not the stage.
"""

from __future__ import annotations

import logging

import torch
import transformers

from stage.config import RingConfig
from stage.host_memory import available_bytes
from stage.kv.checkpoints import Checkpoints
from stage.kv.disk import DiskTier
from stage.kv.node_file import RowKind
from stage.kv.records import RowRecords
from stage.kv.store import HostStore
from stage.model.slice import ModelSlice

log = logging.getLogger(__name__)

# Of the memory that is available once the weights are loaded, for the stages of a host together.
_SHARE = 4


def open_stores(
    config: RingConfig, model: ModelSlice, fingerprint: str, stages_here: int
) -> tuple[HostStore, Checkpoints]:
    """Reads the headers of the nodes on disk, and no rows. Recurrent layers get half of the budget."""
    decoder = model.decoder
    records = RowRecords(model.rows, decoder.dtype, decoder.device)
    kind = RowKind(
        fingerprint=fingerprint,
        first=decoder.first,
        last=decoder.last,
        dtype=config.dtype,
        shapes=records.shapes,
        recipe=_recipe(decoder.device, config.numerics == "fast"),
    )
    budget = config.kv_host_bytes
    if budget is None:
        budget = available_bytes() // _SHARE // (stages_here * config.rings)
    disk = None if budget == 0 else _open_disk(config, records, kind)
    for_states = budget // 2 if model.states.layers else 0
    return HostStore(records, budget - for_states, disk), Checkpoints(model.states, for_states)


def _open_disk(config: RingConfig, records: RowRecords, kind: RowKind) -> DiskTier | None:
    if config.kv_disk is None:
        return None
    try:
        return DiskTier(config.kv_disk, records, kind, config.kv_disk_bytes)
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
