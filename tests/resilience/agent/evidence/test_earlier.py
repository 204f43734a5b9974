"""Agents of earlier attempts of a run, on a real file system and with real processes."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilience.agent.coordination.founding import is_earlier
from resilience.agent.evidence.earlier import StartedAgain, await_earlier
from resilience.agent.evidence.folder import RunFolder
from resilience.agent.evidence.words import find_words
from resilience.node_config import RunConfig
from resilience.run_record import note_start
from tests.resilience.agent.evidence.test_folder import answer

CONFIG = RunConfig(recipe="llama/x", version=1, digest="d" * 64)


@pytest.fixture
def orphan(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the lock of an agent of job 7's first attempt."""
    folder = RunFolder(tmp_path, run="7", number=0)
    lock = folder.hold_lock()
    folder.announce("n0:1", "n0")
    answer(folder)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[lock]) as process:
        os.close(lock)
        yield process


def files(run_dir: Path) -> list[Path]:
    return [path for path in (run_dir / "agents").iterdir() if path.is_file()]


@pytest.mark.parametrize(
    ("name", "other", "is_so"),
    [
        ("7-0", "7-1000", True),
        ("7-1000", "7-2000", True),
        ("7-1000", "7-1000", False),
        ("7-2000", "7-1000", False),
        ("6-0", "7-1000", False),
        ("a-b-0", "a-b-1", True),
        ("a-0", "a-b-1", False),
        ("", "7-1", False),
    ],
)
def test_only_attempts_of_one_run_have_an_order(name: str, other: str, is_so: bool) -> None:
    """A second job in the folder of a run that goes on does not end it."""
    assert is_earlier(name, other) == is_so


@pytest.mark.parametrize(
    ("later", "told"),
    [
        (["7-1000"], "7-1000"),
        (["7-1000", "7-2000"], "7-2000"),
        (["8-0", "7-1000"], "7-1000"),
        (["8-0"], None),
        ([], None),
    ],
)
def test_agent_learns_from_the_runs_record_that_it_was_started_again(
    tmp_path: Path, later: list[str], told: str | None
) -> None:
    for name in ("7-0", *later):
        note_start(tmp_path, CONFIG, name=name, now=1.0)
    folder = RunFolder(tmp_path, run="7", number=0)

    folder.look_for_later(0.0)

    assert answer(folder) == ([StartedAgain(name=told)] if told else [])
    assert not folder.is_shared
    folder.close()


def test_agent_without_a_record_learns_it_from_that_of_the_generations(tmp_path: Path) -> None:
    later = RunFolder(tmp_path, run="7", attempt=1)
    later.found(("n0",))
    answer(later)
    folder = RunFolder(tmp_path, run="7")

    folder.look_for_later(0.0)

    assert answer(folder) == [StartedAgain(name="7-1")]
    for each in (later, folder):
        each.close()


def test_folder_that_cannot_be_read_says_nothing_of_later_starts(tmp_path: Path) -> None:
    note_start(tmp_path, CONFIG, name="7-0", now=1.0)
    (tmp_path / "record" / "start-1.json").write_text("torn")
    folder = RunFolder(tmp_path, run="7", number=0)
    folder.announce("n0:1", "n0")
    answer(folder)

    folder.look_for_later(0.0)

    assert answer(folder) == []
    assert folder.is_shared
    folder.close()


def test_start_waits_for_agents_of_the_one_before(
    tmp_path: Path, orphan: subprocess.Popen[bytes]
) -> None:
    said: list[str] = []

    def end(text: str) -> None:
        said.append(text)
        orphan.communicate()

    assert await_earlier("7-1000", find_words(tmp_path), end, patience_s=60) == ""

    assert said == ["waits up to 60 s for agents of an earlier start of the run to end"]
    assert files(tmp_path) == []


def test_start_kills_what_does_not_end_on_its_machine(
    tmp_path: Path, orphan: subprocess.Popen[bytes]
) -> None:
    """One that stands still learns of nothing."""
    orphan.send_signal(19)

    assert await_earlier("7-1000", find_words(tmp_path), print, patience_s=0) == ""

    assert orphan.wait(60) == -9
    assert files(tmp_path) == []


def test_start_lets_be_who_only_reads_the_file_of_a_lock(
    tmp_path: Path, orphan: subprocess.Popen[bytes]
) -> None:
    (path,) = (Path(each["path"]) for each in find_words(tmp_path))
    with (
        path.open() as file,
        subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[file.fileno()]) as reader,
    ):
        assert await_earlier("7-1000", find_words(tmp_path), print, patience_s=0) == ""

        assert orphan.wait(60) == -9
        assert reader.poll() is None


@pytest.mark.parametrize("name", ["7-0", "8-0"])
def test_agents_of_the_same_attempt_and_of_other_runs_are_let_be(
    tmp_path: Path, orphan: subprocess.Popen[bytes], name: str
) -> None:
    said: list[str] = []

    assert await_earlier(name, find_words(tmp_path), said.append, patience_s=60) == ""

    assert (said, orphan.poll(), len(files(tmp_path))) == ([], None, 1)


def test_agents_of_other_machines_are_waited_for_once(
    tmp_path: Path, orphan: subprocess.Popen[bytes]
) -> None:
    (path,) = files(tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot": "of another machine"}))
    said: list[str] = []

    for _ in range(2):
        assert await_earlier("7-1000", find_words(tmp_path), said.append, patience_s=0) == ""

    assert (len(said), files(tmp_path)) == (1, [])
