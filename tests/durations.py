"""Additions of `make test` to pytest: seconds by folder, the budget, and a second run of failures.

Under xdist the processes that run tests measure, and the one that starts them adds up and judges.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

import pytest

from tests import budget
from tests.apart import seconds_apart

_RERUNS_MAX = 20
"""Of more that fail, chance is not the cause."""
# Of Linux, linux/prctl.h.
_SET_CHILD_SUBREAPER = 36
_SAMPLE_PERIOD_S = 5.0
_OWN_S = "own_s"
_SLOWNESS = "slowness"


class Meter:
    """Measures each test where it runs."""

    def __init__(self) -> None:
        self._own_s = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        apart_s, begin_s = seconds_apart(), time.monotonic()
        try:
            return (yield)
        finally:
            self._own_s = time.monotonic() - begin_s - (seconds_apart() - apart_s)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Any:
        report = yield
        if call.when == "call":
            report.user_properties.append((_OWN_S, self._own_s))
            is_slow = item.get_closest_marker("slow") is not None
            is_over = self._own_s > budget.BUDGET_S and not is_slow
            if is_over or item.nodeid in budget.OVER:
                report.user_properties.append((_SLOWNESS, budget.measure_slowness()))
        return report


class Descendants:
    """All processes below the session: those of its tests, and those that a test has left.

    A process whose parent ends becomes a child of this one, which counts the time of its
    processor when it ends.
    """

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def cpu_seconds(self) -> float:
        """Return the seconds of processors of all that have ended, and of this process."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._reap()
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(each.ru_utime + each.ru_stime for each in used)


class Speed:
    """Samples of the processor's speed beside the tests, as slowness: 1 on the usual machine."""

    def __init__(self) -> None:
        self._samples: list[float] = []
        self._ended = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_PERIOD_S):
            self._samples.append(budget.measure_processor())

    def end(self) -> float:
        """Return the middle of all samples; 1 where there is none."""
        self._ended.set()
        return statistics.median(self._samples or [1.0])


class Judge:
    """Adds up what all processes report, and says at the end what is wrong."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: dict[str, float] = defaultdict(float)
        self._seen: set[str] = set()
        self._problems: list[str] = []
        self._failed: list[str] = []
        self._descendants = Descendants()
        self._speed = Speed()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[folder_of(report.nodeid)] += report.duration
        if report.failed and report.nodeid not in self._failed:
            self._failed.append(report.nodeid)
        properties = dict(report.user_properties)
        if report.when == "call":
            self._seen.add(report.nodeid)
            if report.passed and _SLOWNESS in properties:
                problem = budget.judge(report.nodeid, properties[_OWN_S], properties[_SLOWNESS])
                self._problems += [problem] if problem else []

    # After xdist's, which ends the processes that have run tests.
    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        for name in budget.missing(self._seen):
            self._problems.append(f"{name} is no more; take it out of tests/budget.py")
        cpu_s, slowness = self._descendants.cpu_seconds(), self._speed.end()
        self._processors = (
            f"{cpu_s:8.1f}  of processors that are {slowness:.2f} times as slow as usual"
        )
        if _is_whole(self._config):
            self._problems += budget.judge_processors(cpu_s, slowness)
        if self._problems and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any, exitstatus: int) -> None:
        terminalreporter.section("seconds by folder")
        for folder, seconds in sorted(self._seconds.items(), key=lambda each: -each[1]):
            terminalreporter.line(f"{seconds:8.1f}  {folder}")
        terminalreporter.line(f"{sum(self._seconds.values()):8.1f}  together")
        terminalreporter.line(self._processors)
        if self._problems:
            terminalreporter.section("budget")
        for problem in self._problems:
            terminalreporter.line(f"over budget: {problem}", red=True)
        if self._failed and exitstatus != pytest.ExitCode.INTERRUPTED:
            self._run_again(terminalreporter)

    def _run_again(self, terminalreporter: Any) -> None:
        """Say of each test that failed whether it fails again; the session failed either way."""
        terminalreporter.section("failed tests, run again")
        for name in sorted(self._failed)[:_RERUNS_MAX]:
            again = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name],
                cwd=self._config.invocation_params.dir,
                capture_output=True,
                text=True,
            )
            word = "failed twice" if again.returncode else "flaky"
            terminalreporter.line(f"{word}: {name}", red=True)
        if (more := len(self._failed) - _RERUNS_MAX) > 0:
            terminalreporter.line(f"and {more} more, which were not run again")


def _is_whole(config: pytest.Config) -> bool:
    """Say whether all tests that are not slow have been asked for, as `make test` does."""
    is_all = config.args_source is not pytest.Config.ArgsSource.ARGS
    return is_all and config.option.markexpr == "not slow" and not config.option.keyword


def folder_of(nodeid: str) -> str:
    """Return the folder of a test, two below `tests` at most."""
    return "/".join(PurePosixPath(nodeid.partition("::")[0]).parent.parts[:3])


def register(config: pytest.Config) -> None:
    """Measure in processes that run tests, and judge in the one that hears of all."""
    is_worker = hasattr(config, "workerinput")
    if is_worker or not config.getoption("numprocesses", None):
        config.pluginmanager.register(Meter())
    if not is_worker:
        config.pluginmanager.register(Judge(config))
