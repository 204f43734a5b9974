"""How an arena ends: it stays for the next daemon, or goes with its job, or for want of use."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from resilience.tiered import arena_folder
from resilience.tiered.arena import Arena
from resilience.tiered.arena_folder import (
    find_arenas,
    open_arena,
    read_arenas,
    remove_arena,
    remove_expired,
)
from tests.resilience.tiered.daemons import MIB, Daemon, load, make_content, make_id, save
from tests.waiting import wait_until

DAY_S = 86400.0


def leave(folder: Path, *, age_s: float = 2 * DAY_S) -> None:
    """Leave an arena with a sealed segment that was used so long ago."""
    arena = Arena(folder, MIB)
    arena.seal(arena.take(5), b"a shard")
    (folder / "jobs.json").write_text("{}")
    arena.close()
    make_old(folder, age_s)


def make_old(folder: Path, age_s: float = 2 * DAY_S) -> None:
    used_s = time.time() - age_s
    for each in (folder / "lock", folder):
        os.utime(each, (used_s, used_s))


def names(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


@pytest.mark.parametrize("squats", ["link", "file"])
def test_another_users_folder_takes_no_arenas_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squats: str
) -> None:
    memory, run = tmp_path / "memory", tmp_path / "run"
    for each in (memory, run):
        each.mkdir()
    monkeypatch.setattr(arena_folder, "SHARED_MEMORY", memory)
    first, other = open_arena(run, "node-0"), open_arena(run, "node-1")
    assert first.lstat().st_mode & 0o777 == 0o700
    assert first != other
    assert open_arena(run, "node-0") == first
    assert read_arenas(shutil.copytree(run, tmp_path / "copy")) == {}
    assert remove_arena(first)
    if squats == "link":
        first.symlink_to(other)
    else:
        first.touch()

    second = open_arena(run, "node-0")

    assert second != first
    assert read_arenas(run) == {"node-0": second, "node-1": other}
    assert find_arenas(run) == sorted((second, other))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a run's folder; arenas are made in `memory` beside it."""
    for each in ("memory", "run"):
        (tmp_path / each).mkdir()
    monkeypatch.setattr(arena_folder, "SHARED_MEMORY", tmp_path / "memory")
    return tmp_path / "run"


def test_arena_of_a_removed_folder_is_found_again(run: Path) -> None:
    first = open_arena(run, "node-0")
    shutil.rmtree(run)
    run.mkdir()

    assert find_arenas(run) == [first]
    assert open_arena(run, "node-0") == first
    assert read_arenas(run) == {"node-0": first}


def test_arena_that_cannot_be_noted_is_not_made(run: Path) -> None:
    (run / "arenas").write_text("a file")

    with pytest.raises(OSError, match="arenas"):
        open_arena(run, "node-0")
    assert names(run.parent / "memory") == set()


@pytest.mark.parametrize("damage", ["bytes", "folder", "elsewhere"])
def test_note_that_is_damaged_names_no_arena(run: Path, damage: str) -> None:
    first = open_arena(run, "node-0")
    (note,) = (run / "arenas").iterdir()
    note.unlink()
    if damage == "folder":
        note.mkdir()
    else:
        note.write_bytes(b"\xff\xfe" if damage == "bytes" else b"../../tmp/x")

    assert read_arenas(run) == {}
    assert find_arenas(run) == [first]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_a_folder_of_another_user_is_neither_used_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_folder, "SHARED_MEMORY", tmp_path)
    taken = open_arena(tmp_path, "node-0")
    os.chown(taken, 65534, 65534)

    assert open_arena(tmp_path, "node-0") != taken
    assert find_arenas(tmp_path) == [read_arenas(tmp_path)["node-0"]]


@pytest.mark.slow
def test_a_daemon_without_its_arena_ends_and_the_next_one_makes_it_anew(tmp_path: Path) -> None:
    """It could keep nothing any more, and its agent starts it again."""
    with Daemon(folder=tmp_path / "arena").start() as daemon:
        save(daemon.client(), make_id(), make_content(MIB))
        shutil.rmtree(daemon.folder)

        assert daemon.wait() == 0
        assert "was removed, and the daemon ends" in daemon.outputs[-1]

        client = daemon.start().client()
        save(client, make_id(step=2), make_content(MIB))
        assert load(client, make_id(step=2)) == make_content(MIB)


def test_a_daemon_removes_what_has_expired_beside_it(tmp_path: Path) -> None:
    leave(tmp_path / "old")
    leave(tmp_path / "young", age_s=DAY_S / 2)
    with Daemon(folder=tmp_path / "arena").start() as daemon:
        wait_until(lambda: names(tmp_path) == {"arena", "young"})
        with Daemon(folder=tmp_path / "other", options=["--expire-s", "9"]).start() as other:
            wait_until(lambda: names(tmp_path) == {"arena", "other"})
            assert "removed the arena" in (other.end(), other.outputs[-1])[1]
        save(daemon.client(), make_id(), make_content(MIB))


def test_a_living_daemons_arena_is_not_removed_however_old(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "arena", MIB)
    make_old(tmp_path / "arena")

    assert remove_expired(tmp_path / "own", expire_s=DAY_S) == []
    arena.close()
    # The end is a use, too.
    assert remove_expired(tmp_path / "own", expire_s=DAY_S) == []
    make_old(tmp_path / "arena")
    assert remove_expired(tmp_path / "arena", expire_s=DAY_S) == []
    assert remove_expired(tmp_path / "own", expire_s=DAY_S) == [tmp_path / "arena"]
    assert names(tmp_path) == set()


def test_what_is_no_arena_stays(tmp_path: Path) -> None:
    beside, elsewhere = tmp_path / "beside", tmp_path / "elsewhere"
    beside.mkdir()
    leave(elsewhere / "arena")
    (beside / "link").symlink_to(elsewhere / "arena")
    (beside / "file").write_text("hello")
    for name, text in (("folder", "12\n"), ("lockless", None)):
        (beside / name).mkdir()
        (beside / name / "jobs.json").write_text("{}")
        (beside / name / ("lock" if text else "segment-0")).write_text(text or "")
    os.utime(beside / "lockless", (1, 1))
    make_old(beside / "folder")

    assert remove_expired(beside / "own", expire_s=DAY_S) == []
    assert names(beside) == {"link", "file", "folder", "lockless"}
    assert names(elsewhere / "arena") == {"lock", "jobs.json", "segment-0", "segment-0.meta"}


def test_what_somebody_has_put_into_an_arena_stays(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hello")
    folder = tmp_path / "beside" / "arena"
    leave(folder)
    (folder / "notes.txt").write_text("mine")
    (folder / "segment-7").symlink_to(secret)
    make_old(folder)

    assert remove_expired(tmp_path / "beside" / "own", expire_s=DAY_S) == []
    assert names(folder) == {"lock", "notes.txt", "segment-7"}
    assert secret.read_text() == "hello"
