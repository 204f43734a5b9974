"""What is left of a run whose nodes cannot go on, and from what a standby node goes on alone."""

from __future__ import annotations

import os
import signal

import pytest

from resilience.events import read_events
from tests.training.recovery.runs import (
    LIMIT_S,
    check_same_bits,
    finish,
    make_fault_job,
    marked_processes,
    start_run,
    variables_of,
)

NUM_STEPS = 30
NODES = ("n0", "n1", "n2", "n3")
EPOCH_DATA = {"kind": "stdlib_text", "seq_length": 16, "max_bytes": 16 * 8 * 10}
"""A step takes 8 samples: an epoch has 10 steps."""


def make_slow_job(trainer="ddp", *, num_nodes, **settings):
    """Return a job of four ranks that takes long in step 15."""
    wait = {"kind": "slow", "place": "forward", "step": 15, "rank": 3, "seconds": 60.0}
    return make_fault_job(
        trainer,
        max_steps=NUM_STEPS,
        num_nodes=num_nodes,
        num_devices=4 // num_nodes,
        data=EPOCH_DATA,
        faults=[wait],
        settings={"hang_deadline_s": 60, "stop_deadline_s": 2, "spares_per_node": 0, **settings},
    )


def test_standby_alone_goes_on_from_the_newest_state_on_disk(tmp_path, undisturbed):
    job = make_fault_job(
        max_steps=NUM_STEPS, data=EPOCH_DATA, standby_nodes=1, settings={"spares_per_node": 0}
    )

    with start_run(tmp_path, job, nodes=("n0", "n1")) as run:
        run.wait_for_step(13)
        member = run.wait_for(lambda event: event.event == "worker_started").node
        run.kill_node(member)
        outcome = finish(run)

    assert sorted(outcome.statuses) == [-9, 0], run.log()
    check_same_bits(outcome, undisturbed("ddp", max_steps=NUM_STEPS, data=EPOCH_DATA))
    assert [each.fields["node"] for each in outcome.named("node_ended")] == [member]
    fallbacks = {(each.fields["source"], each.step) for each in outcome.named("recovery_fallback")}
    assert fallbacks == {("checkpoint", 10)}


def stop_but(run, node):
    """Have all other nodes stand still, as seen from a node that is cut off; returns them."""
    others = [
        pid for pid in marked_processes(run.mark) if f"TEST_NODE={node}" not in variables_of(pid)
    ]
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    return others


@pytest.mark.slow
def test_side_that_may_not_go_on_saves_its_state_and_a_start_goes_on_from_it(tmp_path, undisturbed):
    job = make_slow_job(num_nodes=4, partition_patience_s=2)
    with start_run(tmp_path, job, nodes=NODES) as run:
        run.wait_for_step(14)
        stop_but(run, "n0")
        alone = run.agents["n0"].wait(LIMIT_S)
        events, log = list(read_events(tmp_path / "events.jsonl")), run.log()

    with start_run(tmp_path, job, nodes=NODES) as run:
        outcome = finish(run)

    assert alone == 75, log
    (saved,) = [each for each in events if each.event == "state_saved"]
    assert saved.fields == {"saved_step": 15, "place": f"{tmp_path}/state"}
    assert "n0 came and n1, n2, n3 did not within 4 s; they may go on elsewhere; the newest" in log
    assert f"state known to be saved is that of step 15 in {tmp_path}/state\n" in log
    assert outcome.statuses == [0] * 4, run.log()
    assert {each.step for each in outcome.named("recovery_fallback")} == {15}
    check_same_bits(outcome, undisturbed("ddp", max_steps=NUM_STEPS, data=EPOCH_DATA))
    assert not (tmp_path / "state").exists()


@pytest.mark.slow
def test_side_that_holds_a_part_saves_nothing(tmp_path):
    job = make_slow_job("hybrid", num_nodes=4, partition_patience_s=2)
    with start_run(tmp_path, job, nodes=NODES) as run:
        run.wait_for_step(14)
        stop_but(run, "n0")
        alone = run.agents["n0"].wait(LIMIT_S)

    assert alone == 75, run.log()
    assert "what is held here was not saved: of step 15 nobody here holds shard 1" in run.log()
    assert [each.name for each in (tmp_path / "state").iterdir()] == ["step-00000010"]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["hybrid", "ddp"])
def test_run_that_lacks_a_node_saves_its_state_and_says_where(tmp_path, undisturbed, trainer):
    job = make_slow_job(trainer, num_nodes=2, join_deadline_s=20)
    with start_run(tmp_path, job, nodes=("n0", "n1")) as run:
        run.wait_for_step(14)
        run.kill_node("n1")
        given_up = finish(run)
    last = run.log().splitlines()[-1]

    with start_run(tmp_path, job, nodes=("n0", "n1")) as run:
        outcome = finish(run)

    assert sorted(given_up.statuses) == [-9, 75], last
    assert last.endswith(f"newest state known to be saved is that of step 15 in {tmp_path}/state")
    assert outcome.statuses == [0, 0], run.log()
    assert {each.step for each in outcome.named("recovery_fallback")} == {15}
    check_same_bits(outcome, undisturbed(trainer, max_steps=NUM_STEPS, data=EPOCH_DATA))
    assert not (tmp_path / "state").exists()


@pytest.mark.slow
def test_sides_that_may_not_go_on_save_states_that_do_not_mix(tmp_path, undisturbed):
    """One of four nodes is cut off from the others, who then lack it."""
    job = make_slow_job(num_nodes=4, join_deadline_s=20, partition_patience_s=2)
    with start_run(tmp_path, job, nodes=NODES) as run:
        run.wait_for_step(14)
        others = stop_but(run, "n0")
        alone = run.agents["n0"].wait(LIMIT_S)
        for pid in others:
            os.kill(pid, signal.SIGCONT)
        given_up = finish(run)

    with start_run(tmp_path, job, nodes=NODES) as run:
        outcome = finish(run)

    assert (alone, given_up.statuses) == (75, [75] * 4)
    assert {each.fields["saved_step"] for each in given_up.named("state_saved")} == {15}
    assert outcome.statuses == [0] * 4, run.log()
    check_same_bits(outcome, undisturbed("ddp", max_steps=NUM_STEPS, data=EPOCH_DATA))
