"""By what a run is seen to live: processes, locks and records, of real files and processes."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from resilience.agent.coordination.founding import SILENCE_S, Record
from resilience.agent.evidence.folder import RunFolder
from resilience.agent.evidence.life import find_life, judge_life
from resilience.agent.evidence.locks import hold_lock
from resilience.node_config import RunConfig
from resilience.run_record import make_run_id, open_record

RECORD = Record(run="r", number=0, agents=("n0", "n1"), generation=3)
OVER = replace(RECORD, is_over=True)
RUN = make_run_id("", "r-0")


@pytest.mark.parametrize(
    ("signs", "record", "renewed_s", "ended", "life"),
    [
        pytest.param((), None, 0.0, (), "", id="nothing is seen"),
        pytest.param(("process 7 runs",), None, 0.0, (), "process 7 runs", id="before its record"),
        pytest.param(
            ("process 7 runs", "a lock"), OVER, 9000.0, ("n0", "n1"),
            "process 7 runs; its record was renewed 9000 s ago", id="a process outlives all",
        ),
        pytest.param(
            (), RECORD, 61.0, (),
            "n0, n1 may go on with the run: its record was renewed 61 s ago, and counts for 180 s",
            id="another machine renews the record",
        ),
        pytest.param(
            (), RECORD, 61.0, ("n0",),
            "n1 may go on with the run: its record was renewed 61 s ago, and counts for 180 s",
            id="one node may live",
        ),
        pytest.param((), replace(RECORD, gone=("n0", "n1")), 0.0, (), "", id="all are gone"),
        pytest.param((), RECORD, 0.0, ("n0", "n1"), "", id="all were killed now"),
        pytest.param((), RECORD, SILENCE_S, (), "", id="not renewed any more"),
        pytest.param((), OVER, 0.0, (), "", id="it has ended in order"),
    ],
)  # fmt: skip
def test_life_is_judged_by_what_is_seen(
    signs: tuple[str, ...],
    record: Record | None,
    renewed_s: float,
    ended: tuple[str, ...],
    life: str,
) -> None:
    assert judge_life(signs, record, renewed_s=renewed_s, ended=ended) == life


def begin(path: Path) -> str:
    """Make the record of a run in a folder, and return its id."""
    config = RunConfig(recipe="llama/x", version=1, digest="d" * 64)
    return open_record(path, config, run_id=RUN, now=1.0).run_id


@contextmanager
def founded(path: Path) -> Iterator[Path]:
    """Have an agent hold its lock and renew its run's record; yields the record's file."""
    folder = RunFolder(path, run="r")
    lock = folder.hold_lock()
    folder.announce("n0:1", "n0")
    folder.found(("n0",))
    record = path / "generations" / "run-0"
    while not record.exists():
        assert select.select([folder], [], [], 60)[0]
        folder.answers()
    yield record
    os.close(lock)


def test_an_agent_lives_as_long_as_its_lock_is_held(tmp_path: Path) -> None:
    run = begin(tmp_path)
    with founded(tmp_path):
        (agent,) = (tmp_path / "agents").iterdir()

        told = find_life(tmp_path, run)

        assert told is not None
        assert told.startswith(f"a process holds the lock of {agent}; its record was renewed ")
    assert find_life(tmp_path, run) == ""


def test_a_launcher_lives_as_long_as_its_lock_is_held(tmp_path: Path) -> None:
    run = begin(tmp_path)
    lock = hold_lock(tmp_path / "launcher.lock")

    assert find_life(tmp_path, run) == f"a process holds the lock of {tmp_path}/launcher.lock"
    os.close(lock)
    assert find_life(tmp_path, run) == ""


@pytest.mark.parametrize("age_s", [0, 100, SILENCE_S + 1])
def test_agents_of_another_machine_live_as_long_as_their_record_is_renewed(
    tmp_path: Path, age_s: float
) -> None:
    run = begin(tmp_path)
    with founded(tmp_path) as record:
        (agent,) = (tmp_path / "agents").iterdir()
    agent.write_text(json.dumps({**json.loads(agent.read_text()), "boot": "another"}))
    os.utime(record, (record.stat().st_mtime - age_s,) * 2)

    assert bool(find_life(tmp_path, run)) == (age_s < SILENCE_S)


def test_a_torn_record_is_a_persons_to_judge(tmp_path: Path) -> None:
    run = begin(tmp_path)
    with founded(tmp_path) as record:
        pass
    record.write_bytes(b"{")

    assert find_life(tmp_path, run) == (
        f"{record} is torn; remove it once no process of the run lives any more"
    )


@pytest.mark.parametrize("place", ["", "a", "."])
def test_of_a_folder_that_is_not_there_nothing_is_seen(tmp_path: Path, place: str) -> None:
    begin(tmp_path)

    assert find_life(tmp_path / "no", RUN) is None
    assert find_life(Path(place), RUN) is None
    assert find_life(tmp_path, "another run") is None


@contextmanager
def started_for(path: Path, opened: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process with the words of a run's daemon and a file open until it is killed."""
    script = 'exec 3>>"$0"; echo; read -r line'
    words = ["sh", "-c", script, str(opened), f"--run-dir={path}"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_a_daemon_without_its_agent_lives_also_where_it_stands_still(tmp_path: Path) -> None:
    run = begin(tmp_path)
    with started_for(tmp_path, tmp_path / "log") as process:
        told = find_life(tmp_path, run)
        assert told is not None
        assert told.startswith(f"process {process.pid} (-c ")
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)

        assert find_life(tmp_path, run) == told
    assert find_life(tmp_path, run) == ""


def test_a_run_whose_folder_was_removed_is_told_from_the_one_that_uses_it_now(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    with started_for(folder, folder / "log") as old:
        shutil.rmtree(folder)
        assert f"process {old.pid}" in (find_life(folder, "old") or "")
        folder.mkdir()
        begin(folder)
        with started_for(folder, folder / "log"):
            assert f"process {old.pid}" in (find_life(folder, "old") or "")
    with started_for(folder, folder / "log") as new:
        assert find_life(folder, "old") is None
        assert f"process {new.pid}" in (find_life(folder, RUN) or "")
