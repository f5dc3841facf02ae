"""What the manual says of the program is so: the reference is current, and flags and files that it names are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from gateway.cli.reference import reference

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUNBOOKS = sorted((ROOT / "docs" / "runbooks").glob("*.md"))
COMMAND = re.compile(
    r"ringserve (serve|plan|chat|demo|chaos|bench \w+|rings \w+|cache \w+)\b([^\n`|]*)"
)
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def flags_by_command() -> dict[str, set[str]]:
    sections = re.split(r"^## `ringserve ", reference(), flags=re.MULTILINE)[1:]
    return {
        re.split(r"[ `][A-Z]|`", each)[0].strip(): set(re.findall(r"`(--[\w-]+)`", each))
        for each in sections
    }


def test_the_configuration_reference_is_current() -> None:
    told = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert told == reference(), "make docs writes it anew"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_uses_only_flags_that_there_are(page: Path) -> None:
    known = flags_by_command()
    assert known["bench multiturn"] >= {"--sessions", "--openai"}
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for command, rest in COMMAND.findall(text):
        for flag in re.findall(r"(?<![\w-])(--[\w-]+)", rest.partition("#")[0]):
            assert flag in known[command] | {"--help"}, f"ringserve {command} has no {flag}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_links_to_files_that_there_are(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def logged(module: Path, level: str) -> list[str]:
    """What it writes at that level, as patterns: values may be anything."""
    calls = (node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Call))
    texts = (
        str(call.args[0].value)
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == level
        and isinstance(call.args[0], ast.Constant)
    )
    return [".+".join(map(re.escape, re.split(r"%[-.\w]*[sdgf]", text))) for text in texts]


@pytest.mark.parametrize("page", RUNBOOKS, ids=lambda page: page.name)
def test_a_runbook_quotes_lines_that_are_written(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```log\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            level, logger, words = line.split(" ", 2)
            module = ROOT / f"{logger.replace('.', '/')}.py"
            assert any(re.match(each, words) for each in logged(module, level.lower())), line


def test_every_runbook_is_in_the_index() -> None:
    index = (ROOT / "docs" / "runbooks" / "README.md").read_text(encoding="utf-8")
    assert {page.name for page in RUNBOOKS} == {"README.md", *LINK.findall(index)}
