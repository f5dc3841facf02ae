"""Writes the configuration reference from the command line itself: `make docs`.

It decides only how a flag is shown. What a flag is called, means and defaults to is said once, where it is declared.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from gateway.cli.app import app

_HEAD = """# Configuration

Every flag of every command, with the environment variable that sets it and its default. A flag goes before its
variable. Where a flag says nothing else, what is counted is at least 1 and seconds are more than 0. Generated from
the program (`make docs`); `ringserve COMMAND --help` shows the same.
"""
_COLUMNS = "| flag | variable | default | meaning |\n|---|---|---|---|"


def reference() -> str:
    """The page, in Markdown."""
    sections = (_section(name, run) for name, run in _commands("ringserve", app))
    return "\n".join([_HEAD, *sections])


def _commands(name: str, group: typer.Typer) -> Iterator[tuple[str, Callable[..., Any]]]:
    for each in group.registered_commands:
        if each.callback is not None and not each.hidden:
            own = each.name or each.callback.__name__.replace("_", "-")
            yield f"{name} {own}", each.callback
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            yield from _commands(f"{name} {inner.name}", inner.typer_instance)


def _section(name: str, run: Callable[..., Any]) -> str:
    hints = get_type_hints(run, include_extras=True)
    parameters = inspect.signature(run).parameters.values()
    told = [(each, *_declared(hints[each.name])) for each in parameters]
    arguments = [each.name.upper() for each, _, info in told if isinstance(info, ArgumentInfo)]
    rows = [_row(each, kind, info) for each, kind, info in told]
    about = " ".join((inspect.getdoc(run) or "").partition("\n\n")[0].split())
    table = [_COLUMNS, *rows] if rows else []
    return "\n".join([f"## `{' '.join([name, *arguments])}`", "", about, "", *table, ""])


def _declared(hint: Any) -> tuple[Any, OptionInfo | ArgumentInfo]:
    kind, *marks = get_args(hint)
    return kind, next(each for each in marks if isinstance(each, OptionInfo | ArgumentInfo))


def _row(parameter: inspect.Parameter, kind: Any, info: OptionInfo | ArgumentInfo) -> str:
    cells = (
        _flag(parameter, info),
        ", ".join(f"`{each}`" for each in _listed(info.envvar)),
        _default(parameter, info),
        _meaning(kind, info),
    )
    return "| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |"


def _flag(parameter: inspect.Parameter, info: OptionInfo | ArgumentInfo) -> str:
    if isinstance(info, ArgumentInfo):
        return f"`{parameter.name.upper()}`"
    # Within Annotated the first of the names stands where a default would.
    first = [info.default] if isinstance(info.default, str) else []
    names = [*first, *(info.param_decls or ())] or [f"--{parameter.name.replace('_', '-')}"]
    return ", ".join(f"`{each}`" for each in names)


def _default(parameter: inspect.Parameter, info: OptionInfo | ArgumentInfo) -> str:
    if isinstance(info.show_default, str):
        return info.show_default
    value = parameter.default
    if value is inspect.Parameter.empty:
        return "required"
    if value is None or value is False:
        return ""
    return f"`{value.value if isinstance(value, Enum) else value}`"


def _meaning(kind: Any, info: OptionInfo | ArgumentInfo) -> str:
    told = " ".join((info.help or "").split())
    named = next((e for e in (kind, *get_args(kind)) if _is_choice(e)), None)
    if named is None:
        return told
    return f"{told} One of {', '.join(f'`{each.value}`' for each in named)}.".strip()


def _is_choice(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _listed(names: str | list[str] | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), encoding="utf-8")
