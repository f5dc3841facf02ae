"""Which drafters a server's jobs get: prompt lookup, and behind it a small model when one was named.

Opens the draft model before the rings plan their memory, so that they see what it left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from coordinator.drafters import DrafterFactory
from coordinator.drafters.first_of import first_of
from coordinator.drafters.ngram import ngram_drafter
from gateway.models import find_model
from gateway.progress import ProgressBoard
from gateway.settings import ServeSettings

if TYPE_CHECKING:
    from stage.draft_model import DraftModel

# Tokens of a context that the draft model follows when --max-rows says nothing: what a lane will hold is planned
# later, and a small model's rows cost about as much as a large one's.
_DRAFT_ROWS = 8192


@asynccontextmanager
async def open_drafters(
    settings: ServeSettings, device_and_dtype: Callable[[], tuple[str, str]], board: ProgressBoard
) -> AsyncIterator[DrafterFactory]:
    """Raises SetupError. What the rings compute on (cpu or cuda) is asked for only where a model is loaded."""
    if settings.draft_model is None:
        yield ngram_drafter
        return
    model = await asyncio.to_thread(_load, settings, settings.draft_model, device_and_dtype, board)
    try:
        yield first_of(ngram_drafter, model.drafter)
    finally:
        await asyncio.to_thread(model.close)


def _load(
    settings: ServeSettings,
    draft_model: str,
    device_and_dtype: Callable[[], tuple[str, str]],
    board: ProgressBoard,
) -> DraftModel:
    from stage.draft_model import load_draft_model

    device, dtype = device_and_dtype()
    served = find_model(settings.model, board.note)
    folder = find_model(draft_model, board.note)
    board.note(f"loading {folder.name}, which drafts")
    return load_draft_model(
        folder.path,
        served.path,
        lanes=settings.lanes * settings.rings,
        max_rows=settings.max_rows or _DRAFT_ROWS,
        dtype=dtype,
        device=_place(device),
    )


def _place(device: str) -> str:
    """The GPU of this process with most room, if it has any: the stages' own may be elsewhere."""
    import torch

    if device != "cuda" or not torch.cuda.is_available():
        return "cpu"
    free = [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]
    return f"cuda:{free.index(max(free))}"
