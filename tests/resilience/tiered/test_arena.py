"""Segments: which one is given, what is kept, what a later daemon finds."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from resilience.tiered.arena import Arena, Segment
from resilience.tiered.errors import ArenaError, VaultFullError
from tests.resilience.tiered.daemons import LIMIT_S, segments

PAGE = mmap.PAGESIZE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "arena"


@pytest.fixture
def arena(folder: Path) -> Iterator[Arena]:
    each = Arena(folder, 100 * PAGE)
    yield each
    each.close()


def take_and_free(arena: Arena, pages: int, owner: str = "") -> Segment:
    segment = arena.take(pages * PAGE, owner)
    arena.free(segment)
    return segment


def test_segments_are_whole_pages_that_are_there_and_nobody_elses(
    arena: Arena, folder: Path
) -> None:
    segment = arena.take(PAGE + 1)

    status = os.fstat(segment.file)
    assert (status.st_size, status.st_mode & 0o777) == (2 * PAGE, 0o600)
    assert status.st_blocks * 512 >= 2 * PAGE
    # Touched: what is allocated alone counts as a hole.
    assert os.lseek(segment.file, 0, os.SEEK_HOLE) == 2 * PAGE
    assert folder.stat().st_mode & 0o777 == 0o700
    assert arena.total_bytes == 2 * PAGE
    assert arena.take(0).size_bytes == PAGE, "an empty shard has a page"


def test_memory_is_the_file(arena: Arena) -> None:
    segment = arena.take(PAGE)

    segment.memory[:5] = b"hello"

    assert os.pread(segment.file, 5, 0) == b"hello"
    assert os.pread(segment.read_file, 5, 0) == b"hello"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(segment.read_file, b"x", 0)


@pytest.mark.parametrize(
    ("pages", "owner", "expected"),
    [
        pytest.param(8, "a", 0, id="own-one-first"),
        pytest.param(8, "b", 1, id="own-one-before-a-better-fit"),
        pytest.param(8, "c", 0, id="best-fit"),
        pytest.param(9, "a", 1, id="next-size"),
        pytest.param(7, "", 0, id="within-a-quarter"),
        pytest.param(6, "", 2, id="too-large-for-that"),
        pytest.param(11, "b", 2, id="own-one-too-small"),
    ],
)
def test_which_segment_is_given(arena: Arena, pages: int, owner: str, expected: int) -> None:
    small, large = arena.take(8 * PAGE, "a"), arena.take(10 * PAGE, "b")
    arena.free(small)
    arena.free(large)

    assert arena.take(pages * PAGE, owner).number == expected


def test_free_segments_make_room_and_the_oldest_goes_first(arena: Arena, folder: Path) -> None:
    first, second = arena.take(40 * PAGE), arena.take(40 * PAGE)
    arena.free(second)
    arena.free(first)

    arena.take(60 * PAGE)

    assert segments(folder) == [folder / "segment-0", folder / "segment-2"]
    assert arena.total_bytes == 100 * PAGE


def test_what_does_not_fit_changes_nothing(arena: Arena, folder: Path) -> None:
    arena.take(50 * PAGE)
    take_and_free(arena, 40)

    with pytest.raises(VaultFullError, match="do not fit"):
        arena.take(51 * PAGE)

    assert len(segments(folder)) == 2
    assert arena.total_bytes == 90 * PAGE


def test_there_are_only_so_many_segments(folder: Path) -> None:
    arena = Arena(folder, 100 * PAGE, segments_max=2)
    take_and_free(arena, 1)
    arena.take(2 * PAGE)
    arena.take(4 * PAGE)

    assert len(segments(folder)) == 2
    with pytest.raises(VaultFullError, match="all 2 segments are in use"):
        arena.take(PAGE)
    arena.close()


class Disk:
    """Memory that runs out after so many bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def allocate(self, file: int, begin: int, size: int) -> None:
        if size > self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= size
        os.posix_fallocate(file, begin, size)


def test_a_full_file_system_leaves_nothing_behind(folder: Path) -> None:
    arena = Arena(folder, 100 * PAGE, allocate=Disk(10 * PAGE).allocate)
    arena.take(8 * PAGE)

    with pytest.raises(VaultFullError, match=r"cannot be made in .*No space left"):
        arena.take(8 * PAGE)

    assert len(segments(folder)) == 1
    assert arena.total_bytes == 8 * PAGE
    arena.close()


def test_on_a_full_file_system_free_segments_make_room(folder: Path) -> None:
    disk = Disk(10 * PAGE)
    arena = Arena(folder, 100 * PAGE, allocate=disk.allocate)
    take_and_free(arena, 8)

    def allocate_after_removal(file: int, begin: int, size: int) -> None:
        if not (folder / "segment-0").exists():
            disk.room = size
        disk.allocate(file, begin, size)

    arena._allocate = allocate_after_removal
    assert arena.take(4 * PAGE).number == 1
    assert arena.total_bytes == 4 * PAGE
    arena.close()


def test_a_later_arena_finds_what_was_sealed_and_removes_the_rest(folder: Path) -> None:
    first = Arena(folder, 100 * PAGE)
    sealed, half = first.take(3 * PAGE), first.take(2 * PAGE)
    sealed.memory[:5] = b"hello"
    half.memory[:5] = b"torn!"
    first.seal(sealed, b"old")
    first.seal(sealed, b"what it is")
    large = first.take(PAGE)
    first.seal(large, b"too large to be read")
    os.truncate(folder / f"segment-{large.number}.meta", (1 << 30) + 1)
    (folder / "segment-7.meta").write_bytes(b"of a segment that is gone")
    (folder / "segment-0.meta.new").write_bytes(b"half a descrip")
    first.close()

    second = Arena(folder, 100 * PAGE)

    (found,) = second.found
    assert (found.segment.number, found.text) == (0, b"what it is")
    assert bytes(found.segment.memory[:5]) == b"hello"
    assert sorted(each.name for each in folder.iterdir()) == [
        "lock",
        "segment-0",
        "segment-0.meta",
    ]
    assert second.total_bytes == 3 * PAGE
    assert second.take(PAGE).number > half.number
    second.close()


def test_a_segment_counts_no_more_when_it_is_freed(folder: Path) -> None:
    first = Arena(folder, 100 * PAGE)
    segment = first.take(PAGE)
    first.seal(segment, b"text")
    first.free(segment)
    assert not (folder / "segment-0.meta").exists()
    first.close()

    second = Arena(folder, 100 * PAGE)
    assert second.found == ()
    second.close()


def test_who_still_maps_a_discarded_segment_does_no_harm(arena: Arena, folder: Path) -> None:
    segment = arena.take(PAGE)
    worker = mmap.mmap(segment.file, PAGE)
    worker[:5] = b"hello"

    arena.discard(segment)
    assert worker[:5] == bytes(5), "its memory is given back at once"
    other = arena.take(PAGE)
    worker[:5] = b"stray"

    assert bytes(other.memory[:5]) == bytes(5)
    assert segments(folder) == [folder / "segment-1"]
    assert arena.total_bytes == PAGE


def test_a_second_arena_is_told_who_has_the_folder(arena: Arena, folder: Path) -> None:
    with pytest.raises(ArenaError, match=f"{folder} is in use by the memoryd with pid"):
        Arena(folder, PAGE)


def test_more_than_the_budget_is_refused_and_kept(folder: Path) -> None:
    first = Arena(folder, 100 * PAGE)
    first.seal(first.take(10 * PAGE), b"text")
    first.close()

    with pytest.raises(ArenaError, match=r"more than the budget of .* empty the folder"):
        Arena(folder, 9 * PAGE)

    third = Arena(folder, 10 * PAGE)
    assert len(third.found) == 1
    third.close()


@pytest.mark.parametrize(
    ("name", "words"), [("link", "a link to one"), ("file", "cannot use the folder")]
)
def test_what_is_no_folder_is_refused(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)

    with pytest.raises(ArenaError, match=words):
        Arena(tmp_path / name, PAGE)


def test_a_link_in_a_segments_place_is_not_followed(folder: Path, tmp_path: Path) -> None:
    folder.mkdir()
    (tmp_path / "other").write_bytes(bytes(PAGE))
    (folder / "segment-0").symlink_to(tmp_path / "other")

    with pytest.raises(ArenaError, match="symbolic links"):
        Arena(folder, 100 * PAGE)


def test_remove_takes_all_that_is_ours(folder: Path) -> None:
    arena = Arena(folder, 100 * PAGE)
    arena.seal(arena.take(PAGE), b"text")
    take_and_free(arena, 1)

    arena.remove()

    assert not folder.exists()


def test_remove_leaves_what_is_not_ours(folder: Path) -> None:
    arena = Arena(folder, 100 * PAGE)
    (folder / "notes").touch()

    arena.remove()

    assert [each.name for each in folder.iterdir()] == ["notes"]


def test_without_room_for_a_description_the_old_one_stays(arena: Arena, folder: Path) -> None:
    segment = arena.take(PAGE)
    arena.seal(segment, b"old")
    (folder / "segment-0.meta.new").mkdir()

    with pytest.raises(VaultFullError, match="cannot write a description"):
        arena.seal(segment, b"new")

    assert (folder / "segment-0.meta").read_bytes() == b"old"


def test_nobody_waits_for_memory_that_is_given_back(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes seconds for gigabytes; what is counted meanwhile is not free yet."""
    taken, kept = arena.take(60 * PAGE, "peers"), take_and_free(arena, 10)
    arena.free(taken)
    is_removing, go_on = threading.Event(), threading.Event()

    def empty(file: int, size: int) -> None:
        is_removing.set()
        assert go_on.wait(LIMIT_S)

    monkeypatch.setattr("resilience.tiered.arena._empty", empty)
    with ThreadPoolExecutor() as pool:
        trimming = pool.submit(arena.trim, 10 * PAGE, owner="peers")
        assert is_removing.wait(LIMIT_S)
        assert arena.take(10 * PAGE) is kept
        arena.free(kept)
        assert (arena.total_bytes, arena.used_bytes) == (70 * PAGE, 0)
        with pytest.raises(VaultFullError):
            arena.take(101 * PAGE)
        larger = pool.submit(arena.take, 80 * PAGE)
        go_on.set()
        trimming.result()
        assert larger.result().size_bytes == 80 * PAGE


def test_prepared_memory_is_there_before_it_is_needed(folder: Path) -> None:
    made: list[int] = []

    def allocate(file: int, begin: int, size: int) -> None:
        made.append(size)
        os.posix_fallocate(file, begin, size)

    arena = Arena(folder, 100 * PAGE, allocate=allocate)
    arena.prepare(10 * PAGE, "a", num_segments=2)
    arena.prepare(10 * PAGE, "a", num_segments=2)  # they are there
    assert (arena.total_bytes, arena.used_bytes) == (20 * PAGE, 0)
    arena.prepare(10 * PAGE, "b", num_segments=2)
    assert made == [10 * PAGE] * 4

    taken = [arena.take(10 * PAGE, owner) for owner in "abab"]

    assert [each.owner for each in taken] == list("abab")
    assert made == [10 * PAGE] * 4
    assert arena.used_bytes == 40 * PAGE
    arena.close()


def test_who_needs_memory_that_is_being_prepared_waits_for_it(folder: Path) -> None:
    """Else it would be made twice, and the budget would not have room for that."""
    is_making, go_on = threading.Event(), threading.Event()

    def allocate(file: int, begin: int, size: int) -> None:
        is_making.set()
        assert go_on.wait(LIMIT_S)
        os.posix_fallocate(file, begin, size)

    arena = Arena(folder, 100 * PAGE, allocate=allocate)
    with ThreadPoolExecutor() as pool:
        preparing = pool.submit(arena.prepare, 60 * PAGE, "a")
        assert is_making.wait(LIMIT_S)
        own = pool.submit(arena.take, 60 * PAGE, "a")
        large = pool.submit(arena.take, 90 * PAGE, "b")
        with pytest.raises(VaultFullError):
            arena.take(101 * PAGE)
        go_on.set()
        preparing.result()
        # Whoever is first has it; the other one is told, or has way made for it.
        sizes = []
        for each in (own, large):
            with suppress(VaultFullError):
                sizes.append(each.result(LIMIT_S).size_bytes)
    assert sizes in ([60 * PAGE], [90 * PAGE])
    assert arena.total_bytes == arena.used_bytes == sizes[0]
    arena.close()


def refuse_memory(file: int, begin: int, size: int) -> None:
    raise OSError(errno.ENOSPC, "no space")


@pytest.mark.parametrize(
    ("budget", "allocate", "is_wanted"),
    [
        pytest.param(5, os.posix_fallocate, True, id="budget"),
        pytest.param(100, refuse_memory, True, id="file-system"),
        pytest.param(100, os.posix_fallocate, False, id="not-wanted"),
    ],
)
def test_memory_that_cannot_be_prepared_leaves_nothing(
    folder: Path, budget: int, allocate: Any, is_wanted: bool
) -> None:
    arena = Arena(folder, budget * PAGE, allocate=allocate)

    arena.prepare(10 * PAGE, "a", is_wanted=lambda: is_wanted)

    assert (arena.total_bytes, arena.used_bytes) == (0, 0)
    assert list(folder.glob("segment-*")) == []
    arena.close()
