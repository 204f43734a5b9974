"""Rules about the tests themselves: where each lies, what keeps a promise, parts, the budget."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from tests import budget

ROOT = Path(__file__).parents[1]
TEST_FILES = sorted((ROOT / "tests").rglob("test_*.py"))
OVER_MAX = 3
APART = {
    "test_durations.py": "what `make test` adds to pytest",
    "test_extras.py": "what extras of the package ask for",
    "test_image.py": "docker/Dockerfile, and the script that builds it",
    "test_keys.py": "every key of every shipped recipe",
    "test_mutants.py": "the list of `make mutants`, and its runner",
    "test_public_reports.py": "a table of tests",
    "test_suite.py": "the tests themselves",
    "test_tidy.py": "the code itself",
    "test_wheel.py": "the package, where it is installed",
}
"""Test modules at the top of `tests`, each with what it is about: no module, package or run."""
APART_MAX = 15


def find_test(name: str) -> ast.FunctionDef | None:
    """Return the function of a test by its name below `tests`."""
    file, _, function = name.partition("::")
    path = ROOT / "tests" / file
    body = ast.parse(path.read_text("utf-8")).body if path.is_file() else []
    for each in body:
        if isinstance(each, ast.FunctionDef) and each.name == function.partition("[")[0]:
            return each
    return None


def is_slow(name: str) -> bool:
    """Say whether `make test` runs no case of a test."""
    test = find_test(name)
    assert test
    text = (ROOT / "tests" / name.partition("::")[0]).read_text("utf-8")
    marked = any(ast.unparse(each) in ("pytest.mark.slow", "slow") for each in test.decorator_list)
    return marked or bool(re.search(r"^pytestmark = .*slow", text, re.MULTILINE))


def promises() -> list[tuple[str, list[str], list[str]]]:
    """Return of each promise in docs/architecture.md its fast tests and its real runs."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    table = text.partition("| promise | fast test | real run |\n|---|---|---|\n")[2]
    found = []
    for line in table.partition("\n\n")[0].splitlines():
        _, promise, fast, real, _ = line.split("|")
        found.append((promise.strip(), *(re.findall(r"`(\S+)`", each) for each in (fast, real))))
    return found


def test_each_promise_has_a_fast_test_and_a_real_run_in_make_test() -> None:
    rows = promises()

    assert len(rows) >= 20
    for promise, fast, real in rows:
        assert fast, promise
        assert real, promise
        assert [each for each in fast + real if find_test(each) is None] == [], promise
        assert [each for each in fast + real if is_slow(each)] == [], promise


def is_in_place(name: str) -> bool:
    """Say whether a test module, by its path below `tests`, lies where its subject lies."""
    path = Path(name)
    if len(path.parts) == 1:
        return name in APART
    if path.parts[0] == "scenarios":
        return len(path.parts) > 2
    folder = ROOT / path.parent
    if not (folder / "__init__.py").is_file():
        return False
    modules = {each.stem for each in folder.glob("*.py")} - {"__init__"}
    subjects = {each.strip("_") for each in modules} | {folder.name}
    words = path.stem.removeprefix("test_").split("_")
    return any("_".join(words[: n + 1]) in subjects for n in range(len(words)))


def test_each_test_module_lies_where_its_subject_lies() -> None:
    names = [path.relative_to(ROOT / "tests").as_posix() for path in TEST_FILES]

    assert [each for each in names if not is_in_place(each)] == []
    assert sorted(APART) == [each for each in names if "/" not in each]
    assert all(APART.values())
    assert len(APART) <= APART_MAX


@pytest.mark.parametrize(
    ("name", "does"),
    [
        ("launcher/job/test_rules.py", True),
        ("launcher/job/test_rules_of_megatron.py", True),
        ("launcher/job/test_job_of_a_team.py", True),
        ("recipes_training/test_main.py", True),
        ("scenarios/recovery/test_anything.py", True),
        ("launcher/test_rules.py", False),
        ("launcher/job/test_rule.py", False),
        ("launcher/job/test_rulesets.py", False),
        ("launcher/running/test_local.py", False),
        ("scenarios/test_anything.py", False),
        ("test_anything.py", False),
    ],
)
def test_place_of_a_test_module_is_told_by_its_name(name: str, does: bool) -> None:
    assert is_in_place(name) == does


def parts() -> dict[str, list[str]]:
    text = (ROOT / "Makefile").read_text("utf-8")
    return {
        name: shlex.split(words)
        for name, words in re.findall(r"^PART_(\w+) := (.*)$", text, re.MULTILINE)
    }


def holds(words: list[str], path: Path) -> bool:
    """Say whether pytest, given these words, would collect a file."""
    name = path.relative_to(ROOT)
    left_out = [each.removeprefix("--ignore=") for each in words if each.startswith("--ignore=")]
    taken = [each for each in words if not each.startswith("-")]
    return any(name.is_relative_to(each) for each in taken) and not any(
        name.is_relative_to(each) for each in left_out
    )


def test_each_test_file_belongs_to_one_part_of_test_long() -> None:
    known = parts()
    names = re.search(r"^PARTS := (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)

    assert names
    assert sorted(names[1].split()) == sorted(known)
    for path in TEST_FILES:
        assert len([name for name, words in known.items() if holds(words, path)]) == 1, path


def test_parts_are_those_of_the_documentation() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    table = text.partition("| part | what it holds |\n|---|---|\n")[2].partition("\n\n")[0]

    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(parts())


@pytest.mark.parametrize("name", sorted(budget.OVER) or ["none"])
def test_tests_over_the_budget_are_there_and_have_a_reason(name: str) -> None:
    assert len(budget.OVER) <= OVER_MAX
    if budget.OVER:
        assert budget.OVER[name]
        assert find_test(name.removeprefix("tests/")), name
