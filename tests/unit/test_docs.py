"""What the manual says of the program is so: the reference is current, and flags and files that it names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.cli.reference import reference

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"ringserve (serve|plan|chat|demo|bench \w+|rings \w+|cache \w+)\b([^\n`|]*)")
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
