"""What agents tell each other by files, on a real file system."""

from __future__ import annotations

import errno
import json
import os
import select
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest

from resilience import whole_files
from resilience.agent.coordination.membership import Claimed, Judged, Recorded
from resilience.agent.evidence import folder as folder_module
from resilience.agent.evidence.folder import Answer, RunFolder
from resilience.state.layout import make_layout

ENDED = frozenset({("n1", "a")})
"""Whose end is known to whoever reads a record."""


def answer(folder: RunFolder) -> list[Answer]:
    assert select.select([folder], [], [], 60)[0]
    return folder.answers()


def open_two(path: Path) -> tuple[RunFolder, RunFolder]:
    one, other = RunFolder(path, run="a"), RunFolder(path, run="a")
    for folder, address in ((one, "n0:1"), (other, "n1:1")):
        folder.announce(address)
        assert answer(folder) == []
    return one, other


def open_founded(path: Path) -> tuple[RunFolder, RunFolder]:
    """Return the folder as seen by the agent that has begun the run, and by another one."""
    one, other = open_two(path)
    one.found(("n0", "n1"))
    answer(one)
    return one, other


def test_agents_find_each_other_and_leave_nothing(tmp_path: Path) -> None:
    one, other = open_two(tmp_path)

    other.look(one.start)
    answer(other)

    assert other.is_shared
    assert sorted(RunFolder(tmp_path, run="a").find_agents()) == ["n0:1", "n1:1"]
    assert RunFolder(tmp_path, run="b").find_agents() == []
    for folder in (one, other):
        folder.close()
    assert list((tmp_path / "agents").iterdir()) == []


def test_nothing_is_known_before_all_that_was_asked_is_answered(tmp_path: Path) -> None:
    one, other = RunFolder(tmp_path, run="a"), RunFolder(tmp_path, run="a")
    one.announce("n0:1")
    while not one.is_known:
        answer(one)
    other.announce("n1:1")
    other.look(one.start)

    assert not other.is_known
    while not other.is_known:
        answer(other)
    assert other.is_shared
    other.look("nobody")
    assert not other.is_known
    for folder in (one, other):
        folder.close()


def test_agent_of_another_folder_is_not_seen(tmp_path: Path) -> None:
    one = RunFolder(tmp_path, run="a")

    one.look("nobody")
    answer(one)

    assert not one.is_shared
    one.close()


def test_agent_that_is_alone_takes_its_folder_for_a_common_one(tmp_path: Path) -> None:
    """No file of another one says whether that is so."""
    one = RunFolder(tmp_path, run="a")

    one.announce("n0:1")
    answer(one)

    assert one.is_shared
    one.close()


def test_first_of_two_halves_has_the_record(tmp_path: Path) -> None:
    one, other = open_two(tmp_path)
    first, second = (make_layout(nodes=[name], num_local_ranks=1) for name in ("n0", "n1"))

    for folder, layout in ((one, first), (other, second)):
        folder.claim(4, layout)

        assert answer(folder) == [Claimed(generation=4, layout=first)]
        folder.close()


def test_run_is_begun_once_and_its_record_is_renewed(tmp_path: Path) -> None:
    one, other = open_two(tmp_path)

    one.found(("n0", "n1"))
    (begun,) = answer(one)
    other.found(("n1", "n2"))
    (refused,) = answer(other)
    one.renew(("n0",), 5, is_over=True)
    answer(one)
    other.found(("n7",))
    (again,) = answer(other)

    assert isinstance(begun, Judged)
    assert begun.record
    assert begun.record.generation == -1
    assert refused == Judged(record=None, reason="n0 may go on with the run")
    assert isinstance(again, Judged)
    assert again.record
    assert (again.record.number, again.record.generation) == (1, 5)
    for folder in (one, other):
        folder.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand in for the time that an agent goes by, which is `now_s`."""
    fake = SimpleNamespace(now_s=0.0)
    fake.monotonic = lambda: fake.now_s
    monkeypatch.setattr(folder_module, "time", fake)
    return fake


def begin_at(folder: RunFolder, clock: SimpleNamespace, now_s: float) -> int | None:
    """Return the generation behind which another agent begins the run, None where it may not."""
    clock.now_s = now_s
    folder.found(("n2",))
    (judged,) = answer(folder)
    assert isinstance(judged, Judged)
    return judged.record.generation if judged.record else None


@pytest.mark.parametrize(
    ("run", "silence_s"),
    [pytest.param("a", 180.0, id="same-run"), pytest.param("b", 90.0, id="another-job")],
)
def test_silence_of_a_record_counts_from_an_agents_first_look(
    run: str, silence_s: float, tmp_path: Path, clock: SimpleNamespace
) -> None:
    """It cannot know how long nobody had renewed the record; nor can one that looks later."""
    one, other = open_founded(tmp_path)
    first, later = RunFolder(tmp_path, run=run), RunFolder(tmp_path, run=run)

    assert begin_at(first, clock, 100.0) is None
    assert begin_at(first, clock, 99.0 + silence_s) is None
    assert begin_at(later, clock, 99.0 + silence_s) is None
    assert begin_at(later, clock, 100.0 + silence_s) is None
    assert begin_at(first, clock, 100.0 + silence_s) == 99
    for folder in (one, other, first, later):
        folder.close()


def test_record_that_is_renewed_is_silent_anew(tmp_path: Path, clock: SimpleNamespace) -> None:
    one, other = open_founded(tmp_path)
    first = RunFolder(tmp_path, run="b")
    assert begin_at(first, clock, 0.0) is None

    one.renew(("n0", "n1"), 4)
    answer(one)

    assert [begin_at(first, clock, now_s) for now_s in (60.0, 149.0, 150.0)] == [None, None, 104]
    for folder in (one, other, first):
        folder.close()


def test_record_names_the_start_of_each_agent_that_was_heard_of_last(tmp_path: Path) -> None:
    one, other = open_founded(tmp_path)

    one.renew(("n0", "n1"), 4, starts={"n0": "a", "n1": "b"})
    answer(one)
    other.renew(("n0", "n1"), 5, starts={"n1": "c"}, here=["n1"])
    answer(other)
    one.renew(("n0", "n1"), 4, starts={"n0": "d"})
    answer(one)
    one.read_record(ENDED)

    assert answer(one) == [Recorded(after=ENDED, generation=5, starts={"n0": "a", "n1": "c"})]
    for folder in (one, other):
        folder.close()


def test_a_further_node_begins_no_run_that_has_ended(tmp_path: Path) -> None:
    """Others may, as a scheduler that starts the run again wants it."""
    one, other = open_founded(tmp_path)
    late, another = (RunFolder(tmp_path, run=run, begins_anew=False) for run in ("a", "b"))
    assert late.find_end() is None
    one.renew(("n0", "n1"), 5, is_over=True, status=0)
    answer(one)

    assert (late.find_end(), another.find_end()) == (0, None)
    late.found(("n2",))
    assert answer(late) == [Judged(record=None, reason="it has ended")]
    another.found(("n2",))
    (begun,) = answer(another)
    assert isinstance(begun, Judged)
    assert begun.record is not None
    for folder in (one, other, late, another):
        folder.close()


def test_record_names_who_has_ended_until_it_comes_again(tmp_path: Path) -> None:
    one, other = open_founded(tmp_path)

    def gone(folder: RunFolder) -> frozenset[str]:
        folder.read_record(ENDED)
        (found,) = answer(folder)
        assert isinstance(found, Recorded)
        return found.gone

    one.renew(("n0", "n1"), 4, starts={"n0": "a", "n1": "b"}, gone=["n1"])
    answer(one)
    assert gone(other) == {"n1"}
    other.renew(("n0", "n1"), 5, starts={"n1": "c"}, here=["n1"])
    answer(other)
    assert gone(one) == frozenset()
    other.renew(("n0", "n1"), 6, starts={"n1": "c"}, gone=["n1"])
    answer(other)

    assert gone(one) == {"n1"}
    for folder in (one, other):
        folder.close()


def test_run_that_has_ended_stays_so_whoever_wakes_up(tmp_path: Path) -> None:
    one, other = open_founded(tmp_path)
    other.read_record(ENDED)
    nothing_yet = answer(other)

    one.renew(("n0", "n1"), 5, is_over=True, status=75)
    answer(one)
    other.renew(("n0", "n1"), 4)
    answer(other)
    other.read_record(ENDED)

    assert nothing_yet == [Recorded(after=ENDED, generation=-1)]
    assert answer(other) == [Recorded(after=ENDED, generation=5, is_over=True, status=75)]
    for folder in (one, other):
        folder.close()


def test_end_stays_though_a_renewal_stood_still_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that is stopped between what it has read and what it writes knows of no end."""
    one, other = open_founded(tmp_path)
    is_written, goes_on = Event(), Event()

    def stand_still(path: Path, data: Mapping[str, object], writer: str) -> None:
        is_written.set()
        assert goes_on.wait(60.0)
        whole_files.write_whole(path, data, writer)

    with monkeypatch.context() as slow:
        slow.setattr(folder_module, "write_whole", stand_still)
        other.renew(("n0", "n1"), 4)
        assert is_written.wait(60.0)
    one.renew(("n0", "n1"), 5, is_over=True, status=75)
    answer(one)
    goes_on.set()
    answer(other)

    other.read_record(ENDED)

    assert answer(other) == [Recorded(after=ENDED, generation=5, is_over=True, status=75)]
    for folder in (one, other):
        folder.close()


def test_an_agent_does_not_go_before_the_runs_end_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the disk is slower than what an agent waits for otherwise."""
    one, other = open_founded(tmp_path)
    goes_on = Event()

    def stand_still(path: Path, data: Mapping[str, object], writer: str) -> bool:
        assert goes_on.wait(60.0)
        return whole_files.write_first(path, data, writer)

    monkeypatch.setattr(folder_module, "write_first", stand_still)
    monkeypatch.setattr(folder_module, "_CLOSE_S", 0.0)
    one.renew(("n0", "n1"), 5, is_over=True)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(one.close)
        with pytest.raises(FutureTimeoutError):
            closing.result(0.2)
        goes_on.set()
    other.read_record(ENDED)

    assert answer(other) == [Recorded(after=ENDED, generation=5, is_over=True)]
    other.close()


def test_who_is_behind_the_others_says_nothing_of_the_run(tmp_path: Path) -> None:
    """It stood still, and ends for a cause of its own while they go on."""
    one, other = open_founded(tmp_path)

    other.renew(("n1", "n2"), 5)
    answer(other)
    one.renew(("n0", "n1"), 4, is_over=True, status=1)
    answer(one)
    other.read_record(ENDED)
    still_goes_on = answer(other)
    one.renew(("n0", "n1"), 5, is_over=True, status=1)
    answer(one)
    other.renew(("n1", "n2"), 6)
    answer(other)
    other.read_record(ENDED)

    assert still_goes_on == [Recorded(after=ENDED, generation=5)]
    assert answer(other) == [Recorded(after=ENDED, generation=6)]
    newest = json.loads((tmp_path / "generations" / "run-0").read_text())
    assert (newest["generation"], newest["agents"]) == (6, ["n0", "n1", "n2"])
    for folder in (one, other):
        folder.close()


def test_record_that_a_full_disk_does_not_take_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = open_founded(tmp_path)

    def refuse(path: Path, text: str) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    with monkeypatch.context() as full:
        full.setattr(whole_files, "write_text", refuse)
        one.renew(("n0", "n1"), 5, is_over=True)
        other.claim(1, make_layout(nodes=["n0"], num_local_ranks=1))
        (claimed,) = answer(other)
        answer(one)

    assert isinstance(claimed, Claimed)
    assert "No space left on device" in claimed.reason
    assert [path.name for path in (tmp_path / "generations").iterdir()] == ["run-0"]
    one.renew(("n0", "n1"), 5, is_over=True)
    answer(one)
    other.read_record(ENDED)
    assert answer(other) == [Recorded(after=ENDED, generation=5, is_over=True)]
    for folder in (one, other):
        folder.close()


def test_end_of_another_run_is_none_of_this_one(tmp_path: Path) -> None:
    one, other = open_two(tmp_path)
    later = RunFolder(tmp_path, run="a", attempt=1)
    one.found(("n0", "n1"))
    answer(one)
    one.renew(("n0", "n1"), 5, is_over=True)
    answer(one)

    later.read_record(ENDED)

    assert answer(later) == []
    for folder in (one, other, later):
        folder.close()


def test_torn_record_is_named(tmp_path: Path) -> None:
    one, other = open_founded(tmp_path)
    record = tmp_path / "generations" / "run-0"
    record.write_text(record.read_text()[:9])

    other.found(("n0", "n1"))

    reason = f"{record} is torn; remove it once no process of the run lives any more"
    assert answer(other) == [Judged(record=None, reason=reason)]
    for folder in (one, other):
        folder.close()


def test_attempts_of_a_scheduler_do_not_find_each_other_and_the_newest_has_the_run(
    tmp_path: Path,
) -> None:
    first, second = (RunFolder(tmp_path, run="a", attempt=each) for each in (0, 1))
    records = []
    for folder, address in ((first, "n0:1"), (second, "n0:2"), (first, "n0:1")):
        folder.announce(address)
        answer(folder)
        folder.found(("n0", "n1"))
        (judged,) = answer(folder)
        assert isinstance(judged, Judged)
        records.append(judged)

    begun = [each.record and (each.record.number, each.record.attempt) for each in records]
    assert begun == [(0, 0), (1, 1), None]
    assert "started the run again, as attempt 1" in records[2].reason
    assert first.find_agents() == ["n0:1"]
    assert second.find_agents() == ["n0:2"]
    for folder in (first, second):
        folder.close()


def test_folder_that_cannot_link_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As mounts of object stores are."""

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), source)

    monkeypatch.setattr(os, "link", refuse)
    one = RunFolder(tmp_path, run="a")

    one.announce("n0:1")
    answer(one)

    assert not one.is_shared
    one.claim(4, make_layout(nodes=["n0"], num_local_ranks=1))
    (claimed,) = answer(one)
    assert isinstance(claimed, Claimed)
    assert claimed.layout is None
    assert "Operation not permitted" in claimed.reason
    one.close()
