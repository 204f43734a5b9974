"""What a node holds: visible whole or not at all, once, and never beyond the budget."""

from __future__ import annotations

import json
import mmap
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from resilience.tiered.arena import Arena
from resilience.tiered.errors import HeldError, RefusedError, StaleError, VaultFullError
from resilience.tiered.shard import ShardId
from resilience.tiered.vault import Vault
from tests.resilience.tiered.daemons import make_content, make_id, make_meta, segments
from tests.resilience.tiered.vaults import Reopen, put

PAGE = mmap.PAGESIZE
BUDGET = 10 * PAGE


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "arena"


@pytest.fixture
def reopen(reopen: Reopen) -> Reopen:
    return partial(reopen, BUDGET)


@pytest.fixture
def vault(reopen: Reopen) -> Vault:
    return reopen()


def get(vault: Vault, shard_id: ShardId) -> bytes:
    with vault.read(shard_id) as reading:
        return bytes(reading.memory)


def test_a_shard_is_read_only(vault: Vault) -> None:
    put(vault, make_id())

    with vault.read(make_id()) as reading, pytest.raises(TypeError, match="read-only"):
        reading.memory[0] = 1


def test_what_is_not_held_cannot_be_read_or_dropped(vault: Vault) -> None:
    assert not vault.drop(make_id())
    with pytest.raises(KeyError):
        vault.read(make_id())
    with pytest.raises(KeyError):
        vault.check(make_id())


def test_a_shard_is_written_once(vault: Vault) -> None:
    with vault.begin(make_id(), 5), pytest.raises(HeldError, match="is being written"):
        vault.begin(make_id(), 5)

    put(vault, make_id())
    with pytest.raises(HeldError, match="run step 1 generation 0 shard 0 is held already"):
        vault.begin(make_id(), 5)


def test_a_commit_is_the_end(vault: Vault) -> None:
    writing = vault.begin(make_id(), 5)
    writing.memory[:] = b"hello"
    writing.commit(make_meta(make_id(), b"hello"))

    writing.abort()

    assert get(vault, make_id()) == b"hello"
    with pytest.raises(ValueError, match="is over"):
        writing.commit(make_meta(make_id(), b"hello"))


@pytest.mark.parametrize(
    ("shard_id", "content"),
    [
        pytest.param(make_id(2), b"hello", id="another-step"),
        pytest.param(make_id(), b"hello!", id="another-size"),
    ],
)
def test_a_commit_of_something_else_is_refused(
    vault: Vault, shard_id: ShardId, content: bytes
) -> None:
    writing = vault.begin(make_id(), 5)

    with pytest.raises(ValueError, match="is not what was begun"):
        writing.commit(make_meta(shard_id, content))

    assert vault.metas() == []
    put(vault, make_id())
    assert vault.total_bytes == PAGE


def test_negative_sizes_are_refused(vault: Vault) -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        vault.begin(make_id(), -1)


@pytest.mark.parametrize(
    ("seen", "step", "generation", "is_stale"),
    [
        pytest.param([(5, 2)], 5, 1, True, id="same-step"),
        pytest.param([(5, 2)], 4, 1, True, id="earlier-step"),
        pytest.param([(5, 2)], 6, 1, False, id="later-step"),
        pytest.param([(5, 2)], 4, 2, False, id="same-generation"),
        pytest.param([(5, 2)], 4, 3, False, id="newer"),
        pytest.param([(9, 1), (5, 3)], 7, 1, False, id="own-later-step"),
        pytest.param([(9, 2), (5, 3)], 7, 1, True, id="older-of-two"),
        pytest.param([(5, 3), (9, 2)], 4, 2, True, id="newest-of-two"),
        pytest.param([(5, 2), (9, 2), (3, 3)], 9, 1, True, id="furthest-counts"),
    ],
)
def test_an_older_generation_cannot_write_where_a_newer_one_has(
    vault: Vault, seen: list[tuple[int, int]], step: int, generation: int, is_stale: bool
) -> None:
    for number, (seen_step, seen_generation) in enumerate(seen):
        put(vault, make_id(seen_step, str(number), generation=seen_generation))

    new = make_id(step, "new", generation=generation)
    if is_stale:
        with pytest.raises(StaleError, match="comes too late"):
            vault.begin(new, 5)
    else:
        put(vault, new)


def test_generations_are_known_after_a_restart_and_each_namespace_has_its_own(
    vault: Vault, reopen: Reopen
) -> None:
    put(vault, make_id(5, generation=2))
    later = reopen()

    put(later, make_id(4, generation=1, name="other"))
    with pytest.raises(StaleError):
        later.begin(make_id(4, generation=1), 5)


def test_without_room_a_shard_is_left_out(vault: Vault) -> None:
    put(vault, make_id(1), make_content(BUDGET))

    with pytest.raises(VaultFullError):
        vault.begin(make_id(2), 1)

    vault.drop(make_id(1))
    put(vault, make_id(2), make_content(PAGE))


def test_equal_content_is_kept_once(vault: Vault, reopen: Reopen, folder: Path) -> None:
    for shard in "abc":
        put(vault, make_id(shard=shard), make_content(PAGE))
    assert vault.held_bytes == PAGE

    assert vault.drop(make_id(shard="a"))
    later = reopen()

    assert {each.id.shard for each in later.metas()} == {"b", "c"}
    assert get(later, make_id(shard="c")) == make_content(PAGE)
    later.drop(make_id(shard="b"))
    later.drop(make_id(shard="c"))
    assert (later.held_bytes, list(folder.glob("*.meta"))) == (0, [])


def test_a_dropped_shard_can_be_read_to_its_end(vault: Vault, reopen: Reopen) -> None:
    put(vault, make_id(1), b"first")

    with vault.read(make_id(1)) as reading:
        assert vault.drop(make_id(1))
        put(vault, make_id(2), b"other")
        assert bytes(reading.memory) == b"first"
        assert vault.find(make_id(1)) is None
    reading.close()

    with vault.begin(make_id(3), 5) as writing:
        assert writing.segment is reading.segment
    assert [each.id.step for each in reopen().metas()] == [2]


def test_a_shard_that_was_dropped_within_a_reading_can_be_written_again(vault: Vault) -> None:
    put(vault, make_id(), b"first")

    with vault.read(make_id()) as reading:
        vault.drop(make_id())
        put(vault, make_id(), b"first")
        assert reading.segment is not vault.read(make_id()).segment

    assert get(vault, make_id()) == b"first"


@pytest.mark.parametrize("text", [b"", b"{"])
def test_a_description_that_cannot_be_read_is_removed(
    vault: Vault, reopen: Reopen, folder: Path, text: bytes
) -> None:
    put(vault, make_id())
    (folder / "segment-0.meta").write_bytes(text)

    later = reopen()

    assert (later.metas(), later.total_bytes, segments(folder)) == ([], 0, [])


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_bad_line_of_a_description_hides_no_other_shard(
    vault: Vault, reopen: Reopen, folder: Path, bad: int
) -> None:
    for step in (1, 2, 3):
        put(vault, make_id(step), make_content(PAGE))
    path = folder / "segment-0.meta"
    lines = path.read_bytes().split(b"\n")
    step = json.loads(lines[bad])["id"]["step"]
    lines[bad] = lines[bad][:-9]
    path.write_bytes(b"\n".join(lines))

    later = reopen()

    assert {each.id.step for each in later.metas()} == {1, 2, 3} - {step}
    assert all(later.check(each.id) for each in later.metas())


def test_a_description_of_more_than_the_segment_has_is_removed(
    vault: Vault, reopen: Reopen, folder: Path
) -> None:
    put(vault, make_id(), make_content(2 * PAGE))
    with (folder / "segment-0").open("r+b") as file:
        file.truncate(PAGE)

    assert reopen().metas() == []


def test_a_flipped_bit_costs_all_that_share_the_content(vault: Vault, folder: Path) -> None:
    put(vault, make_id(1), make_content(PAGE))
    put(vault, make_id(2), make_content(PAGE))
    put(vault, make_id(3), make_content(PAGE, 3))
    with vault.read(make_id(1)) as reading:
        reading.segment.memory[77] ^= 1

    assert not vault.check(make_id(2))

    assert [each.id.step for each in vault.metas()] == [3]
    assert vault.check(make_id(3))
    # Its memory may be at fault, so it is not used again.
    assert reading.segment.path not in segments(folder)


def test_changes_are_told(folder: Path) -> None:
    changes: list[int] = []
    arena = Arena(folder, BUDGET)
    vault = Vault(arena, on_change=lambda: changes.append(len(vault.metas())))

    put(vault, make_id(1))
    put(vault, make_id(2), b"other")
    vault.drop(make_id(1))
    vault.drop(make_id(1))
    vault.begin(make_id(3), 5).abort()

    assert changes == [1, 2, 1, 1]
    arena.close()


def test_a_segment_that_somebody_may_still_write_to_is_not_used_again(vault: Vault) -> None:
    writing = vault.begin(make_id(), 5)
    stray = writing.memory

    writing.abort(lambda: False)
    put(vault, make_id(), b"hello")
    stray[:] = b"wrong"

    assert get(vault, make_id()) == b"hello"
    assert vault.total_bytes == PAGE


def test_while_it_is_not_known_whether_somebody_writes_the_shard_can_be_begun(
    vault: Vault,
) -> None:
    writing = vault.begin(make_id(), 5)

    def is_over() -> bool:
        put(vault, make_id(), b"hello")
        return True

    writing.abort(is_over)

    assert get(vault, make_id()) == b"hello"


def test_a_namespace_belongs_to_one_job(vault: Vault) -> None:
    claims = [vault.claim("run", "a"), vault.claim("run", "a"), vault.claim("other", "b")]

    with pytest.raises(RefusedError, match="'run' belongs to the job 'a', not to 'b'"):
        vault.claim("run", "b")

    for each in claims[:2]:
        each.close()
        each.close()
    vault.claim("run", "b").close()


def test_a_namespace_stays_with_its_job_while_it_holds_anything(
    vault: Vault, reopen: Reopen
) -> None:
    claim = vault.claim("run", "a")
    put(vault, make_id())
    claim.close()

    later = reopen()

    with pytest.raises(RefusedError):
        later.claim("run", "b")
    later.claim("run", "a").close()
    later.drop(make_id())
    later.claim("run", "b").close()


@pytest.mark.parametrize("text", ["", "[1]", '{"run": ', "\x00"])
def test_without_a_list_of_jobs_namespaces_are_free(
    vault: Vault, reopen: Reopen, folder: Path, text: str
) -> None:
    vault.claim("run", "a")
    put(vault, make_id())
    (folder / "jobs.json").write_text(text)

    reopen().claim("run", "b")


def test_many_threads_write_read_and_drop(vault: Vault) -> None:
    def work(number: int) -> int:
        num_saved = 0
        for step in range(30):
            content = make_content(PAGE // 2 + step, number)
            shard_id = make_id(step, str(number))
            try:
                put(vault, shard_id, content)
            except VaultFullError:
                continue
            assert get(vault, shard_id) == content
            assert vault.total_bytes <= BUDGET
            assert vault.drop(shard_id)
            num_saved += 1
        return num_saved

    with ThreadPoolExecutor(8) as pool:
        saved = list(pool.map(work, range(8)))

    assert sum(saved) > 0
    assert vault.metas() == []


def test_content_that_is_held_gets_another_name(vault: Vault, reopen: Reopen) -> None:
    put(vault, make_id(1))
    twin = make_meta(make_id(2), b"hello")

    assert not vault.adopt(make_meta(make_id(2), b"other"))
    assert vault.adopt(twin)
    assert get(vault, make_id(2)) == b"hello"
    with pytest.raises(HeldError):
        vault.adopt(twin)
    vault.begin_run("run", step=2, first_generation=5)
    with pytest.raises(StaleError):
        vault.adopt(make_meta(make_id(3), b"hello"))
    assert get(reopen(), make_id(2)) == b"hello"


@pytest.mark.parametrize(
    ("step", "generation", "is_copy", "is_stale"),
    [
        pytest.param(81, 5, False, True, id="of-the-old-run"),
        pytest.param(81, 5, True, True, id="a-copy-of-it"),
        pytest.param(80, 5, False, True, id="an-old-worker-that-lives-yet"),
        pytest.param(80, 5, True, False, id="a-copy-of-what-was-before-both"),
        pytest.param(81, 9, False, False, id="of-the-new-run"),
        pytest.param(70, 9, False, False, id="of-the-new-run-and-earlier"),
    ],
)
def test_a_run_that_goes_back_is_the_only_one_from_there_on(
    reopen: Reopen, step: int, generation: int, is_copy: bool, is_stale: bool
) -> None:
    vault = reopen()
    put(vault, make_id(100, generation=5))
    vault.begin_run("run", step=80, first_generation=9)

    for number in range(2):
        vault = reopen() if number else vault
        if is_stale:
            with pytest.raises(StaleError, match="comes too late"):
                put(vault, make_id(step, generation=generation), is_copy=is_copy)
        else:
            put(vault, make_id(step, str(number), generation=generation), is_copy=is_copy)


def test_what_was_begun_before_is_not_committed_after(reopen: Reopen) -> None:
    vault = reopen()
    shard_id = make_id(100, generation=5)
    with vault.begin(shard_id, 5) as writing:
        writing.memory[:] = b"hello"
        vault.begin_run("run", step=80, first_generation=9)
        with pytest.raises(StaleError):
            writing.commit(make_meta(shard_id, b"hello"))

    assert vault.find(shard_id) is None
    assert vault.free_bytes == vault.budget_bytes


def test_the_newest_run_counts_and_the_same_may_say_so_again(reopen: Reopen) -> None:
    vault = reopen()
    for _ in range(2):
        vault.begin_run("run", step=80, first_generation=9)
    with pytest.raises(StaleError, match="the run from 9 on went on from step 80"):
        vault.begin_run("run", step=60, first_generation=9)
    with pytest.raises(StaleError):
        vault.begin_run("run", step=60, first_generation=8)
    vault.begin_run("run", step=90, first_generation=12)
    vault.begin_run("other", step=5, first_generation=1)

    assert vault.runs() == {"run": (None, {9: 80, 12: 90}), "other": (None, {1: 5})}
    vault.begin_run("run", step=80, first_generation=13)
    assert vault.runs()["run"] == (None, {13: 80})


def test_a_run_is_known_when_nothing_is_held_and_until_another_job_begins(reopen: Reopen) -> None:
    """Other nodes may still have what is of an older one, and say only once where it began."""
    vault = reopen()
    vault.claim("run", "job").close()
    vault.begin_run("run", step=90, first_generation=7, job="job")
    claim = vault.claim("run", "job")
    claim.close()
    for again in (vault, reopen()):
        with pytest.raises(StaleError):
            again.begin(make_id(110, generation=6), 5, is_copy=True)
        assert again.job_of("run") is None
    again.claim("run", "another")

    assert again.runs() == {}
    assert again.job_of("run") == "another"
