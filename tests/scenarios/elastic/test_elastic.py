"""A run that grows and shrinks is, with one order of sums, the run that never did."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from launcher.job import Job
from tests.recipes_training.jobs import make_job
from tests.resilience.agent.test_drain import drain
from tests.scenarios.recovery.runs import (
    FaultOutcome,
    Run,
    check_no_step_lost,
    finish,
    make_fault_job,
    start_run,
)

VALUES = {"order_of_sums": "fixed", "global_batch_size": 24, "micro_batch_size": 2}


def sizes(low: int, high: int, **changes: Any) -> dict[str, Any]:
    return {
        "nodes_min": low,
        "nodes_max": high,
        "nodes_step": None,
        "nodes_allowed": None,
        "may_lose_steps": True,
        "hold_s": 0.0,
        "scale_up_snooze_s": 0.0,
        "scaling_timeout_s": 60,
        "graceful_shutdown_timeout_s": 60,
        "faulty_scale_down_timeout_s": None,
        **changes,
    }


def job_and_alone(
    reference: Any, steps: int, *, num_nodes: int = 3, elastic: Any = None, **settings: Any
) -> tuple[Job, Any]:
    """Return the job of three nodes, and the run of one worker that nothing befalls."""
    job = make_fault_job(
        num_nodes=num_nodes,
        num_devices=1,
        max_steps=steps,
        elastic=elastic or sizes(1, 3),
        values=VALUES,
        settings=settings,
    )
    trainer = {**VALUES, "max_steps": steps, "optimizer": {"decay_steps": 400}}
    return job, reference(make_job(trainer=trainer))


def test_lost_nodes_leave_the_run_smaller_with_the_bits_of_one_worker(
    reference: Any, tmp_path: Path
) -> None:
    job, alone = job_and_alone(reference, 100)

    with start_run(tmp_path, job, nodes=("n0", "n1", "n2")) as run:
        run.wait_for_step(6)
        run.kill_node("n1")
        run.wait_for_step(40)
        run.kill_node("n0")
        outcome = finish(run)

    assert outcome.statuses == [-9, -9, 0], run.log()
    check_as_alone(outcome, alone)
    assert [e.fields["world_size"] for e in outcome.named("generation_opened")] == [3, 2, 1]


def test_nodes_that_come_let_the_run_grow_and_redo_nothing(reference: Any, tmp_path: Path) -> None:
    job, alone = job_and_alone(reference, 200)

    with start_run(tmp_path, job, nodes=("n0", "n1", "n2")) as run:
        run.wait_for_step(6)
        run.kill_node("n2")
        run.wait_for(lambda event: event.generation == 1 and event.event == "step")
        run.start_node("n3")
        outcome = finish(run)

    assert outcome.statuses == [0, 0, -9, 0], run.log()
    check_as_alone(outcome, alone)
    assert [e.fields["world_size"] for e in outcome.named("generation_opened")] == [3, 2, 3]
    assert len(outcome.named("generation_left")) == 1
    check_nothing_was_done_twice(outcome, generation=2)
    grown = [e for e in outcome.named("rank_recovered") if e.generation == 2]
    assert [e.rank for e in grown if e.fields["role"] == "repaired"] == [2]


@pytest.mark.slow
def test_a_node_that_is_asked_to_leave_goes_after_a_step_of_all(
    reference: Any, tmp_path: Path
) -> None:
    job, alone = job_and_alone(reference, 160)

    with start_run(tmp_path, job, nodes=("n0", "n1", "n2")) as run:
        run.wait_for_step(6)
        leaving = next(name for name in ("n2", "n1") if name != coordinator_of(run))
        # As Slurm does where it preempts a job: the workers are signalled as well, and all twice.
        for _ in range(2):
            run.signal_node(leaving, signal.SIGTERM)
        outcome = finish(run)

    assert sorted(outcome.statuses) == [0, 0, 143], run.log()
    assert run.agents[leaving].returncode == 143
    check_as_alone(outcome, alone)
    assert [e.fields["world_size"] for e in outcome.named("generation_opened")] == [3, 2]
    assert not outcome.named("generation_broken")
    check_nothing_was_done_twice(outcome, generation=1)


def test_a_node_that_coordinates_may_leave(reference: Any, tmp_path: Path) -> None:
    job, alone = job_and_alone(reference, 160)

    with start_run(tmp_path, job, nodes=("n0", "n1", "n2")) as run:
        run.wait_for_step(6)
        leader = coordinator_of(run)
        assert drain(leader, run.folder) == (0, f"{leader} is about to leave the run\n")
        outcome = finish(run)

    assert sorted(outcome.statuses) == [0, 0, 143], run.log()
    check_as_alone(outcome, alone)
    assert [e.fields["world_size"] for e in outcome.named("generation_opened")] == [3, 2]
    for name in ("generation_broken", "fault_detected", "coordinator_replaced"):
        assert not outcome.named(name)
    check_nothing_was_done_twice(outcome, generation=1)


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        pytest.param((), ("n1", "n0", "n2"), id="all"),
        pytest.param(("--ends-run",), ("n1",), id="one-that-the-run-ends-with"),
    ],
)
def test_a_run_whose_nodes_are_all_asked_to_leave_stops_once(
    tmp_path: Path, options: tuple[str, ...], asked: tuple[str, ...]
) -> None:
    job = make_fault_job(
        num_nodes=3, num_devices=1, max_steps=2000, elastic=sizes(1, 3), values=VALUES
    )

    with start_run(tmp_path, job, nodes=("n0", "n1", "n2"), options=options) as run:
        run.wait_for_step(6)
        for name in asked:
            run.signal_node(name, signal.SIGTERM)
        outcome = finish(run)

    assert outcome.statuses == [143, 143, 143], run.log()
    assert len(outcome.named("generation_opened")) == 1
    # Spares stop as well, in no step.
    stops = [e.step for e in outcome.named("worker_stopped") if e.step is not None]
    assert stops == [stops[0]] * 3
    assert not outcome.left_behind


@pytest.mark.slow
def test_a_node_that_was_silent_comes_back_into_the_run(reference: Any, tmp_path: Path) -> None:
    job, alone = job_and_alone(reference, 100, lease_s=0.5)

    with start_run(tmp_path, job, nodes=("n0", "n1", "n2")) as run:
        run.wait_for_step(6)
        silent = next(name for name in ("n2", "n1") if name != coordinator_of(run))
        run.signal_node(silent, signal.SIGSTOP)
        run.wait_for(lambda event: event.generation == 1 and event.event == "step")
        run.signal_node(silent, signal.SIGCONT)
        outcome = finish(run)

    assert outcome.statuses == [0, 0, 0], run.log()
    check_as_alone(outcome, alone)
    opened = [e.fields["world_size"] for e in outcome.named("generation_opened")]
    assert (opened[:2], opened[-1]) == ([3, 2], 3)


@pytest.mark.slow
def test_a_member_that_stands_by_since_may_leave(reference: Any, tmp_path: Path) -> None:
    """Two nodes are left where 1 and 3 are allowed: both have the state, and one goes on."""
    job, alone = job_and_alone(reference, 60, elastic=sizes(1, 3, nodes_allowed=[1, 3]))

    with start_run(tmp_path, job, nodes=("n0", "n1", "n2")) as run:
        run.wait_for_step(6)
        lost = next(name for name in ("n2", "n1") if name != coordinator_of(run))
        run.kill_node(lost)
        last = run.wait_for(lambda event: event.generation == 2 and event.event == "step")
        (idle,) = {"n0", "n1", "n2"} - {lost, last.node}
        assert drain(idle, run.folder) == (0, f"{idle} is about to leave the run\n")
        outcome = finish(run)

    assert sorted(outcome.statuses) == [-9, 0, 143], run.log()
    assert run.agents[idle].returncode == 143
    check_as_alone(outcome, alone)
    # A fourth one where the node that left coordinated.
    opened = [e.fields["world_size"] for e in outcome.named("generation_opened")]
    assert opened in ([3, 2, 1], [3, 2, 1, 1])


def test_a_node_that_waits_for_others_may_leave_before_the_begin(tmp_path: Path) -> None:
    job = make_fault_job(
        num_nodes=3, num_devices=1, max_steps=2, elastic=sizes(2, 3), values=VALUES
    )

    with start_run(tmp_path, job, nodes=("n0",)) as run:
        run.wait_for(lambda event: event.event == "node_joined")
        os.kill(run.agents["n0"].pid, signal.SIGTERM)
        outcome = finish(run)

    assert outcome.statuses == [143], run.log()
    assert not outcome.named("generation_opened")
    assert not outcome.left_behind


@pytest.mark.slow
def test_sharded_copies_come_and_go_with_their_nodes(tmp_path: Path) -> None:
    """A copy of two ranks on each node: 3, 2 and 3 of them."""
    values = {"global_batch_size": 24, "micro_batch_size": 2, "num_replicas": 3}
    job = make_fault_job(
        "hybrid", num_nodes=3, num_devices=2, max_steps=160, elastic=sizes(1, 3), values=values
    )
    with start_run(tmp_path / "fixed", job, nodes=("n0", "n1", "n2")) as run:
        fixed = finish(run)

    with start_run(tmp_path / "elastic", job, nodes=("n0", "n1", "n2")) as run:
        run.wait_for_step(6)
        run.kill_node("n2")
        run.wait_for(lambda event: event.generation == 1 and event.event == "step")
        run.start_node("n3")
        outcome = finish(run)

    assert outcome.statuses == [0, 0, -9, 0], run.log()
    assert [e.fields["world_size"] for e in outcome.named("generation_opened")] == [6, 4, 6]
    losses = [{e.step: e.fields["loss"] for e in each.named("step")} for each in (fixed, outcome)]
    assert len(losses[0]) == 160
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    check_no_step_lost(outcome.events)
    check_nothing_was_done_twice(outcome, generation=2)
    assert len(set(outcome.digests().values())) == 2
    assert not outcome.left_behind


@pytest.mark.slow
def test_copies_of_two_nodes_each_come_and_go_whole(tmp_path: Path) -> None:
    """Two copies, one, two and one of them; the rest of a broken copy waits for the next node."""
    names = ("n0", "n1", "n2", "n3")
    values = {"global_batch_size": 24, "micro_batch_size": 2, "num_replicas": 2}
    elastic = sizes(2, 4, nodes_step=2)
    job = make_fault_job(
        "hybrid", num_nodes=4, num_devices=1, max_steps=200, elastic=elastic, values=values
    )
    with start_run(tmp_path / "fixed", job, nodes=names) as run:
        fixed = finish(run)

    with start_run(tmp_path / "elastic", job, nodes=names) as run:
        run.wait_for_step(6)
        run.kill_node("n1")
        run.wait_for(lambda event: event.generation == 1 and event.event == "step")
        run.start_node("n4")
        run.wait_for(lambda event: event.generation >= 2 and event.event == "step")
        leader = coordinator_of(run)
        run.signal_node(next(name for name in ("n3", "n2") if name != leader), signal.SIGTERM)
        outcome = finish(run)

    assert sorted(outcome.statuses) == [-9, 0, 0, 0, 143], run.log()
    world_sizes = [e.fields["world_size"] for e in outcome.named("generation_opened")]
    assert world_sizes[0] == 4
    assert [size for size in (2, 4, 2) if size in world_sizes[1:]] == [2, 4, 2]
    losses = [{e.step: e.fields["loss"] for e in each.named("step")} for each in (fixed, outcome)]
    assert len(losses[0]) == 200
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    check_no_step_lost(outcome.events)
    assert not outcome.named("recovery_fallback")
    assert not outcome.left_behind


def check_as_alone(outcome: FaultOutcome, alone: Any) -> None:
    """Assert that the run has the bits of one worker, and has left nothing."""
    assert outcome.bits() == FaultOutcome(alone.folder, [0]).bits()
    assert outcome.weights() == alone.weights()
    check_no_step_lost(outcome.events)
    assert not outcome.left_behind


def check_nothing_was_done_twice(outcome: FaultOutcome, *, generation: int) -> None:
    """Assert that all ranks had left after the same step, and go on with the next one."""
    (begin,) = {e.step for e in outcome.named("rank_recovered") if e.generation == generation}
    # The last step is reported once more, without the time that it took, as after a fault.
    steps = [e for e in outcome.named("step") if e.fields["duration_s"] is not None]
    assert begin == min(e.step for e in steps if e.generation == generation)
    # Who was stopped behind the gate ends the update alone, and reports it then.
    assert begin - max(e.step for e in steps if e.generation == generation - 1) in (1, 2)
    assert begin - 1 in {e.step for e in outcome.named("step")}


def coordinator_of(run: Run) -> str:
    """Return the node whose agent coordinates."""
    return run.wait_for(lambda event: event.event == "generation_opened").node
