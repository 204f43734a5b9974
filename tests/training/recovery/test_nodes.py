"""Nodes that are lost as a whole, and states that no node holds any more."""

from __future__ import annotations

import re
import signal

import pytest

from resilience.state.layout import make_layout
from tests.cases import slow
from tests.training.recovery.runs import (
    check_no_step_lost,
    check_same_bits,
    finish,
    make_fault_job,
    start_run,
)
from training.plan import plan_placement

NUM_STEPS = 40
NODES = ("n0", "n1", "n2")
EPOCH_DATA = {"kind": "stdlib_text", "seq_length": 16, "max_bytes": 16 * 8 * 10}
"""A step takes 8 samples: an epoch has 10 steps."""
NUM_EPOCH_STEPS = 30


def choose(run, role: str) -> str:
    """Return the node that has the role once the run has begun."""
    coordinator = run.wait_for(lambda event: event.event == "generation_opened").node
    members = {run.wait_for(is_start(rank)).node for rank in (0, 2)}
    standby = next(node for node in NODES if node not in members)
    others = {
        "coordinator": coordinator,
        "member": next(node for node in sorted(members, reverse=True) if node != coordinator),
        "standby": standby,
    }
    return others[role]


def is_start(rank: int):
    return lambda event: event.event == "worker_started" and event.rank == rank


@pytest.mark.parametrize("trainer", [slow("ddp"), "hybrid"])
@pytest.mark.parametrize("role", ["coordinator", slow("member"), slow("standby")])
def test_run_goes_on_without_a_lost_node(tmp_path, undisturbed, trainer, role):
    job = make_fault_job(trainer, max_steps=NUM_STEPS, num_nodes=2, num_devices=2, standby_nodes=1)

    with start_run(tmp_path, job, nodes=NODES) as run:
        lost = choose(run, role)
        run.wait_for_step(12)
        run.kill_node(lost)
        outcome = finish(run)

    assert sorted(outcome.statuses) == [-9, 0, 0], run.log()
    check_same_bits(outcome, undisturbed(trainer, max_steps=NUM_STEPS))
    check_no_step_lost(outcome.events)
    assert not outcome.named("recovery_fallback")
    assert (role != "coordinator") or outcome.named("coordinator_replaced")
    repaired = [e for e in outcome.named("rank_recovered") if e.fields["role"] == "repaired"]
    assert len(repaired) == (2 if role == "member" else len(repaired))


@pytest.mark.parametrize("trainer", ["ddp", slow("hybrid")])
def test_workers_of_a_node_that_gets_another_place_live_on(tmp_path, undisturbed, trainer):
    """Its agent is silent until a standby has its place; then it has that of a lost node."""
    pauses = [
        {"kind": "slow", "place": "forward", "step": 5, "rank": rank, "seconds": 13.0}
        for rank in (0, 2)
    ]
    last = [{**each, "step": 15, "seconds": 6.0} for each in pauses]
    job = make_fault_job(
        trainer,
        max_steps=NUM_STEPS,
        num_nodes=2,
        num_devices=2,
        standby_nodes=1,
        faults=[*pauses, *last],
        settings={"hang_deadline_s": 60},
    )

    with start_run(tmp_path, job, nodes=NODES) as run:
        moved = choose(run, "member")
        lost = next(
            node for node in (run.wait_for(is_start(rank)).node for rank in (0, 2)) if node != moved
        )
        run.wait_for(lambda event: event.event == "fault_injected" and event.step == 5)
        run.agents[moved].send_signal(signal.SIGSTOP)
        gone = run.wait_for(lambda event: event.event == "node_lost")
        run.wait_for(lambda event: event.event == "generation_opened" and event.time > gone.time)
        run.agents[moved].send_signal(signal.SIGCONT)
        run.wait_for(
            lambda event: (
                event.event == "node_joined"
                and event.time > gone.time
                and event.fields["node"] == moved
            )
        )
        run.wait_for(lambda event: event.event == "fault_injected" and event.step == 15)
        run.kill_node(lost)
        outcome = finish(run)

    assert sorted(outcome.statuses) == [-9, 0, 0], run.log()
    check_same_bits(outcome, undisturbed(trainer, max_steps=NUM_STEPS))
    assert not outcome.named("recovery_fallback")
    started = [each.rank for each in outcome.named("worker_started") if each.node == moved]
    ended = [each.rank for each in outcome.named("state_digest") if each.node == moved]
    assert len(started) == len(ended) == 2, "a process was replaced"
    assert set(started) & set(ended) == set()
    assert not [each for each in outcome.named("worker_replaced") if each.node == moved]


def test_every_node_holds_a_whole_copy_of_the_state():
    layout = make_layout(nodes=["n0", "n1"], num_local_ranks=2, num_shards=2)

    seats = [plan_placement(layout, rank) for rank in range(4)]

    shards = [{(each.replica, each.shard) for each in seats[first : first + 2]} for first in (0, 2)]
    assert shards == [{(0, "0"), (0, "1")}, {(1, "0"), (1, "1")}]


@pytest.mark.parametrize(
    ("trainer", "ranks"),
    [
        ("hybrid", (0, 2)),
        slow("hybrid", (1, 3)),
        slow("ddp", (0, 1, 2, 3)),
    ],
)
@pytest.mark.parametrize(("step", "source", "first"), [slow(25, "checkpoint", 20), (4, "start", 0)])
def test_run_falls_back_where_no_copy_of_a_shard_is_left(
    tmp_path, undisturbed, trainer, ranks, step, source, first
):
    job = make_fault_job(trainer, max_steps=NUM_EPOCH_STEPS, data=EPOCH_DATA)

    with start_run(tmp_path, job) as run:
        run.wait_for_step(step)
        run.kill_ranks(*ranks)
        outcome = finish(run)

    assert outcome.statuses == [0], run.log()
    check_same_bits(outcome, undisturbed(trainer, max_steps=NUM_EPOCH_STEPS, data=EPOCH_DATA))
    fallbacks = outcome.named("recovery_fallback")
    assert {each.rank for each in fallbacks} == {0, 1, 2, 3}
    assert {(each.fields["source"], each.step) for each in fallbacks} == {(source, first)}
    reason = "no rank holds state" if trainer == "ddp" else f"no healthy holder of shard {ranks[0]}"
    assert all(each.fields["reason"].startswith(reason) for each in fallbacks)
    assert not (tmp_path / "state").exists()


def test_state_of_an_epoch_is_whole_although_a_writer_died(tmp_path, undisturbed):
    job = make_fault_job("hybrid", max_steps=NUM_EPOCH_STEPS, data=EPOCH_DATA)
    program = {"TEST_PROGRAM": "die_while_writing_state", "TEST_MARKERS": str(tmp_path)}

    with start_run(tmp_path, job, module="tests.training.recovery.programs", **program) as run:
        run.wait_for_step(12)
        found = sorted(path.name for path in (tmp_path / "state").iterdir())
        run.kill_ranks(0, 2)
        outcome = finish(run)

    assert found == ["step-00000010"]
    check_same_bits(outcome, undisturbed("hybrid", max_steps=NUM_EPOCH_STEPS, data=EPOCH_DATA))
    fallbacks = {(each.fields["source"], each.step) for each in outcome.named("recovery_fallback")}
    assert fallbacks == {("checkpoint", 10)}


@pytest.mark.slow
def test_stop_while_a_state_is_written_is_seen(tmp_path, undisturbed):
    """The others wait for the writer under no deadline of their own."""
    job = make_fault_job("hybrid", max_steps=NUM_EPOCH_STEPS, data=EPOCH_DATA)
    program = {"TEST_PROGRAM": "stop_while_writing_state", "TEST_MARKERS": str(tmp_path)}

    with start_run(tmp_path, job, module="tests.training.recovery.programs", **program) as run:
        outcome = finish(run)

    assert outcome.statuses == [0], run.log()
    check_same_bits(outcome, undisturbed("hybrid", max_steps=NUM_EPOCH_STEPS, data=EPOCH_DATA))
    (found,) = [each for each in outcome.named("fault_detected") if each.rank == 1]
    assert "rank 1 is stopped (state T), in nowhere of step 10" in found.fields["text"]


@pytest.mark.slow
def test_writers_of_a_state_stop_when_another_rank_dies(tmp_path, undisturbed):
    """Who has the only copies left would be replaced if it did not stop in time."""
    job = make_fault_job(
        "hybrid", max_steps=NUM_EPOCH_STEPS, data=EPOCH_DATA, settings={"stop_deadline_s": 5}
    )
    program = {"TEST_PROGRAM": "never_end_state", "TEST_MARKERS": str(tmp_path)}

    with start_run(tmp_path, job, module="tests.training.recovery.programs", **program) as run:
        run.wait_for_step(9)
        run.kill_ranks(3)
        outcome = finish(run)

    assert outcome.statuses == [0], run.log()
    check_same_bits(outcome, undisturbed("hybrid", max_steps=NUM_EPOCH_STEPS, data=EPOCH_DATA))
    assert not outcome.named("recovery_fallback")
    assert [each.rank for each in outcome.named("worker_replaced")] == [3]


@pytest.mark.slow
def test_run_goes_on_where_no_state_can_be_written(tmp_path, undisturbed):
    """Its last resort is older than it could be, and it says so."""
    job = make_fault_job("hybrid", max_steps=NUM_EPOCH_STEPS, data=EPOCH_DATA)
    (tmp_path / "state").write_text("no folder\n")

    with start_run(tmp_path, job) as run:
        outcome = finish(run)

    assert outcome.statuses == [0], run.log()
    check_same_bits(outcome, undisturbed("hybrid", max_steps=NUM_EPOCH_STEPS, data=EPOCH_DATA))
    assert not outcome.named("fault_detected")
    warnings = outcome.named("warning")
    assert [each.step for each in warnings] == [10, 20]
    words = r"cannot write the state .*/shard-[01]\.safetensors: \[Errno 20\] Not a directory"
    assert all(re.match(words, each.fields["text"]) for each in warnings)
    assert run.log().count("make room for two states, or mend the disk") == 2


def test_job_that_is_started_again_goes_on_from_its_last_epoch(tmp_path, undisturbed):
    # It is killed before it has ended.
    wait = {"kind": "slow", "place": "forward", "step": 25, "rank": 0, "seconds": 1.8}
    job = make_fault_job("hybrid", max_steps=NUM_EPOCH_STEPS, data=EPOCH_DATA, faults=[wait])
    with start_run(tmp_path, job) as run:
        run.wait_for_step(23)
        run.kill_node("n0")

    with start_run(tmp_path, job) as run:
        outcome = finish(run)

    assert outcome.statuses == [0], run.log()
    check_same_bits(outcome, undisturbed("hybrid", max_steps=NUM_EPOCH_STEPS, data=EPOCH_DATA))
    fallbacks = {(each.fields["source"], each.step) for each in outcome.named("recovery_fallback")}
    assert fallbacks == {("checkpoint", 20)}
