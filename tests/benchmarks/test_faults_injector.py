from __future__ import annotations

import time

import pytest

from benchmarks.events import EventLog, EventReader
from benchmarks.faults import FaultInjector, InjectedFaultError, open_window
from benchmarks.jobplan import Fault, JobPlan


def make_injector(folder, *faults):
    plan = JobPlan(run_dir=str(folder), num_steps=9, faults=faults)
    return FaultInjector(plan, EventLog(str(folder)))


def read_words(folder):
    return [event.word for event in EventReader(str(folder)).read_new()]


def test_fault_fires_at_its_step_and_rank_once(tmp_path):
    injector = make_injector(tmp_path, Fault(kind="exception", rank=1, step=4))
    injector.fire(1, 3)
    injector.fire(0, 4)

    with pytest.raises(InjectedFaultError, match="planned fault 0 of rank 1 in step 4"):
        injector.fire(1, 4)

    injector.fire(1, 4)
    make_injector(tmp_path, Fault(kind="exception", rank=1, step=4)).fire(1, 4)
    assert read_words(tmp_path) == ["faulted"]


def test_timed_fault_waits_for_the_window_and_its_time(tmp_path):
    injector = make_injector(tmp_path, Fault(kind="exception", rank=0, at_s=60.0))
    injector.fire(0, 1)
    open_window(str(tmp_path), time.monotonic())
    injector.fire(0, 2)

    assert read_words(tmp_path) == []


def test_timed_fault_fires_in_a_rank_that_was_training_when_it_was_due(tmp_path):
    injector = make_injector(tmp_path, Fault(kind="exception", rank=0, at_s=0.0))
    open_window(str(tmp_path), time.monotonic())

    with pytest.raises(InjectedFaultError):
        injector.fire(0, 2)


def test_timed_fault_of_a_rank_that_was_away_is_merged(tmp_path):
    open_window(str(tmp_path), time.monotonic() - 10)
    injector = make_injector(tmp_path, Fault(kind="exception", rank=0, at_s=5.0))

    injector.fire(0, 2)

    assert read_words(tmp_path) == ["merged"]


def test_reader_leaves_a_half_written_line_for_later(tmp_path):
    log = EventLog(str(tmp_path))
    log.write("committed", 1, step=3, world=4)
    path = next(tmp_path.glob("measured-*"))
    whole = path.read_text()
    path.write_text(whole + whole[:10])
    reader = EventReader(str(tmp_path))

    first = reader.read_new()
    path.write_text(whole + whole)
    second = reader.read_new()

    assert [event.step for event in first + second] == [3, 3]
    assert reader.events == first + second
