"""The record of a run: one id for all its starts, whoever writes it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from resilience.node_config import RunConfig
from resilience.run_record import (
    RECORD_FOLDER,
    RecordError,
    RunRecord,
    make_run_id,
    mark_stored,
    note_start,
    open_record,
    read_record,
    read_starts,
)

CONFIG = RunConfig(recipe="llama/x", version=1, digest="d" * 64)


def open_at(folder: Path, name: str = "job-1") -> RunRecord:
    return open_record(folder, CONFIG, run_id=make_run_id("token", name), now=1.0)


def test_a_run_keeps_its_id_over_all_its_starts(tmp_path: Path) -> None:
    first = open_at(tmp_path)

    second = open_at(tmp_path, "job-2")

    assert first == second == read_record(tmp_path)
    assert first.run_id != make_run_id("token", "job-2")


def test_nodes_without_a_common_folder_make_the_same_id(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for each in folders:
        each.mkdir()

    assert open_at(folders[0]).run_id == open_at(folders[1]).run_id


@pytest.mark.parametrize(("token", "name"), [("other", "job-1"), ("token", "job-2"), ("", "job-1")])
def test_no_other_run_has_the_id(token: str, name: str) -> None:
    assert make_run_id(token, name) != make_run_id("token", "job-1")
    assert len(make_run_id(token, name)) == 32


def test_a_new_run_of_another_job_does_not_go_on_from_what_is_stored(tmp_path: Path) -> None:
    """A job of one name that was submitted anew, with another seed, say."""
    other = CONFIG.model_copy(update={"digest": "e" * 64})
    continued = other.model_copy(update={"continues": True})
    open_at(tmp_path)
    note_start(tmp_path, CONFIG, name="job-0", now=2.0)
    assert note_start(tmp_path, other, name="nothing-stored", now=2.0).number == 1
    assert note_start(tmp_path, CONFIG, name="job-1", now=2.0).number == 2
    mark_stored(tmp_path)

    told = r"has checkpoints of another job \(digest dd+\) than this one \(digest ee+\).* run.name"
    with pytest.raises(ValueError, match=told):
        note_start(tmp_path, other, name="job-2", now=3.0)
    assert len(read_starts(tmp_path)) == 3
    assert note_start(tmp_path, CONFIG, name="job-3", now=3.0).number == 3
    assert note_start(tmp_path, continued, name="job-4", now=3.0).number == 4
    assert note_start(tmp_path, other, name="job-4", now=3.0).number == 4


def test_a_folder_without_a_run_has_no_record(tmp_path: Path) -> None:
    assert read_record(tmp_path) is None
    assert read_starts(tmp_path) == ()


def test_each_start_is_noted_once_whichever_node_comes_first(tmp_path: Path) -> None:
    def note(number: int) -> int:
        return note_start(tmp_path, CONFIG, name=f"job-{number % 4}", now=2.0).number

    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(note, range(32)))

    starts = read_starts(tmp_path)
    assert [each.number for each in starts] == [0, 1, 2, 3]
    assert {each.name for each in starts} == {f"job-{number}" for number in range(4)}
    assert [starts[number].name for number in numbers] == [f"job-{each % 4}" for each in range(32)]


def test_starts_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in range(12):
        note_start(tmp_path, CONFIG, name=f"job-{number}", now=2.0)

    assert [each.number for each in read_starts(tmp_path)] == list(range(12))


def test_a_start_that_is_torn_costs_its_number_alone(tmp_path: Path) -> None:
    note_start(tmp_path, CONFIG, name="job-0", now=2.0)
    (tmp_path / RECORD_FOLDER / "start-0.json").write_text("")

    assert note_start(tmp_path, CONFIG, name="job-1", now=2.0).number == 1
    assert [each.name for each in read_starts(tmp_path)] == ["job-1"]


@pytest.mark.parametrize("content", ["", "{", '{"run_id": 1}', "[]"])
def test_a_torn_record_is_named(tmp_path: Path, content: str) -> None:
    open_at(tmp_path)
    path = tmp_path / RECORD_FOLDER / "run.json"
    path.write_text(content)

    with pytest.raises(RecordError, match=f"^{path} is torn"):
        open_at(tmp_path)
    assert path.read_text() == content


def test_nothing_but_the_record_is_left(tmp_path: Path) -> None:
    open_at(tmp_path)
    open_at(tmp_path)
    note_start(tmp_path, CONFIG, name="job", now=2.0)

    assert sorted(each.name for each in (tmp_path / RECORD_FOLDER).iterdir()) == [
        "run.json",
        "start-0.json",
    ]
