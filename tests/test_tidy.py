"""Rules about the code itself: sizes, names, characters, cycles."""

from __future__ import annotations

import ast
import graphlib
import io
import itertools
import re
import subprocess
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import code_budget
from tests.code_budget import (
    FILE,
    SLACK_MAX,
    Budgets,
    Entry,
    judge_history,
    judge_lines,
    limits,
    parse_budgets,
)
from tests.tidy_exceptions import (
    FOREIGN_TARGETS,
    LARGE_FOLDERS,
    MODULES_MAX,
    PUBLIC_API,
)

ROOT = Path(__file__).parents[1]
PACKAGES = ("launcher", "resilience", "recipes_training")
LINES_MAX = 500
FUNCTION_LINES_MAX = 60
PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
PICKLING = re.compile(r"(gather_object|_object_list)\(|torch\.load\((?!.*weights_only=True)")
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

PRODUCT = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in PACKAGES]
GOLDEN = ROOT / "tests" / "golden"
TEMPLATES = sorted((ROOT / "templates").rglob("*.j2"))

FIRST = Entry(why="first", lines={"a": 100, "room/later": 30})


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


def test_no_source_unpickles_bytes_of_another_process() -> None:
    """Collectives of objects pickle; `torch.load` may unpickle more than tensors and plain data."""
    found = [f"{path}: {name}" for path in PRODUCT for name in imported(path) & PICKLES]
    for path in PRODUCT:
        lines = path.read_text("utf-8").splitlines()
        found += [f"{path}: {line}" for line in lines if PICKLING.search(line)]

    assert found == []


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


def test_every_module_is_used_by_product_or_documented() -> None:
    """A module that only tests import is dead, whatever it does."""
    modules = {module_name(path) for path in PRODUCT if path.stem not in {"__init__", "__main__"}}
    used = set(itertools.chain.from_iterable(imported(path) for path in PRODUCT))
    # Processes are started by their module's name, and commands resolved by that of their function.
    text = "".join(path.read_text("utf-8") for path in [*PRODUCT, *TEMPLATES])
    forms = ('{}"', '"{}:', "-m {}")
    named = {
        module for module in modules - used if any(form.format(module) in text for form in forms)
    }

    assert modules - used - named == set(PUBLIC_API)


@pytest.mark.parametrize(("module", "documented"), PUBLIC_API.items())
def test_public_api_is_documented(module: str, documented: tuple[str, str]) -> None:
    page, words = documented

    assert words in (ROOT / page).read_text("utf-8"), module


def test_a_public_class_name_stands_once_in_resilience() -> None:
    found = defaultdict(set)
    for path in (path for path in PRODUCT if module_name(path).startswith("resilience.")):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].add(module_name(path))

    assert not {name: modules for name, modules in found.items() if len(modules) > 1}


def test_a_folder_holds_few_modules() -> None:
    """Numbers of the exceptions may only become smaller."""
    numbers = Counter(
        path.parent.relative_to(ROOT).as_posix() for path in PRODUCT if path.stem != "__init__"
    )
    large = {folder: number for folder, number in numbers.items() if number > MODULES_MAX}

    assert set(large) == set(LARGE_FOLDERS), "take out of the list what is small enough"
    assert {each: n for each, n in large.items() if n > LARGE_FOLDERS[each]} == {}


def test_nobody_assigns_to_the_attributes_of_others() -> None:
    """Objects tell each other what to do; an attribute is written by its own class.

    A class whose name begins with an underscore is a record of its module, which may write it.
    What a function has just made is its own, and so is a library's module.
    """
    found = {
        path.relative_to(ROOT).as_posix(): set(foreign_targets(parse(path)))
        for path in PRODUCT
        if "resilience/tiered/memoryd/" not in path.as_posix()
    }

    assert {file: targets for file, targets in found.items() if targets} == {
        file: set(targets.split()) for file, (_, targets) in FOREIGN_TARGETS.items()
    }


def package_of(path: Path) -> str:
    """Return `launcher/job` for launcher/job/rules.py, `launcher` for what lies above, `tests`."""
    parts = path.relative_to(ROOT).parts[:-1]
    return parts[0] if parts[0] in ("tests", "benchmarks") else "/".join(parts[:2])


def git(*words: str) -> str:
    command = ["git", "-c", "safe.directory=*", *words]
    return subprocess.check_output(command, cwd=ROOT, text=True, timeout=60)


def test_each_package_keeps_to_its_code_lines() -> None:
    lines: Counter[str] = Counter()
    for path in SOURCES:
        lines[package_of(path)] += count_code_lines(path)
    for path in (each for each in GOLDEN.rglob("*") if each.is_file()):
        lines["golden"] += len(path.read_text("utf-8").splitlines())

    assert judge_lines(lines, limits(code_budget.read().code_lines)) == []


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a checkout without its history")
def test_limits_have_only_been_appended_to_and_have_not_grown() -> None:
    name = FILE.relative_to(ROOT).as_posix()
    commits = git("log", "--reverse", "--format=%H", "--", name).split()
    versions = [parse_budgets(git("show", f"{each}:{name}")) for each in commits]

    assert judge_history([*versions, code_budget.read()]) == []


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ({"a": 100, "b": 50}, []),
        ({"a": 101, "b": 50}, ["a has 101 code lines, its limit is 100"]),
        ({"a": 100, "b": 50, "new": 1}, ["new has 1 code lines, its limit is 0"]),
        ({"a": 100 - SLACK_MAX, "b": 50}, []),
        ({"a": 99 - SLACK_MAX, "b": 50}, ["append the reduction"]),
    ],
)
def test_package_above_or_far_below_its_limit_is_told(
    lines: dict[str, int], words: list[str]
) -> None:
    problems = judge_lines(lines, {"a": 100, "b": 50, "room/later": 900})

    assert len(problems) == len(words)
    assert all(word in each for word, each in zip(words, problems, strict=True))


@pytest.mark.parametrize(
    ("entries", "seconds", "words"),
    [
        ([FIRST], [900], []),
        ([FIRST, Entry(why="it came", lines={"a": 30, "room/later": -30})], [900, 890], []),
        ([FIRST, Entry(why="more", lines={"a": 1})], [900], ["more: adds 1 code lines"]),
        ([Entry(why="first", lines={"a": 101})], [900], ["an entry of code_lines was changed"]),
        ([], [900], ["an entry of code_lines was changed"]),
        ([FIRST], [901], ["an entry of processor_seconds was changed"]),
        ([FIRST], [900, 901], ["processor_seconds become more"]),
    ],
)
def test_entries_that_change_or_add_are_told(
    entries: list[Entry], seconds: list[int], words: list[str]
) -> None:
    first = Budgets(code_lines=[FIRST], processor_seconds=[900])

    problems = judge_history([first, Budgets(code_lines=entries, processor_seconds=seconds)])

    assert len(problems) == len(words)
    assert all(word in each for word, each in zip(words, problems, strict=True))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def count_code_lines(path: Path) -> int:
    """Count lines with code on them: no blank ones, comments or docstrings."""
    text = path.read_text("utf-8")
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped and token.string:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            lines -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def foreign_targets(tree: ast.Module) -> Iterator[str]:
    """Yield `x.attribute` for each assignment to a public attribute of somebody else's."""
    libraries = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        and (getattr(node, "module", None) or node.names[0].name).partition(".")[0] not in PACKAGES
        for alias in node.names
    }
    records = {
        field
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name.startswith("_")
        for field in declared_fields(node)
    }
    for target, own in assignments(tree, {"self", "cls"} | libraries):
        root = target.value
        while isinstance(root, ast.Attribute):
            root = root.value
        is_library = isinstance(root, ast.Name) and root.id in libraries
        is_own = isinstance(target.value, ast.Name) and target.value.id in own
        if not (is_library or is_own or target.attr in records or target.attr.startswith("_")):
            yield ast.unparse(target)


def declared_fields(node: ast.ClassDef) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id
        elif isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self":
            yield each.attr
        elif isinstance(each, ast.Assign):
            yield from (target.id for target in each.targets if isinstance(target, ast.Name))


def assignments(node: ast.AST, own: set[str]) -> Iterator[tuple[ast.Attribute, set[str]]]:
    """Yield each attribute that is written, with the names that are the writer's own there."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from assignments(child, own | made_here(child, own))
            continue
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            yield child, own
        yield from assignments(child, own)


def made_here(function: ast.AST, own: set[str]) -> set[str]:
    """Return the names of what a function makes: by a class, or by a library's function."""
    made = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            words = ast.unparse(node.value.func).split(".")
            if words[-1].lstrip("_")[:1].isupper() or (words[0] in own and words[0] != "self"):
                made |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    return made
