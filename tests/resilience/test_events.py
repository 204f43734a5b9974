from __future__ import annotations

import json
import math
import multiprocessing
import re
from pathlib import Path

import pytest

from resilience.event_files import event_files, node_events
from resilience.events import Event, EventLog, EventReader, merge_events, read_events


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def open_log(path: Path, *, rank: int | None = 0) -> EventLog:
    return EventLog(path, node="node-0", rank=rank, generation=3, clock=lambda: 12.5)


def test_what_was_written_is_read_back(path: Path) -> None:
    with open_log(path) as log:
        log.write("step", step=7, loss=2.25, tags=["a", None])

    assert read_events(path) == [
        Event(
            time=12.5,
            node="node-0",
            rank=0,
            generation=3,
            step=7,
            event="step",
            fields={"loss": 2.25, "tags": ["a", None]},
        )
    ]


def test_a_line_is_one_json_object_with_the_documented_keys(path: Path) -> None:
    with open_log(path, rank=None) as log:
        log.write("worker_failed", message='two\nlines, "quoted" \u2028 \x00')

    (line,) = path.read_text("ascii").splitlines()
    assert json.loads(line) == {
        "time": 12.5,
        "node": "node-0",
        "rank": None,
        "generation": 3,
        "step": None,
        "event": "worker_failed",
        "fields": {"message": 'two\nlines, "quoted" \u2028 \x00'},
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_non_finite_number_stays_valid_json_and_float_reads_it_back(
    path: Path, value: float
) -> None:
    with open_log(path) as log:
        log.write("step", step=1, loss=value, nested={"all": [value]})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    record = json.loads(path.read_text("ascii"), parse_constant=refuse)
    assert repr(float(record["fields"]["loss"])) == repr(value)
    assert repr(float(record["fields"]["nested"]["all"][0])) == repr(value)


def test_field_that_json_cannot_hold_is_refused_and_leaves_no_trace(path: Path) -> None:
    with open_log(path) as log, pytest.raises(TypeError, match="not JSON serializable"):
        log.write("checkpoint_written", path=Path("/tmp"))

    assert path.read_bytes() == b""


def _write_many(path: Path, rank: int) -> None:
    with EventLog(path, node="node-0", rank=rank, generation=0) as log:
        for step in range(200):
            log.write("step", step=step, padding="x" * (step * 37 % 5000))


def test_processes_that_share_a_file_keep_each_line_whole_and_their_own_order(
    path: Path,
) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(path, rank)) for rank in range(3)]

    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()

    events = read_events(path)
    for rank in range(3):
        assert [event.step for event in events if event.rank == rank] == list(range(200))


@pytest.mark.parametrize("num_bytes_left", [1, 5, 9, 60], ids=lambda size: f"{size}-bytes")
def test_line_cut_short_by_a_kill_costs_only_itself(path: Path, num_bytes_left: int) -> None:
    with open_log(path) as log:
        log.write("worker_started", pid=1)
        log.write("step", step=1)
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second[:num_bytes_left])

    with open_log(path) as log:
        log.write("step", step=2)
        log.write("step", step=3)

    reader = EventReader(path)
    assert [event.step for event in reader.read_new()] == [None, 2, 3]
    words = "1 lines of events.jsonl whose writer died within them"
    assert reader.left_out(is_over=False) == [words]


def test_line_cut_short_while_others_have_the_log_open_costs_only_itself(path: Path) -> None:
    with open_log(path) as survivor:
        survivor.write("step", step=1)
        with path.open("ab") as killed:
            killed.write(b'{"time":1.0,"nod')
        survivor.write("step", step=2)

    assert [event.step for event in read_events(path)] == [1, 2]


def test_reader_returns_each_event_once_and_waits_for_the_end_of_a_line(path: Path) -> None:
    reader = EventReader(path)
    assert reader.read_new() == []
    with open_log(path) as log:
        log.write("step", step=1)
        log.write("step", step=2)
    content = path.read_bytes()

    path.write_bytes(content[:-10])
    assert [event.step for event in reader.read_new()] == [1]
    assert reader.read_new() == []
    path.write_bytes(content)
    assert [event.step for event in reader.read_new()] == [2]
    assert reader.left_out(is_over=True) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        pytest.param("hello", "Expecting value", id="no-json"),
        pytest.param("[1]", "no event; an event has the keys time, node, ", id="no-object"),
        pytest.param('{"time": 1}', "no event; an event has the keys", id="too-few-keys"),
        pytest.param(
            '{"time":1,"node":"a","rank":"0","generation":0,"step":null,"event":"x","fields":{}}',
            "no event; rank cannot be '0'",
            id="wrong-kind",
        ),
        pytest.param("\r", "Expecting value", id="carriage-return"),
    ],
)
def test_line_that_is_no_event_is_named_and_the_rest_still_readable(
    path: Path, line: str, message: str
) -> None:
    with open_log(path) as log:
        log.write("step", step=1)
    with path.open("a") as file:
        file.write(f"{line}\n")
    with open_log(path) as log:
        log.write("step", step=3)
    reader = EventReader(path)

    with pytest.raises(ValueError, match=rf"events\.jsonl, line 2: {message}"):
        read_events(path)

    assert [event.step for event in reader.read_new()] == [1, 3]
    assert reader.foreign == reader.left_out(is_over=False)
    assert re.match(rf"events\.jsonl, line 2: {message}", reader.foreign[0])


def test_missing_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no event log at .*events\.jsonl"):
        read_events(tmp_path / "events.jsonl")


def at(generation: int, time: float, name: str = "x") -> Event:
    return Event(
        time=time, node="n", rank=None, generation=generation, step=None, event=name, fields={}
    )


@pytest.mark.parametrize(
    ("files", "merged"),
    [
        pytest.param([[at(0, 1, "a"), at(0, 3, "c")], [at(0, 2, "b")]], "abc", id="by-time"),
        pytest.param([[at(0, 9, "a"), at(0, 1, "b")], [at(0, 5, "c")]], "cab",
                     id="each-file-in-its-own-order"),
        pytest.param([[at(0, 900, "a"), at(1, 901, "c")], [at(0, 2, "b"), at(1, 3, "d")]], "badc",
                     id="by-generation-where-a-clock-is-ahead"),
        pytest.param([[at(0, 1, "a"), at(3, 9, "c"), at(2, 10, "d")], [at(2, 8, "b")]], "abcd",
                     id="late-word-of-an-older-generation-stays-where-it-is"),
        pytest.param([[at(-1, 50, "b"), at(4, 51, "c")], [at(3, 60, "a"), at(4, 70, "d")]], "abcd",
                     id="agent-that-begins-belongs-to-its-first-generation"),
        pytest.param([[at(-1, 5, "b")], [at(0, 1, "a"), at(1, 9, "c")]], "abc",
                     id="agent-without-a-generation-goes-by-time"),
        pytest.param([[at(5, 5, "a"), at(0, 1, "b")], []], "ab", id="run-of-one-file-as-it-is"),
        pytest.param([], "", id="nothing"),
    ],
)  # fmt: skip
def test_files_of_nodes_are_read_in_one_order(files: list[list[Event]], merged: str) -> None:
    assert "".join(each.event for each in merge_events(files)) == merged


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        pytest.param(b"[" * 100_000, "it nests too deep", id="deep"),
        pytest.param(b"\0" * (3 << 20), "longer than 1048576 bytes", id="long"),
        pytest.param(b'{"time":1' + b"0" * 400 + b"}", "beyond 64 bits", id="number"),
        pytest.param(
            b'{"time":1e20,"node":"n","rank":0,"generation":0,"step":0,"event":"e","fields":{}}',
            "time cannot be 1e\\+20",
            id="time",
        ),
    ],
)
def test_a_hostile_line_is_passed_over_and_said(tmp_path: Path, line: bytes, reason: str) -> None:
    log = tmp_path / "events.jsonl"
    with EventLog(log, node="n0", rank=0, generation=0) as new:
        new.write("step", step=0)
        with log.open("ab") as file:
            file.write(line + b"\n")
        new.write("step", step=1)
    reader = EventReader(log)

    assert [each.step for each in reader.read_new()] == [0, 1]
    assert re.search(reason, reader.foreign[0])
    assert reader.foreign[0].startswith("events.jsonl, line 2: ")


def test_ends_that_are_torn_or_foreign_are_left_out_and_said(tmp_path: Path) -> None:
    """Each in a file of its own, beside the one file of a run of an older version."""
    log = tmp_path / "events.jsonl"
    with EventLog(log, node="n0", rank=0, generation=0) as old:
        old.write("step", step=0)
    (tmp_path / "events.copy.jsonl").write_text("of another log\n")
    for step, (node, end) in enumerate(
        {"torn": b'{"time":1.0,"no', "holes": b"\0\0\n\0\n", "taken": b"oops", "n 1": b""}.items()
    ):
        path = node_events(log, node)
        with EventLog(path, node=node, rank=0, generation=0) as new:
            new.write("step", step=step + 1)
        with path.open("ab") as file:
            file.write(end)
    node_events(log, "folder").mkdir()
    reader = EventReader(log)

    assert {event.step for event in reader.read_new()} == {0, 1, 2, 3, 4}
    assert reader.read_new() == []
    assert len(event_files(log)) == 6

    said = [
        "events-folder.jsonl cannot be read: is no plain file",
        "events-holes.jsonl, line 2: Expecting value: line 1 column 1 (char 0), and 1 more lines",
    ]
    ends = [
        f"the end of events-{node}.jsonl, which no newline closes" for node in ("taken", "torn")
    ]
    assert reader.left_out(is_over=False) == said
    assert sorted(reader.left_out(is_over=True)) == sorted([*said, *ends])


def test_log_that_was_removed_is_not_made_anew_and_is_read_to_its_end(path: Path) -> None:
    reader, later = EventReader(path, keeps_open=True), EventReader(path)
    with open_log(path) as log:
        log.write("step", step=1)
        assert len(reader.read_new()) == len(later.read_new()) == 1
        path.unlink()
        log.write("step", step=2)

        with pytest.raises(FileNotFoundError):
            log.write_through("fault_injected")

    assert [each.step for each in reader.read_new()] == [2]
    assert later.read_new() == []
    assert not path.exists()
    reader.close()
