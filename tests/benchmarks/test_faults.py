from __future__ import annotations

import collections
import time

import pytest

from benchmarks.events import EventLog, EventReader
from benchmarks.faults import (
    FaultInjector,
    InjectedFaultError,
    open_window,
    plan_schedule,
    plan_steps,
)
from benchmarks.jobplan import Fault, JobPlan, parse_plan, read_plan


@pytest.mark.parametrize("seed", range(20))
def test_schedule_is_a_function_of_its_seed(seed):
    assert plan_schedule(seed, 120) == plan_schedule(seed, 120)
    assert plan_schedule(seed, 120) != plan_schedule(seed + 1, 120)


@pytest.mark.parametrize(
    ("seconds", "kinds"),
    [
        pytest.param(120, {"exception": 6, "kill": 5, "stop": 1}, id="odd-one-is-an-exception"),
        pytest.param(110, {"exception": 5, "kill": 5, "stop": 1}, id="halves"),
        pytest.param(10, {"stop": 1}, id="one"),
        pytest.param(4, {}, id="none"),
    ],
)
def test_schedule_has_one_stop_and_halves_of_the_rest(seconds, kinds):
    for seed in range(10):
        faults = plan_schedule(seed, seconds)

        assert collections.Counter(fault.kind for fault in faults) == kinds


def test_stop_comes_early_enough_to_cost_something():
    for seed in range(50):
        kinds = [fault.kind for fault in plan_schedule(seed, 120)]

        assert kinds.index("stop") < 8


def test_schedule_stays_in_the_window_and_in_order():
    for seed in range(50):
        faults = plan_schedule(seed, 60, mean_gap_s=5, num_ranks=3)

        times = [fault.at_s for fault in faults]
        assert times == sorted(times)
        assert all(0 <= at_s < 60 for at_s in times)
        assert {fault.rank for fault in faults} <= {0, 1, 2}
        assert len(faults) == 12


def test_schedules_hit_all_ranks_evenly_over_seeds():
    ranks = collections.Counter(
        fault.rank for seed in range(200) for fault in plan_schedule(seed, 120)
    )

    assert sorted(ranks) == [0, 1, 2, 3]
    assert min(ranks.values()) > 500


def test_faults_by_step_go_round_the_ranks():
    faults = plan_steps("kill", 4, first_step=8, spacing=6)

    assert [(fault.rank, fault.step) for fault in faults] == [(1, 8), (2, 14), (3, 20), (0, 26)]


def test_plan_survives_the_file_it_travels_in(tmp_path, monkeypatch):
    plan = JobPlan(
        run_dir=str(tmp_path),
        num_steps=7,
        faults=(Fault(kind="stop", rank=2, at_s=1.5), Fault(kind="kill", rank=0, step=3)),
        ports=(1, 2),
    )
    plan.write()
    monkeypatch.setenv("FAULTBENCH_RUN_DIR", str(tmp_path))

    assert read_plan() == plan
    assert parse_plan((tmp_path / "plan.json").read_text()) == plan


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


def test_fault_fires_in_its_place_alone(tmp_path):
    faults = plan_steps("exception", 1, first_step=3, spacing=1, place="update")
    injector = make_injector(tmp_path, *faults)

    injector.fire(1, 3)
    with pytest.raises(InjectedFaultError):
        injector.fire(1, 3, "update")


def test_timed_fault_waits_for_the_window_and_its_time(tmp_path):
    injector = make_injector(tmp_path, Fault(kind="exception", rank=0, at_s=60.0))
    injector.fire(0, 1)
    open_window(str(tmp_path), time.monotonic())
    injector.fire(0, 2)

    assert read_words(tmp_path) == []


def test_timed_fault_of_a_rank_that_was_training_is_not_missed_between_two_places(tmp_path):
    injector = make_injector(tmp_path, Fault(kind="exception", rank=0, at_s=0.0))
    injector.fire(0, 1)
    open_window(str(tmp_path), time.monotonic())
    injector.fire(0, 1, "update")

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
