"""The list of `make mutants` follows the code, and its runner tells what tests do not see."""

from __future__ import annotations

import ast
import shlex
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import mutants
from tests.mutants import ROOT, MutantError, main, read_mutants

AREAS = {
    "gate": "comm/gate.py",
    "plan": "checkpointless/plan.py",
    "coordinator": "coordination/coordinator.py",
    "founding": "coordination/founding.py",
    "succession": "coordination/succession.py",
    "hang": "processes/hang.py",
    "move": "state/move.py",
    "messages": "comm/messages.py",
}
TREE = {
    "module.py": "def is_even(number):\n    return number % 2 == 0\n",
    "test_module.py": (
        "from module import is_even\n\n\n"
        "def test_even():\n    assert is_even(2)\n\n\n"
        "def test_odd():\n    assert not is_even(3)\n"
    ),
}
LIST = """
module.py:
  tests: test_module.py
  mutants:
    - name: odd ones are told
      text: |-
        return number % 2 == 0
      becomes: |-
        return True
    - name: large ones are told
      text: |-
        return number % 2 == 0
      becomes: |-
        return number % 2 == 0 and number < 10
    - name: there is a function
      text: |-
        def is_even(number):
      becomes: |-
        def is_odd(number):
"""
ROTTEN = """
module.py:
  tests: test_module.py
  mutants:
    - name: rotten
      text: |-
        return not number % 2
      becomes: |-
        return False
"""
UNTESTED = """
module.py:
  tests: test_module.py::test_none
  mutants:
    - name: untested
      text: |-
        return number % 2
      becomes: |-
        return number
"""


def test_list_follows_the_code() -> None:
    """Each text is there once, what it becomes is a program, and each test is there."""
    problems = []
    for mutant in read_mutants():
        try:
            ast.parse(mutant.apply((ROOT / mutant.file).read_text("utf-8")))
        except (MutantError, OSError, SyntaxError) as error:
            problems.append(f"{mutant.name}: {error}")
        problems += [f"{mutant.name}: no {each}" for each in missing_tests(mutant.tests)]

    assert problems == []


def missing_tests(tests: str) -> list[str]:
    found = [word.partition("[")[0] for word in shlex.split(tests) if word.startswith("tests/")]
    assert found, f"{tests} names no test"
    return [each for each in found if not has_test(*each.split("::"))]


def has_test(file: str, name: str = "") -> bool:
    path = ROOT / file
    return path.is_file() and (not name or f"def {name}(" in path.read_text("utf-8"))


def test_list_is_long_and_names_each_area() -> None:
    all_mutants = read_mutants()

    assert len(all_mutants) >= 60
    assert not [name for name, n in Counter(each.name for each in all_mutants).items() if n > 1]
    for area, file in AREAS.items():
        assert any(each.file.endswith(file) for each in all_mutants), area


def test_text_of_several_lines_is_found_at_any_depth_and_once() -> None:
    source = "if a:\n    if b:\n        pass\n    if c:\n        pass\n"
    mutant = mutants.Mutant(
        name="", file="", text="if c:\n    pass", becomes="if d:\n    x = 1", tests=""
    )

    assert mutant.apply(source) == source.replace("c:\n        pass", "d:\n        x = 1")
    with pytest.raises(MutantError, match="found 2 times"):
        mutant.apply(source + source)


Run = Callable[[str], tuple[int, list[str]]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return what runs a list over a small tree, and looks that it leaves all as it was."""
    root, temporary = tmp_path / "root", tmp_path / "tmp"
    for folder in (root, temporary):
        folder.mkdir()
    for name, text in TREE.items():
        (root / name).write_text(text)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    # No other plugin: to import Hypothesis and Hydra takes a second, in each process of a mutant.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p pytest_timeout")

    def run(text: str) -> tuple[int, list[str]]:
        path = tmp_path / "list.yaml"
        path.write_text(text)
        status = main([], path=path, root=root)
        assert {each.name: each.read_text() for each in root.iterdir()} == TREE
        assert list(temporary.iterdir()) == []
        said = capsys.readouterr()
        return status, f"{said.out}{said.err}".splitlines()

    return run


def test_runner_names_what_is_not_caught(run: Run) -> None:
    status, lines = run(LIST)

    assert status == 1
    assert lines[0].endswith(": odd ones are told: caught by test_module.py::test_odd")
    assert lines[1].endswith(": large ones are told: NOT CAUGHT by test_module.py")
    assert ": there is a function: NOT TRIED: its tests end with status 2" in lines[2]
    assert lines[-1] == "3 mutants, 2 not caught: large ones are told, there is a function"


def test_runner_names_what_has_left_the_code(run: Run) -> None:
    assert run(ROTTEN) == (1, ["rotten: its text is found 0 times in module.py"])


def test_runner_counts_no_tests_that_fail_without_a_mutant(run: Run) -> None:
    status, lines = run(UNTESTED)

    assert status == 1
    assert lines[0] == "its tests end with status 4:"
