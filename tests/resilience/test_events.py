from __future__ import annotations

import json
import math
import multiprocessing
from pathlib import Path

import pytest

from resilience.events import Event, EventLog, EventReader, read_events


def open_log(path: Path, *, rank: int | None = 0) -> EventLog:
    return EventLog(path, node="node-0", rank=rank, generation=3, clock=lambda: 12.5)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

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


def test_a_line_is_one_json_object_with_the_documented_keys(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

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
    tmp_path: Path, value: float
) -> None:
    path = tmp_path / "events.jsonl"

    with open_log(path) as log:
        log.write("step", step=1, loss=value, nested={"all": [value]})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    record = json.loads(path.read_text("ascii"), parse_constant=refuse)
    assert repr(float(record["fields"]["loss"])) == repr(value)
    assert repr(float(record["fields"]["nested"]["all"][0])) == repr(value)


def test_field_that_json_cannot_hold_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    with open_log(path) as log, pytest.raises(TypeError, match="not JSON serializable"):
        log.write("checkpoint_written", path=Path("/tmp"))

    assert path.read_bytes() == b""


def _write_many(path: Path, rank: int) -> None:
    with EventLog(path, node="node-0", rank=rank, generation=0) as log:
        for step in range(200):
            log.write("step", step=step, padding="x" * (step * 37 % 5000))


def test_processes_that_share_a_file_keep_each_line_whole_and_their_own_order(
    tmp_path: Path,
) -> None:
    path = tmp_path / "events.jsonl"
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
def test_line_cut_short_by_a_kill_costs_only_itself(tmp_path: Path, num_bytes_left: int) -> None:
    path = tmp_path / "events.jsonl"
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
    assert reader.num_torn == 1


def test_line_cut_short_while_others_have_the_log_open_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with open_log(path) as survivor:
        survivor.write("step", step=1)
        with path.open("ab") as killed:
            killed.write(b'{"time":1.0,"nod')
        survivor.write("step", step=2)

    assert [event.step for event in read_events(path)] == [1, 2]


def test_reader_returns_each_event_once_and_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
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
    assert reader.num_torn == 0


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
    tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "events.jsonl"
    with open_log(path) as log:
        log.write("step", step=1)
    with path.open("a") as file:
        file.write(f"{line}\n")
    with open_log(path) as log:
        log.write("step", step=3)
    reader = EventReader(path)

    with pytest.raises(ValueError, match=rf"events\.jsonl, line 2: {message}"):
        read_events(path)

    assert [event.step for event in reader.read_new()] == [1]
    with pytest.raises(ValueError, match="line 2"):
        reader.read_new()
    assert [event.step for event in reader.read_new()] == [3]


def test_missing_log_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no event log at .*events\.jsonl"):
        read_events(tmp_path / "events.jsonl")
