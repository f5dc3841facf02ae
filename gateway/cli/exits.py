"""How a command that could not start ends: one line and an exit code, 2 for bad usage and 1 for everything else.

Decides that a setting is called what an operator calls it: by its flag, where it has one.
"""

from __future__ import annotations

import typer
from typer.models import OptionInfo

from coordinator.errors import InvalidSetting, SetupError

# Settings that are called otherwise than their flags.
_FLAGS = {"max_drafts": "drafts"}


def fail(error: SetupError) -> int:
    """Prints the one line and returns the exit code."""
    if not isinstance(error, InvalidSetting):
        typer.echo(f"error: {error}", err=True)
        return 1
    typer.echo(f"error: {flag_of(error.setting)}: {error.reason}", err=True)
    return 2


def flag_of(setting: str) -> str:
    """Its flag; the setting itself where it has none."""
    from gateway.cli import asking, flags

    name = _FLAGS.get(setting, setting)
    marks = [
        mark
        for known in (*vars(asking).values(), *vars(flags).values())
        for mark in getattr(known, "__metadata__", ())
    ]
    named = {mark.envvar for mark in marks if isinstance(mark, OptionInfo)}
    is_flag = f"RINGSERVE_{name.upper()}" in named
    return f"--{name.replace('_', '-')}" if is_flag else setting
