from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import data
from benchmarks import data_figures as figures
from benchmarks.data_memory import read_mapped, read_own
from benchmarks.data_plan import Plan, count_published, read_plan, write_plan
from resilience.data.format import FINGERPRINT_BYTES, file_bytes
from resilience.data.segments import SegmentWriter

ROOT = Path(__file__).parents[2]
LIMIT_S = 600
MIB = 2**20


def rows_of(value, **changes):
    """Return all rows with one value everywhere, but for what is changed."""
    return {
        row: figures.Measured({each.name: [changes.get(each.name, value)] for each in lines})
        for row, lines in figures.FIGURES.items()
    }


def bars_by_name(rows):
    return {each.what: each for each in figures.judge(rows)}


def test_bars_compare_medians_of_laps():
    laps = {figures.SLICE: [1.0, 2.0, 9.0], figures.OURS: [7.0, 8.0, 100.0]}

    (bar,) = figures.judge({figures.READ: figures.Measured(laps)})

    assert (bar.figure, bar.bar, bar.is_held) == (4.0, 5.0, True)


def test_some_bars_are_the_least_that_is_wanted():
    slow = bars_by_name(rows_of(1900.0))["producer, batches a second"]
    fast = bars_by_name(rows_of(2100.0))["producer, batches a second"]

    assert (slow.is_held, fast.is_held) == (False, True)
    assert str(slow).endswith("(bar: at least 2000): NOT held")


def test_plan_passes_a_command_line(tmp_path):
    plan = Plan(
        folder=tmp_path,
        laps=1,
        num_read=2,
        num_made=3,
        num_consumers=5,
        resume_sample=6,
    )

    assert read_plan(write_plan(plan)) == plan


def test_mapped_memory_is_what_was_touched_of_files_of_the_folder(tmp_path):
    (tmp_path / "file").write_bytes(bytes(2 * MIB))
    with (tmp_path / "file").open("r+b") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    memory[:] = bytes(2 * MIB)

    assert read_mapped(os.getpid(), tmp_path) == 2 * MIB
    assert read_mapped(os.getpid(), tmp_path / "other") == 0
    assert read_own(os.getpid()) >= 2 * MIB
    memory.close()


def test_published_batches_are_counted_in_all_caches_of_a_folder(tmp_path):
    for serial, cache in enumerate(("a", "b"), 1):
        (tmp_path / cache).mkdir()
        size = file_bytes(4, 64)
        with SegmentWriter.create(
            tmp_path / cache, serial, 0, bytes(FINGERPRINT_BYTES), num_entries=4, num_bytes=size
        ) as writer:
            for number in range(serial):
                writer.append(number, b"{}", [])

    assert count_published(tmp_path) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rows", "read,theirs"), "no theirs; known: read, flow"),
        (("--laps", "0"), "want --laps and --consumers of 1 or more"),
        (("--resume", "9"), "--resume a multiple of 8"),
    ],
)
def test_wrong_options_are_refused(monkeypatch, capsys, options, words):
    monkeypatch.setattr(sys, "argv", ["benchmarks.data", *options])

    with pytest.raises(SystemExit, match="2"):
        data.main()

    assert words in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_benchmark_measures_every_figure(tmp_path):
    """Whatever a batch holds other than what was made ends it with status 1."""
    table = tmp_path / "table.json"

    options = "--laps 1 --read 64 --made 200 --consumers 2 --resume 80000"
    words = [*options.split(), "--force-load", "--json", table]
    command = [sys.executable, "-m", "benchmarks.data", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)

    assert ended.returncode == 0, ended.stderr
    rows = json.loads(table.read_text())["rows"]
    assert rows.keys() == figures.FIGURES.keys()
    for name, lines in figures.FIGURES.items():
        measured = {**rows[name]["laps"], **rows[name]["missing"]}
        assert measured.keys() == {each.name for each in lines}
    bars = json.loads(table.read_text())["bars"]
    assert [each["what"] for each in bars] == list(bars_by_name(rows_of(1.0)))
    lines = [line for line in ended.stdout.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + sum(map(len, figures.FIGURES.values()))
    assert not list(Path("/dev/shm").glob("bench-data-*"))
