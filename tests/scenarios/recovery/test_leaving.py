"""A node of a run of one size is asked to end: the run waits for another one in its place."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.scenarios.recovery.conftest import Undisturbed
from tests.scenarios.recovery.runs import (
    check_no_step_lost,
    check_same_bits,
    finish,
    make_fault_job,
    start_run,
)

STEPS = 1000
"""So many that a run on an idle machine still trains when its node is asked to end."""


@pytest.mark.slow
@pytest.mark.parametrize("leaving", ["n0", "n1"])
def test_a_node_of_a_run_of_one_size_leaves_and_is_waited_for(
    undisturbed: Undisturbed, tmp_path: Path, leaving: str
) -> None:
    job = make_fault_job(num_nodes=2, num_devices=1, max_steps=STEPS)

    with start_run(tmp_path, job, nodes=("n0", "n1"), options=("--awaits-nodes",)) as run:
        run.wait_for_step(6)
        # As a kubelet does, which tells a pod's first process alone.
        run.agents[leaving].send_signal(signal.SIGTERM)
        assert run.agents[leaving].wait(timeout=60) == 128 + signal.SIGTERM, run.log()
        run.start_node(leaving)
        outcome = finish(run)

    assert outcome.statuses == [0, 0], run.log()
    check_no_step_lost(outcome.events)
    check_same_bits(outcome, undisturbed(num_devices=2, max_steps=STEPS))
    assert not outcome.left_behind
