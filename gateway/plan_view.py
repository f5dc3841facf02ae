"""Shows a plan as a table, for `ringserve plan`. What fits is stage/plan.py's business."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gateway.launch import plan_model
from gateway.progress import LineBoard
from gateway.settings import ServeSettings
from stage.plan import ROW_STEP, Plan, format_bytes


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
        f"KV: in blocks of {ROW_STEP} rows",
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
    for name in ("stage", "layers", "weights", "KV", "workspace", "memory", "left"):
        table.add_column(name, justify="right", no_wrap=True)
    for stage in plan.stages:
        amounts = (
            stage.weight_bytes,
            stage.kv_bytes_per_lane * stage.lanes,
            stage.workspace_bytes,
            stage.memory_bytes,
            stage.free_bytes,
        )
        layers = f"{stage.first} to {stage.last - 1}"
        table.add_row(str(stage.index), layers, *(format_bytes(amount) for amount in amounts))
    return table
