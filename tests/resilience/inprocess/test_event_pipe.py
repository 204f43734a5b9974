"""A worker's events on their way to its agent."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from resilience.event_files import event_files
from resilience.events import EventLog, read_events
from resilience.inprocess.event_pipe import EventPipe, open_events
from resilience.inprocess.handles import WorkerHandles


def read_all(file: int) -> bytes:
    with os.fdopen(file, "rb") as pipe:
        return pipe.read()


def test_agent_that_reads_nothing_holds_up_no_event_and_gets_all_of_them(tmp_path: Path) -> None:
    reader, end = os.pipe()
    path = tmp_path / "events.jsonl"
    log = EventLog(path, node="n0", rank=0, generation=0, sink=EventPipe(end))
    for step in range(2000):
        log.write("step", step=step, padding="x" * (step * 37 % 5000))
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(read_all(reader)))
    thread.start()

    log.close()

    thread.join()
    path.write_bytes(found[0])
    assert [each.step for each in read_events(path)] == list(range(2000))


def test_agent_that_is_gone_is_no_error_of_its_worker() -> None:
    reader, end = os.pipe()
    pipe = EventPipe(end)
    os.close(reader)

    pipe.append(b"{}\n")

    pipe.close()
    pipe.close()


@pytest.mark.parametrize(
    ("name", "is_for_agent"),
    [("run/events.jsonl", True), ("run/../run/events.jsonl", True), ("other/events.jsonl", False)],
)
def test_events_go_to_the_agent_where_it_writes_the_same_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_for_agent: bool
) -> None:
    """Then nothing of the run's folder is touched."""
    reader, end = os.pipe()
    handles = WorkerHandles(
        agent_file=-1, events_file=end, events_path=str(tmp_path / "run/events.jsonl"),
        page_file=-1, transfer_file=-1, state_files=(), slot=0, num_slots=1, num_local_ranks=1,
        transfer_bytes=0, node="n0", agent_pid=0,
    )  # fmt: skip
    for key, value in handles.variables().items():
        monkeypatch.setenv(key, value)

    with open_events(tmp_path / name, node="n0", rank=0, generation=0) as log:
        log.write("data_ready")
    os.close(end)

    assert (b"data_ready" in read_all(reader)) == is_for_agent
    assert bool(event_files(tmp_path / name)) != is_for_agent
    assert not (tmp_path / "run").exists()


def test_event_that_is_written_through_is_in_the_file_at_once(tmp_path: Path) -> None:
    reader, end = os.pipe()
    path = tmp_path / "events.jsonl"
    path.touch()
    with EventLog(path, node="n0", rank=1, generation=2, sink=EventPipe(end)) as log:
        log.write_through("fault_injected", step=3)

        (event,) = read_events(path)
    assert (event.event, event.rank, event.generation, event.step) == ("fault_injected", 1, 2, 3)
    assert read_all(reader) == b""
