"""A run's folder that is removed while the run runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from resilience.agent.evidence.removal import FolderWatch, is_any_there


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
    watch = FolderWatch([tmp_path / "run" / "logs"], every_s=0.01)
    assert not watch.is_removed

    shutil.rmtree(tmp_path / "run")

    watch._thread.join(60)
    assert watch.is_removed


@pytest.mark.parametrize("is_removed", [True, False])
def test_last_look_is_taken_when_the_agent_ends(tmp_path: Path, is_removed: bool) -> None:
    (tmp_path / "logs").mkdir()
    watch = FolderWatch([tmp_path / "logs"], every_s=60.0)
    if is_removed:
        (tmp_path / "logs").rmdir()

    assert watch.close() == is_removed
