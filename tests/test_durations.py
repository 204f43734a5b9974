"""What `make test` adds to pytest, on tests made for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import budget, code_budget

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests import budget, durations

budget.BUDGET_S = 0.4
budget.OVER = {
    "tests/few/test_few.py::test_brief": "a reason",
    "tests/few/test_few.py::test_either[b]": "another",
}
budget.measure_slowness = lambda: 1.0
budget.judge_processors = lambda seconds, slowness: ["all"] * (seconds / slowness > 0.1)


def pytest_addoption(parser):
    parser.addoption("--judge", action="store_true")


def pytest_configure(config):
    if config.getoption("--judge"):
        durations.register(config)
"""
TESTS = """
import subprocess
from pathlib import Path

import pytest

from tests.apart import apart


def test_brief():
    pass


def test_long():
    subprocess.run(["sleep", "0.5"])


def test_long_for_others():
    with apart():
        subprocess.run(["sleep", "0.5"])


@pytest.mark.parametrize("which", ["a"])
def test_either(which):
    pass


def test_fails():
    assert not 1


def test_fails_once():
    marker = Path(__file__).with_name("marker")
    assert marker.exists() or marker.touch()
"""


@pytest.mark.parametrize("options", [(), ("-p", "xdist", "-n2")], ids=["one-process", "xdist"])
def test_seconds_are_judged_and_failed_tests_run_again(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    folder = tmp_path / "tests" / "few"
    folder.mkdir(parents=True)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    (folder / "test_few.py").write_text(TESTS)

    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "--judge", "-m", "not slow", *options],
        cwd=tmp_path,
        # No other plugin: to import Hypothesis and Hydra takes a second, in each of five processes.
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert ended.returncode == 1
    name = "tests/few/test_few.py::test"
    lines = ended.stdout.splitlines()
    assert [each for each in lines if each.startswith(("flaky", "failed twice"))] == [
        f"failed twice: {name}_fails",
        f"flaky: {name}_fails_once",
    ]
    problems = sorted(each for each in lines if each.startswith("over budget: "))
    assert [each.split()[2] for each in problems] == [
        "all",
        f"{name}_brief",
        f"{name}_either[b]",
        f"{name}_long",
    ]
    assert [each.split()[1] for each in lines if each.endswith("  tests/few")] == ["tests/few"]


@pytest.mark.parametrize(
    ("seconds", "slowness", "is_over"),
    [(90.0, 1.0, False), (110.0, 1.0, True), (110.0, 1.5, False), (110.0, 0.5, True)],
)
def test_seconds_of_processors_are_judged_by_their_speed(
    monkeypatch: pytest.MonkeyPatch, seconds: float, slowness: float, is_over: bool
) -> None:
    budgets = code_budget.Budgets(code_lines=[], processor_seconds=[200, 100])
    monkeypatch.setattr(code_budget, "read", lambda: budgets)

    assert bool(budget.judge_processors(seconds, slowness)) == is_over


@pytest.mark.parametrize(
    ("seconds", "slowness", "is_over"),
    [(18.0, 1.0, False), (22.0, 1.0, True), (22.0, 1.5, False), (22.0, 0.5, True)],
)
def test_budget_of_a_slow_machine_is_larger(seconds: float, slowness: float, is_over: bool) -> None:
    assert (budget.judge("any", seconds, slowness) is not None) == is_over
