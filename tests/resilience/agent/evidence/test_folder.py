"""What agents tell each other by files, on a real file system."""

from __future__ import annotations

import errno
import json
import os
import select
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from resilience import whole_files
from resilience.agent.coordination.events import Claimed, Judged, Recorded
from resilience.agent.coordination.membership import Options, State
from resilience.agent.evidence import folder as folder_module
from resilience.agent.evidence import records
from resilience.agent.evidence.folder import Answer, RunFolder
from resilience.comm.messages import End, Join
from resilience.state.layout import make_layout

ENDED = frozenset({("n1", "a")})
"""Whose end is known to whoever reads a record."""


def answer(folder: RunFolder) -> list[Answer]:
    assert select.select([folder], [], [], 60)[0]
    return folder.answers()


def begin(folder: RunFolder, *agents: str) -> Judged:
    """Return whether these agents may begin the run."""
    folder.found(agents)
    (judged,) = answer(folder)
    assert isinstance(judged, Judged)
    return judged


class Folders:
    """The folder of a run, as its agents open it; what they have open is closed after the test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened: list[RunFolder] = []

    def open(self, run: str = "a", **options: Any) -> RunFolder:
        self.opened.append(RunFolder(self.path, run=run, **options))
        return self.opened[-1]

    def close(self) -> None:
        while self.opened:
            self.opened.pop().close()

    def two(self) -> tuple[RunFolder, RunFolder]:
        one, other = self.open(), self.open()
        for folder, address in ((one, "n0:1"), (other, "n1:1")):
            folder.announce(address)
            assert answer(folder) == []
        return one, other

    def founded(self) -> tuple[RunFolder, RunFolder]:
        """Return the folder as seen by the agent that has begun the run, and by another one."""
        one, other = self.two()
        begin(one, "n0", "n1")
        return one, other


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Folders]:
    found = Folders(tmp_path)
    yield found
    found.close()


def known(
    *agents: str, number: int, here: Sequence[str] = (), status: int = 0, **more: Any
) -> State:
    """Return the state of a coordinator that has heard of these agents."""
    return State(
        options=Options(num_nodes=1, num_local_ranks=1),
        known=frozenset(agents),
        generation=number,
        present={name: Join(node=name, address="") for name in here},
        ending=End(status=status, reason=""),
        **more,
    )


def renew(folder: RunFolder, *agents: str, number: int, is_over: bool = False, **more: Any) -> None:
    """Renew the record, and return when that is done."""
    folder.renew(known(*agents, number=number, **more), is_over=is_over)
    answer(folder)


def read(folder: RunFolder) -> list[Answer]:
    folder.read_record(ENDED)
    return answer(folder)


def test_agents_find_each_other_and_leave_nothing(folders: Folders) -> None:
    one, other = folders.two()

    other.look(one.start)
    answer(other)

    assert other.is_shared
    assert sorted(folders.open().find_agents()) == ["n0:1", "n1:1"]
    assert folders.open("b").find_agents() == []
    folders.close()
    assert list((folders.path / "agents").iterdir()) == []


def test_nothing_is_known_before_all_that_was_asked_is_answered(folders: Folders) -> None:
    one, other = folders.open(), folders.open()
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


def test_agent_of_another_folder_is_not_seen(folders: Folders) -> None:
    one = folders.open()

    one.look("nobody")
    answer(one)

    assert not one.is_shared


def test_agent_that_is_alone_takes_its_folder_for_a_common_one(folders: Folders) -> None:
    """No file of another one says whether that is so."""
    one = folders.open()

    one.announce("n0:1")
    answer(one)

    assert one.is_shared


def test_first_of_two_halves_has_the_record(folders: Folders) -> None:
    one, other = folders.two()
    first, second = (make_layout(nodes=[name], num_local_ranks=1) for name in ("n0", "n1"))

    for folder, layout in ((one, first), (other, second)):
        folder.claim(4, layout)

        assert answer(folder) == [Claimed(generation=4, layout=first)]


def test_run_is_begun_once_and_its_record_is_renewed(folders: Folders) -> None:
    one, other = folders.two()

    begun = begin(one, "n0", "n1").record
    refused = begin(other, "n1", "n2")
    renew(one, "n0", number=5, is_over=True)
    again = begin(other, "n7").record

    assert begun
    assert begun.generation == -1
    assert refused == Judged(record=None, reason="n0 may go on with the run")
    assert again
    assert (again.number, again.generation) == (1, 5)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand in for the time that an agent goes by, which is `now_s`."""
    fake = SimpleNamespace(now_s=0.0)
    fake.monotonic = lambda: fake.now_s
    monkeypatch.setattr(records, "time", fake)
    return fake


def begin_at(folder: RunFolder, clock: SimpleNamespace, now_s: float) -> int | None:
    """Return the generation behind which another agent begins the run, None where it may not."""
    clock.now_s = now_s
    record = begin(folder, "n2").record
    return record.generation if record else None


@pytest.mark.parametrize(
    ("run", "silence_s"),
    [pytest.param("a", 180.0, id="same-run"), pytest.param("b", 90.0, id="another-job")],
)
def test_silence_of_a_record_counts_from_an_agents_first_look(
    run: str, silence_s: float, folders: Folders, clock: SimpleNamespace
) -> None:
    """It cannot know how long nobody had renewed the record; nor can one that looks later."""
    folders.founded()
    first, later = folders.open(run), folders.open(run)

    assert begin_at(first, clock, 100.0) is None
    assert begin_at(first, clock, 99.0 + silence_s) is None
    assert begin_at(later, clock, 99.0 + silence_s) is None
    assert begin_at(later, clock, 100.0 + silence_s) is None
    assert begin_at(first, clock, 100.0 + silence_s) == 99


def test_record_that_is_renewed_is_silent_anew(folders: Folders, clock: SimpleNamespace) -> None:
    one, _ = folders.founded()
    first = folders.open("b")
    assert begin_at(first, clock, 0.0) is None

    renew(one, "n0", "n1", number=4)

    assert [begin_at(first, clock, now_s) for now_s in (60.0, 149.0, 150.0)] == [None, None, 104]


def test_record_names_the_start_of_each_agent_that_was_heard_of_last(folders: Folders) -> None:
    one, other = folders.founded()

    renew(one, "n0", "n1", number=4, starts={"n0": "a", "n1": "b"})
    renew(other, "n0", "n1", number=5, starts={"n1": "c"}, here=["n1"])
    renew(one, "n0", "n1", number=4, starts={"n0": "d"})

    assert read(one) == [Recorded(after=ENDED, generation=5, starts={"n0": "a", "n1": "c"})]


def test_a_further_node_begins_no_run_that_has_ended(folders: Folders) -> None:
    """Others may, as a scheduler that starts the run again wants it."""
    one, _ = folders.founded()
    late, another = (folders.open(run, begins_anew=False) for run in ("a", "b"))
    assert late.records.find_end() is None
    renew(one, "n0", "n1", number=5, is_over=True, status=0)

    assert (late.records.find_end(), another.records.find_end()) == (0, None)
    assert begin(late, "n2") == Judged(record=None, reason="it has ended")
    assert begin(another, "n2").record is not None


def test_record_names_who_has_ended_until_it_comes_again(folders: Folders) -> None:
    one, other = folders.founded()

    def gone(folder: RunFolder) -> frozenset[str]:
        (found,) = read(folder)
        assert isinstance(found, Recorded)
        return found.gone

    renew(one, "n0", "n1", number=4, starts={"n0": "a", "n1": "b"}, gone=frozenset({"n1"}))
    assert gone(other) == {"n1"}
    renew(other, "n0", "n1", number=5, starts={"n1": "c"}, here=["n1"])
    assert gone(one) == frozenset()
    renew(other, "n0", "n1", number=6, starts={"n1": "c"}, gone=frozenset({"n1"}))

    assert gone(one) == {"n1"}


def test_run_that_has_ended_stays_so_whoever_wakes_up(folders: Folders) -> None:
    one, other = folders.founded()
    nothing_yet = read(other)

    renew(one, "n0", "n1", number=5, is_over=True, status=75)
    renew(other, "n0", "n1", number=4)

    assert nothing_yet == [Recorded(after=ENDED, generation=-1)]
    assert read(other) == [Recorded(after=ENDED, generation=5, is_over=True, status=75)]


def test_end_stays_though_a_renewal_stood_still_as_it_was_written(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that is stopped between what it has read and what it writes knows of no end."""
    one, other = folders.founded()
    is_written, goes_on = Event(), Event()

    def stand_still(path: Path, data: Mapping[str, object], writer: str) -> None:
        is_written.set()
        assert goes_on.wait(60.0)
        whole_files.write_whole(path, data, writer)

    with monkeypatch.context() as slow:
        slow.setattr(records, "write_whole", stand_still)
        other.renew(known("n0", "n1", number=4))
        assert is_written.wait(60.0)
    renew(one, "n0", "n1", number=5, is_over=True, status=75)
    goes_on.set()
    answer(other)

    assert read(other) == [Recorded(after=ENDED, generation=5, is_over=True, status=75)]


def test_an_agent_does_not_go_before_the_runs_end_is_written(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the disk is slower than what an agent waits for otherwise."""
    one, other = folders.founded()
    goes_on = Event()

    def stand_still(path: Path, data: Mapping[str, object], writer: str) -> bool:
        assert goes_on.wait(60.0)
        return whole_files.write_first(path, data, writer)

    monkeypatch.setattr(records, "write_first", stand_still)
    monkeypatch.setattr(folder_module, "_CLOSE_S", 0.0)
    one.renew(known("n0", "n1", number=5), is_over=True)
    folders.opened.remove(one)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(one.close)
        with pytest.raises(FutureTimeoutError):
            closing.result(0.2)
        goes_on.set()

    assert read(other) == [Recorded(after=ENDED, generation=5, is_over=True)]


def test_who_is_behind_the_others_says_nothing_of_the_run(folders: Folders) -> None:
    """It stood still, and ends for a cause of its own while they go on."""
    one, other = folders.founded()

    renew(other, "n1", "n2", number=5)
    renew(one, "n0", "n1", number=4, is_over=True, status=1)
    still_goes_on = read(other)
    renew(one, "n0", "n1", number=5, is_over=True, status=1)
    renew(other, "n1", "n2", number=6)

    assert still_goes_on == [Recorded(after=ENDED, generation=5)]
    assert read(other) == [Recorded(after=ENDED, generation=6)]
    newest = json.loads((folders.path / "generations" / "run-0").read_text())
    assert (newest["generation"], newest["agents"]) == (6, ["n0", "n1", "n2"])


def test_record_that_a_full_disk_does_not_take_stays_as_it_was(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = folders.founded()

    def refuse(path: Path, text: str) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    with monkeypatch.context() as full:
        full.setattr(whole_files, "write_text", refuse)
        one.renew(known("n0", "n1", number=5), is_over=True)
        other.claim(1, make_layout(nodes=["n0"], num_local_ranks=1))
        (claimed,) = answer(other)
        answer(one)

    assert isinstance(claimed, Claimed)
    assert "No space left on device" in claimed.reason
    assert [path.name for path in (folders.path / "generations").iterdir()] == ["run-0"]
    renew(one, "n0", "n1", number=5, is_over=True)
    assert read(other) == [Recorded(after=ENDED, generation=5, is_over=True)]


def test_end_of_another_run_is_none_of_this_one(folders: Folders) -> None:
    one, _ = folders.two()
    later = folders.open(attempt=1)
    begin(one, "n0", "n1")
    renew(one, "n0", "n1", number=5, is_over=True)

    assert read(later) == []


def test_agent_whose_processes_outlive_it_holds_up_the_next_run(folders: Folders) -> None:
    """A worker that not even SIGKILL ends keeps the agent's lock."""
    one = folders.open()
    lock = one.hold_lock()
    one.announce("n0:1", "n0")
    answer(one)
    begin(one, "n0")
    renew(one, "n0", number=0, starts={"n0": one.start})

    one.close(has_processes=True)
    held = begin(folders.open("b"), "n2")
    os.close(lock)

    assert held.record is None
    assert begin(folders.open("b"), "n2").record is not None


@pytest.mark.parametrize("newer", [None, "a start that has left no word"])
def test_run_whose_agents_have_ended_in_order_holds_up_no_later_one(
    folders: Folders, newer: str | None
) -> None:
    one, other = folders.open(), folders.open()
    for folder, node in ((one, "n0"), (other, "n1")):
        folder.announce(f"{node}:1", node)
        answer(folder)
    begin(one, "n0", "n1")
    starts = {"n0": one.start, "n1": newer or other.start}
    renew(one, "n0", "n1", number=0, starts=starts)

    one.close()
    early = begin(folders.open("b"), "n2")
    other.close()
    late = begin(folders.open("b"), "n2")

    assert early.reason == "n0, n1 may go on with run 'a' in the same folder"
    assert (late.record is None) == (newer is not None)
    assert folders.open().find_agents() == []


def test_torn_record_is_named(folders: Folders) -> None:
    _, other = folders.founded()
    record = folders.path / "generations" / "run-0"
    record.write_text(record.read_text()[:9])

    judged = begin(other, "n0", "n1")

    reason = f"{record} is torn; remove it once no process of the run lives any more"
    assert judged == Judged(record=None, reason=reason)


def test_attempts_of_a_scheduler_do_not_find_each_other_and_the_newest_has_the_run(
    folders: Folders,
) -> None:
    first, second = (folders.open(attempt=each) for each in (0, 1))
    records = []
    for folder, address in ((first, "n0:1"), (second, "n0:2"), (first, "n0:1")):
        folder.announce(address)
        answer(folder)
        records.append(begin(folder, "n0", "n1"))

    begun = [each.record and (each.record.number, each.record.attempt) for each in records]
    assert begun == [(0, 0), (1, 1), None]
    assert "attempt 0 of the run is refused" in records[2].reason
    assert first.find_agents() == ["n0:1"]
    assert second.find_agents() == ["n0:2"]


def test_folder_that_cannot_link_is_nobodys(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As mounts of object stores are."""

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), source)

    monkeypatch.setattr(os, "link", refuse)
    one = folders.open()

    one.announce("n0:1")
    answer(one)

    assert not one.is_shared
    one.claim(4, make_layout(nodes=["n0"], num_local_ranks=1))
    (claimed,) = answer(one)
    assert isinstance(claimed, Claimed)
    assert claimed.layout is None
    assert "Operation not permitted" in claimed.reason
