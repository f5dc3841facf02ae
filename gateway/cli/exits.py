"""How a command that could not start ends: one line and an exit code, 2 for bad usage and 1 for everything else."""

from __future__ import annotations

import typer

from coordinator.errors import InvalidSetting, SetupError


def fail(error: SetupError) -> int:
    """Prints the one line and returns the exit code."""
    typer.echo(f"error: {error}", err=True)
    return 2 if isinstance(error, InvalidSetting) else 1
