"""Rules about the code itself: sizes, names, characters, cycles."""

from __future__ import annotations

import ast
import graphlib
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("launcher", "resilience", "training")
LINES_MAX = 500
FUNCTION_LINES_MAX = 60
BANNED_MODULES = {
    "utils",
    "util",
    "helpers",
    "common",
    "misc",
    "base",
    "manager",
    "handler",
    "impl",
}
SOURCES = sorted(
    path for folder in (*PACKAGES, "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")
)


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def test_no_file_is_over_its_limit() -> None:
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in SOURCES}

    assert {str(path): n for path, n in lengths.items() if n > LINES_MAX} == {}


def test_no_function_is_over_its_limit() -> None:
    long = [
        f"{path}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in functions(path)
        if (node.end_lineno or 0) - node.lineno + 1 > FUNCTION_LINES_MAX
    ]

    assert long == []


def test_modules_are_named_after_what_they_hold() -> None:
    assert [str(path) for path in SOURCES if path.stem in BANNED_MODULES] == []


def test_sources_are_ascii() -> None:
    assert [str(path) for path in SOURCES if not path.read_text("utf-8").isascii()] == []


def test_modules_do_not_import_each_other_in_a_ring() -> None:
    """Imports at the top of modules, those of functions and type checkers included."""
    graph = {
        module_name(path): imported(path) for path in SOURCES if path.parts[-1] != "conftest.py"
    }
    known = set(graph)
    sorter = graphlib.TopologicalSorter(
        {name: (others & known) - {name} for name, others in graph.items()}
    )

    try:
        order = list(sorter.static_order())
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
    assert len(order) >= len(known)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_shipped_folder_is_in_the_wheel() -> None:
    text = (ROOT / "pyproject.toml").read_text()

    for folder in ("conf", "recipes", "templates"):
        assert f'{folder} = "launcher/_data/{folder}"' in text


def test_every_module_is_used() -> None:
    """A module that nothing imports and nobody starts is dead."""
    used = set(itertools.chain.from_iterable(imported(path) for path in SOURCES))
    modules = {
        module_name(path): path
        for path in SOURCES
        if path.relative_to(ROOT).parts[0] in PACKAGES and path.stem not in {"__init__", "__main__"}
    }

    # The node agent imports what the rendered command names, and scripts start what they name.
    named = {"training.preload", "launcher.clusters.beside"}
    assert sorted(set(modules) - used - named) == []
