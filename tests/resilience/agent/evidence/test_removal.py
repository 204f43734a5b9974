"""A run's folder that is removed while the run runs."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from resilience.agent.coordination.membership import Options, State
from resilience.agent.evidence.folder import RunFolder
from resilience.agent.evidence.removal import FolderWatch, is_any_there, is_other


@pytest.mark.parametrize(
    ("made", "is_there"),
    [
        pytest.param(("events.jsonl", "logs"), True, id="all"),
        pytest.param(("logs",), True, id="one-file-was-moved"),
        pytest.param((), False, id="nothing"),
    ],
)
def test_folder_is_there_as_long_as_anything_is_that_the_agent_has_made(
    tmp_path: Path, made: tuple[str, ...], is_there: bool
) -> None:
    for name in made:
        (tmp_path / name).mkdir()

    assert is_any_there([tmp_path / "events.jsonl", tmp_path / "logs"]) == is_there


def test_file_server_that_gives_an_error_says_nothing(tmp_path: Path) -> None:
    assert is_any_there([tmp_path / ("x" * 300)]), "a name too long stands for a stale handle"
    assert is_any_there([])


def test_folder_that_is_removed_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    watch = FolderWatch([tmp_path / "run" / "logs"], lambda: False, every_s=0.01)
    assert not watch.is_removed

    shutil.rmtree(tmp_path / "run")

    watch._thread.join(60)
    assert watch.is_removed


@pytest.mark.parametrize("is_removed", [True, False])
def test_last_look_is_taken_when_the_agent_ends(tmp_path: Path, is_removed: bool) -> None:
    (tmp_path / "logs").mkdir()
    watch = FolderWatch([tmp_path / "logs"], lambda: False, every_s=60.0)
    if is_removed:
        (tmp_path / "logs").rmdir()

    assert watch.close() == is_removed


@pytest.mark.parametrize("makes_own", [True, False])
def test_another_run_in_the_place_of_the_folder_is_noticed(
    tmp_path: Path, *, makes_own: bool
) -> None:
    """Another run has files of the same names. The own file counts for the own folder."""
    for name in ("run", "other"):
        (tmp_path / name / "agents").mkdir(parents=True)
        (tmp_path / name / "logs").mkdir()
    file = os.open(tmp_path / "run", os.O_DIRECTORY)
    own = tmp_path / "run" / "agents" / "own"
    assert not is_other(file, own)
    watch = FolderWatch([tmp_path / "run/logs"], lambda: is_other(file, own), every_s=0.01)

    (tmp_path / "run").rename(tmp_path / "moved")
    assert not is_other(file, own), "nothing has the name"
    if makes_own:
        (tmp_path / "other" / "agents" / "own").touch()
    (tmp_path / "other").rename(tmp_path / "run")

    if not makes_own:
        watch._thread.join(60)
    assert watch.close() == is_other(file, own) != makes_own
    os.close(file)


@pytest.mark.parametrize("is_over", [True, False])
def test_an_empty_folder_in_the_place_of_the_own_one_gets_no_record(
    tmp_path: Path, *, is_over: bool
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    folder = RunFolder(path, run="run")
    folder.hold_lock()
    folder.announce("127.0.0.1:1", "a")
    folder.found(("a",))
    while not (path / "generations" / "run-0").exists():
        folder.answers()

    path.rename(tmp_path / "moved")
    path.mkdir()
    options = Options(num_nodes=1, num_local_ranks=1)
    folder.renew(State(options=options, known=frozenset("a"), generation=3), is_over=is_over)
    folder.close()

    assert list(path.iterdir()) == []
