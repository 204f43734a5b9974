"""Lines of several logs by their times."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.clusters.running.lines import FolderTail, merge_lines, parse_time, timed_lines


@pytest.mark.parametrize(
    ("line", "time"),
    [
        ("2026-11-24T10:00:00Z a word", 1795514400.0),
        ("2026-11-24T10:00:00.250000000Z a word", 1795514400.25),
        ("2026-11-24T11:00:00.5+01:00 a word", 1795514400.5),
        ("2026-11-24 10:00:00,125+0000 a word", 1795514400.125),
        ("[node-0 rank 1] 2026-11-24T10:00:00Z a word", 1795514400.0),
        ("INFO: 2026-11-24T10:00:00Z a word", 1795514400.0),
        ("2026-99-24T10:00:00Z no day", None),
        ("at 2026-11-24T10:00:00Z within a line", None),
        ("", None),
    ],
)
def test_time_that_a_line_begins_with(line: str, time: float | None) -> None:
    assert parse_time(line) == time


def test_lines_are_merged_by_time_and_a_traceback_stays_whole() -> None:
    one = timed_lines("a", ["1970-01-01T00:00:02Z first", "  its second line"], 0.0)
    two = timed_lines("b", ["before all", "1970-01-01T00:00:01Z x", "1970-01-01T00:00:03Z y"], 0.5)

    merged = merge_lines([one, two])

    assert [f"{line.source} {line.text[-10:]}" for line in merged] == [
        "b before all", "b 0:00:01Z x",
        "a :02Z first", "a econd line", "b 0:00:03Z y",
    ]  # fmt: skip


def test_lines_that_were_read_before_another_file_failed_come_with_the_next_call(
    tmp_path: Path,
) -> None:
    a, b = tmp_path / "a.log", tmp_path / "b.log"
    a.write_text("one\n")
    b.mkdir()
    tail = FolderTail(lambda: [a, b], lambda path: 0.0)
    with pytest.raises(OSError, match=r"b\.log"):
        tail.read_new()

    b.rmdir()
    b.write_text("two\n")

    assert [line.text for line in tail.read_new()] == ["one", "two"]
    assert tail.read_new() == []
