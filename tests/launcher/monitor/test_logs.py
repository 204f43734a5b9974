from __future__ import annotations

from pathlib import Path

import pytest

from launcher.clusters.running.cluster import LogLine
from launcher.commands.logs import _of_last_start
from launcher.monitor import logs
from launcher.monitor.logs import (
    LogReader,
    failure_lines,
    first_end,
    is_warning,
    last_words,
    plain,
    read_tail,
)

AGENT = "resilience.agent node-0: the run ends with exit status 1: rank 0 "
TRACEBACK = ["Traceback (most recent call last):", "  File x", "KeyError: 'a'"]


def test_traceback_of_the_message_is_found_among_others() -> None:
    other = ["Traceback (most recent call last):", "  File y", "OSError: reset"]

    assert failure_lines([*other, "noise", *TRACEBACK, *other], "KeyError: 'a'") == TRACEBACK


def test_message_without_a_traceback_needs_no_other_lines() -> None:
    assert failure_lines(["recipes_training: no data", *TRACEBACK], "DataError: no data") == []


def test_without_a_message_the_first_traceback_is_shown() -> None:
    assert failure_lines(["noise", *TRACEBACK, f"{AGENT}failed"], None) == TRACEBACK


def test_without_message_and_traceback_the_lines_before_the_agents_report_are_shown() -> None:
    lines = ["usage: x", "error: no such option", f"{AGENT}failed", *TRACEBACK]

    assert failure_lines(lines, None) == lines[:3]


def test_what_srun_says_that_is_no_error_is_no_reason() -> None:
    noise = "srun: cluster configuration lacks support for cpu binding"

    assert failure_lines([noise, "srun: error: n1: task 0: Killed"], None) == [
        "srun: error: n1: task 0: Killed"
    ]


@pytest.mark.parametrize(
    ("lines", "end"),
    [
        ([], None),
        (["srun: error: n1: task 0: Terminated"], None),
        (["n1: task 0: Exited with exit code 2", "srun: error: n2: task 1: Killed"], ("n2", None)),
        ([f"srun: error: n{n}: task {n}: Exited with exit code {n}" for n in (3, 2)], ("n3", 3)),
        (["srun: error: n[1-2]: tasks 0-1,3: Exited with exit code 143"], ("n[1-2]", 143)),
        (
            [
                "srun: error: n1: task 0: Exited with exit code 75",
                "job.sbatch: the run gave up with status 75; it is queued again",
                "srun: error: n2: task 1: Exited with exit code 1",
            ],
            ("n2", 1),
        ),
        (
            [
                "srun: error: n1: task 0: Killed",
                "slurmstepd-n1: error: *** JOB 3 ON n1 CANCELLED AT 2026 DUE TO JOB REQUEUE ***",
            ],
            None,
        ),
    ],
)
def test_task_that_ended_first_is_found_in_the_last_start(
    lines: list[str], end: tuple[str, int | None] | None
) -> None:
    assert first_end(lines) == end


def test_last_words_are_those_of_an_agent_or_its_script() -> None:
    said = ["resilience.agent n1: waits", "python -m resilience.agent: error: no x", "else"]
    script = ["job.sbatch: no command module"]

    assert [last_words(each) for each in (said, said[:1], script, ["else"])] == [
        "no x", "waits", "no command module", "",
    ]  # fmt: skip


def test_a_start_is_not_told_to_have_failed_of_what_the_one_before_did() -> None:
    before = ["disk full", *TRACEBACK, f"{AGENT}failed"]
    begun = "resilience.agent node-0: start 1 of the run begins, counted from 0"

    assert failure_lines([*before, begun, "no such bucket"], None) == ["no such bucket"]
    assert failure_lines([*before, begun, "no such bucket"], "KeyError: 'a'") == []


def test_each_node_is_taken_from_where_its_own_last_start_begins() -> None:
    begun = "resilience.agent {}: start 1 of the run begins, counted from 0"
    said = [
        ("a", "old"), ("a", begun.format("a")), ("a", "new"),
        ("b", "old"), ("b", begun.format("b")), ("b", "other"), ("c", "alone"),
    ]  # fmt: skip

    lines = _of_last_start([LogLine(time=0.0, source=who, text=text) for who, text in said])

    assert [(each.source, each.text) for each in lines] == [
        ("a", "new"), ("b", "other"), ("c", "alone"),
    ]  # fmt: skip


def test_long_traceback_keeps_its_end() -> None:
    deep = [TRACEBACK[0], *[f"  line {number}" for number in range(500)], "KeyError: 'a'"]

    found = failure_lines(deep, "KeyError: 'a'\nmore")

    assert (found[0], found[-1], len(found)) == (deep[0], deep[-1], 61)


def test_reader_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "node-0.log"
    path.write_text("of an earlier run\n")
    reader = LogReader(path)
    with path.open("a") as file:
        file.write("one\ntw")
        file.flush()
        first = reader.read_new()
        file.write("o\n")

    assert (first, reader.read_new()) == (["one"], ["two"])


def test_reader_takes_a_part_of_a_log_that_is_larger_than_memory(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(logs, "READ_BYTES_MAX", 10)
    path = tmp_path / "node-0.log"
    path.write_text("first line\nsecond\n")
    reader = LogReader(path, from_start=True)

    assert reader.read_new() == [f"the 8 bytes before are only in {path}", "ne", "second"]
    with path.open("a") as file:
        file.write("x" * 25 + "\nend\n")
    assert [reader.read_new() for _ in range(4)] == [["x" * 10], ["x" * 10], ["xxxxx", "end"], []]


def test_missing_log_has_no_lines(tmp_path: Path) -> None:
    assert LogReader(tmp_path / "x").read_new() == read_tail(tmp_path / "x") == []


def test_log_cannot_command_the_terminal() -> None:
    assert plain("\x1b[2Ja\tb\n\x07\r") == r"\x1b[2Ja b\n\x07"


def test_warnings_are_told_from_other_lines() -> None:
    lines = ["a.py:1: FutureWarning: x", "WARNING:root:x", "  warnings.warn(", "step 1"]

    assert [is_warning(line) for line in lines] == [True, True, False, False]
