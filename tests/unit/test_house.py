"""The rules of the house that linters do not know: size, docstrings, imports, the environment.

Each rule is a function of one file's source, so that it is shown to refuse a bad file as well as to pass ours.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("coordinator", "stage", "gateway", "fakering")
MAX_LINES = 400
MAY_IMPORT_RAY = ("stage/ray_ring/", "stage/actor.py")
COMPOSITION_ROOT = "gateway/launch.py"


def sources(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return [path for path in found if "gateway/pb" not in path.as_posix()]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def too_long(name: str, source: str) -> str | None:
    lines = source.count("\n")
    return f"{lines} lines, at most {MAX_LINES}" if lines > MAX_LINES else None


def no_docstring(name: str, source: str) -> str | None:
    return None if ast.get_docstring(ast.parse(source)) else "opens with no docstring"


def imported_roots(source: str) -> set[str]:
    """The top-level packages that a file imports anywhere, also inside functions."""
    roots: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            roots |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            roots.add(node.module.split(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            roots |= {str(a.value).split(".")[0] for a in node.args if isinstance(a, ast.Constant)}
    return roots


def imports_ray(name: str, source: str) -> str | None:
    allowed = name.startswith(MAY_IMPORT_RAY)
    return None if allowed or "ray" not in imported_roots(source) else "imports ray"


def knows_both_rings(name: str, source: str) -> str | None:
    both = {"stage", "fakering"} <= imported_roots(source)
    return "imports stage and fakering" if both and name != COMPOSITION_ROOT else None


def _runs_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs when the module is imported: function bodies do not, decorators and defaults do."""
    yield node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        children: list[ast.AST] = [*node.decorator_list, node.args]
    elif isinstance(node, ast.Lambda):
        children = [node.args]
    else:
        children = list(ast.iter_child_nodes(node))
    for child in children:
        yield from _runs_at_import(child)


def reads_environment(name: str, source: str) -> str | None:
    for node in _runs_at_import(ast.parse(source)):
        text = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""
        if re.fullmatch(r"(os\.)?(environ|getenv)", text):
            return f"line {getattr(node, 'lineno', 0)} reads the environment at import"
    return None


def global_statement(name: str, source: str) -> str | None:
    found = any(isinstance(node, ast.Global) for node in ast.walk(ast.parse(source)))
    return "rebinds a global" if found else None


Rule = Callable[[str, str], str | None]
EVERYWHERE: tuple[Rule, ...] = (too_long, no_docstring)
IN_ROOMS: tuple[Rule, ...] = (imports_ray, knows_both_rings, reads_environment, global_statement)


def broken(rules: tuple[Rule, ...], paths: list[Path]) -> list[str]:
    found = []
    for path in paths:
        source = path.read_text(encoding="utf-8")
        found += [
            f"{name_of(path)}: {why}" for rule in rules if (why := rule(name_of(path), source))
        ]
    return found


def test_every_file_is_short_and_says_what_it_is_for() -> None:
    assert broken(EVERYWHERE, sources(*ROOMS, "tests")) == []


def test_every_room_keeps_the_rules_of_the_house() -> None:
    assert broken(IN_ROOMS, sources(*ROOMS)) == []


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (too_long, "stage/a.py", "x = 1\n" * (MAX_LINES + 1)),
        (no_docstring, "stage/a.py", "x = 1\n"),
        (no_docstring, "stage/__init__.py", ""),
        (imports_ray, "stage/stage.py", "def f():\n    import ray.util\n"),
        (imports_ray, "gateway/a.py", "from ray import remote\n"),
        (imports_ray, "gateway/a.py", "importlib.import_module('ray.util')\n"),
        (knows_both_rings, "gateway/cli/app.py", "import stage.plan\nfrom fakering import ring\n"),
        (reads_environment, "stage/a.py", "import os\nHOME = os.environ['HOME']\n"),
        (reads_environment, "stage/a.py", "from os import getenv\ndef f(x=getenv('A')): ...\n"),
        (reads_environment, "stage/a.py", "class A:\n    b = os.getenv('B')\n"),
        (global_statement, "stage/a.py", "def f():\n    global x\n    x = 1\n"),
    ],
)
def test_a_file_that_breaks_a_rule_is_found(rule: Rule, name: str, source: str) -> None:
    assert rule(name, source)


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (too_long, "stage/a.py", "x = 1\n" * MAX_LINES),
        (imports_ray, "stage/ray_ring/crew.py", "import ray\n"),
        (imports_ray, "stage/a.py", "from stage import ray_ring\nfrom .ray import x\n"),
        (knows_both_rings, COMPOSITION_ROOT, "import stage.plan\nimport fakering.ring\n"),
        (reads_environment, "stage/a.py", "def f():\n    return os.environ.get('A')\n"),
        (reads_environment, "stage/a.py", "f = lambda: os.getenv('A')\n"),
    ],
)
def test_a_file_that_keeps_a_rule_passes(rule: Rule, name: str, source: str) -> None:
    assert rule(name, source) is None


def test_proto_holds_no_python() -> None:
    assert list((ROOT / "proto").rglob("*.py")) == []
    assert list((ROOT / "proto").rglob("*.proto"))


def test_tests_are_no_package_that_could_shadow_a_room() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_every_dependency_is_pinned_and_no_pin_names_a_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[<>=]", each)[0] for each in project["dependencies"]}
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower().replace("_", "-")
    assert [name for name in declared if f"\n{name}==" not in pinned] == []
    assert "://" not in pinned
    assert "+" not in pinned
