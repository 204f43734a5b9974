"""A run's folder that hangs: steps and recovery go on, and its record is whole afterwards."""

from __future__ import annotations

import time

import pytest

from tests.disks import frozen, open_disk
from tests.scenarios.recovery.runs import check_no_step_lost, finish, make_fault_job, start_run


@pytest.mark.parametrize(
    ("seconds", "max_steps"),
    [
        pytest.param(3, 70, id="for-a-moment"),
        pytest.param(60, 2500, id="for-60-s", marks=pytest.mark.slow),
    ],
)
def test_run_recovers_while_its_folder_hangs(tmp_path, seconds, max_steps):
    """The rank that dies is the one whose steps are in the record."""
    folder = tmp_path / "run"
    with open_disk(folder, tmp_path / "disk.img"):
        job = make_fault_job("ddp", max_steps=max_steps, num_devices=2)
        with start_run(folder, job) as run:
            run.wait_for_step(12)
            with frozen(folder):
                since = time.time()
                run.kill_ranks(0)
                time.sleep(seconds)
                until = time.time()
            outcome = finish(run)

        assert outcome.statuses == [0], run.log()
        assert [each.step for each in outcome.events if each.event == "step"][-1] == max_steps - 1
        check_no_step_lost(outcome.events)
        assert set(outcome.bits()) == set(range(max_steps))
        for name in ("fault_detected", "generation_opened", "worker_replaced", "rank_resumed"):
            assert any(since < each.time < until for each in outcome.named(name)), name
        assert {each.rank for each in outcome.named("rank_resumed")} == {0, 1}
        # What a rank wrote before it reported stands before what was decided by its report.
        names = [each.event for each in outcome.events]
        second_opening = names.index("generation_opened", names.index("generation_opened") + 1)
        assert names.index("rank_stopped") < second_opening
        assert outcome.left_behind == ()
