"""The layout of the package: imports go one way, folders and files stay small.

Every import counts: those inside functions and those for type checkers too.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "dualview"

ROOMS = (
    *("io", "options", "tasks", "records", "metrics", "anatomy", "variants", "models", "learning", "duality"),
    *("comparison", "analyses", "store", "sweep", "report", "lab", "web", "pieces", "plot", "verbs", "cli"),
)
"""A room imports only rooms to its left; CONTRIBUTING.md has the same list."""
MOST_TOP_LEVEL = 6
MOST_LINES = 450
MOST_FILES = 17


@cache
def modules() -> dict[str, Path]:
    """Every module by its name within the package; the package itself, which lists the public names, is ''."""
    names = {path: ".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in SOURCE.rglob("*.py")}
    return {name.removesuffix("__init__").rstrip("."): path for path, name in names.items()}


def imported(tree: ast.AST) -> Iterator[str]:
    """The names that a module's imports may load, without `dualview.`; relative imports are not used here."""
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative import"
            found = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (name.removeprefix("dualview.") for name in found if name.startswith("dualview."))


@cache
def graph() -> dict[str, set[str]]:
    """Which modules each module imports. The package's own list of public names is above all rooms and left out."""
    known = modules()
    return {
        name: {other for other in imported(ast.parse(path.read_text(encoding="utf-8"))) if other in known} - {name, ""}
        for name, path in known.items()
        if name not in ("", "__main__")
    }


def cycles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan's strongly connected components of more than one node)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in edges:
        if node not in index:
            visit(node)
    return found


def room(module: str) -> str:
    return module.partition(".")[0]


def test_cycles_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"d"}, "e": {"a"}}
    assert cycles(edges) == [["b", "c"]]


def test_imports_in_functions_and_for_type_checkers_count() -> None:
    text = "if TYPE_CHECKING:\n    import dualview.a.b\ndef f():\n    from dualview.c import d\nimport numpy"
    assert list(imported(ast.parse(text))) == ["a.b", "c", "c.d"]


def test_no_modules_import_each_other() -> None:
    assert len(graph()) > 100
    assert cycles(graph()) == []


def test_rooms_import_only_to_their_left() -> None:
    assert {room(name) for name in graph()} == set(ROOMS)
    wrong = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in others
        if ROOMS.index(room(other)) > ROOMS.index(room(name))
    ]
    assert wrong == []


def test_the_order_is_the_one_that_is_written_down() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    written = re.search(r"```text\n(io .*?)```", text, re.DOTALL)
    assert written is not None
    assert written.group(1).replace("→", " ").split() == list(ROOMS)


def test_few_modules_stand_outside_the_rooms() -> None:
    loose = [path.name for path in SOURCE.glob("*.py") if path.name != "__init__.py"]
    assert len(loose) <= MOST_TOP_LEVEL, loose


def test_no_folder_is_crowded() -> None:
    files = Counter(path.parent for path in SOURCE.rglob("*.py") if path.name != "__init__.py")
    del files[SOURCE / "cli"]  # a file for each verb
    assert max(files.values()) <= MOST_FILES, files.most_common(3)


@pytest.mark.parametrize("kind", ["*.py", "*.js", "*.css", "*.html"])
def test_no_file_is_long(kind: str) -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCE.rglob(kind)}
    assert {path.name: count for path, count in lines.items() if count > MOST_LINES} == {}
