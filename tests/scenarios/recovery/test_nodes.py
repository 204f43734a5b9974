"""Nodes that are lost as a whole, and states that no node holds any more."""

from __future__ import annotations

import signal

import pytest

from tests.cases import slow
from tests.scenarios.recovery.runs import (
    check_no_step_lost,
    check_same_bits,
    finish,
    make_fault_job,
    start_run,
)

NUM_STEPS = 40
NODES = ("n0", "n1", "n2")


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
    if role == "coordinator":
        check_what_is_told_of_it(outcome, lost)
    repaired = [e for e in outcome.named("rank_recovered") if e.fields["role"] == "repaired"]
    assert len(repaired) == (2 if role == "member" else len(repaired))


def check_what_is_told_of_it(outcome, lost: str) -> None:
    """That the others have another coordinator stands for the break of its generation."""
    (replaced,) = outcome.named("coordinator_replaced")
    told = [
        each
        for each in outcome.events
        if each.generation == replaced.generation and each.node != lost
    ]
    faults = [each for each in told if each.event == "fault_detected"]

    assert replaced.fields["lost"] == lost
    assert not [each for each in told if each.event == "generation_broken"]
    # Only ranks that complain of a connection that has ended.
    assert {each.fields["reason"] for each in faults} <= {"group"}
    assert all(each.time >= replaced.time for each in faults)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["ddp", "hybrid"])
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


@pytest.mark.parametrize(
    ("trainer", "ranks"),
    [
        ("hybrid", (0, 2)),
        slow("hybrid", (1, 3)),
        slow("ddp", (0, 1, 2, 3)),
    ],
)
def test_run_falls_back_where_no_copy_of_a_shard_is_left(tmp_path, undisturbed, trainer, ranks):
    """To its first state where it takes no checkpoints; those are tests/scenarios/tiered's."""
    job = make_fault_job(trainer, max_steps=NUM_STEPS)

    with start_run(tmp_path, job) as run:
        run.wait_for_step(4)
        run.kill_ranks(*ranks)
        outcome = finish(run)

    assert outcome.statuses == [0], run.log()
    check_same_bits(outcome, undisturbed(trainer, max_steps=NUM_STEPS))
    fallbacks = outcome.named("recovery_fallback")
    assert {each.rank for each in fallbacks} == {0, 1, 2, 3}
    assert {(each.fields["source"], each.step) for each in fallbacks} == {("start", 0)}
    reason = "no rank holds state" if trainer == "ddp" else f"no healthy holder of shard {ranks[0]}"
    assert all(each.fields["reason"].startswith(reason) for each in fallbacks)
