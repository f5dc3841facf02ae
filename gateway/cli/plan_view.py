"""Shows a plan as a table, for `ringserve plan`. What fits is stage/plan.py's business."""

from __future__ import annotations

from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gateway.launch import plan_model
from gateway.progress import LineBoard
from gateway.settings import ServeSettings
from stage.plan import ROW_STEP, Plan, StagePlan, format_bytes


def show_plan(settings: ServeSettings) -> None:
    """Raises SetupError, ModelDoesNotFit behind the table."""
    shown = Console(stderr=True)
    plan = plan_model(settings, LineBoard(lambda text: shown.print(text, markup=False)))
    told = Console()
    told.print(_table(plan))
    told.print(
        f"lanes of {plan.max_rows} rows that fit: {plan.lanes_that_fit}\n"
        f"rows that fit in each of {plan.lanes} lanes: {_limited(plan.rows_that_fit, plan)}\n"
        f"largest context, in one lane: {_limited(plan.largest_context, plan)}\n"
        "memory: what is free now, of each GPU or else of this host, split between its stages\n"
        f"KV: in blocks of {ROW_STEP} rows\n"
        f"store: each GiB of --kv-host-bytes, of each stage, is room for {plan.store_rows_per_gib} rows; "
        "--mirror takes as much again",
        highlight=False,
        soft_wrap=True,
    )
    plan.check()


def _limited(rows: int, plan: Plan) -> str:
    """Rows, and what keeps them from being more."""
    return f"{rows} ({'the model' if rows >= plan.max_positions else 'the memory'}'s limit)"


def _table(plan: Plan) -> Table:
    title = f"{plan.model}, {plan.dtype}, {plan.lanes} lanes x {plan.max_rows} rows"
    table = Table(title=title, box=SIMPLE_HEAD)
    columns = list(zip(*(_amounts(stage) for stage in plan.stages), strict=True))
    # A column of nothing would cost the width of another: most models have no recurrent layers.
    shown = [
        column for column in columns if column[0].name != "states" or any(c.bytes for c in column)
    ]
    for name in ("stage", "layers", *(column[0].name for column in shown)):
        table.add_column(name, justify="right", no_wrap=True)
    for stage in plan.stages:
        layers = f"{stage.first} to {stage.last - 1}"
        row = (format_bytes(column[stage.index].bytes) for column in shown)
        table.add_row(str(stage.index), layers, *row)
    return table


class _Amount(NamedTuple):
    name: str
    bytes: int


def _amounts(stage: StagePlan) -> tuple[_Amount, ...]:
    return (
        _Amount("weights", stage.weight_bytes),
        _Amount("KV", stage.kv_bytes_per_lane * stage.lanes),
        _Amount("states", stage.state_bytes_per_lane * stage.lanes),
        _Amount("workspace", stage.workspace_bytes),
        _Amount("memory", stage.memory_bytes),
        _Amount("left", stage.free_bytes),
    )
