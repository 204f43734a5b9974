"""What is left of a run whose nodes cannot go on, and from what a standby node goes on alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.job import Job
from resilience.events import read_events
from tests.processes import processes_with
from tests.scenarios.recovery.runs import (
    LIMIT_S,
    Run,
    check_same_bits,
    finish,
    marked_processes,
    start_run,
)
from tests.scenarios.tiered.runs import (
    Nodes,
    make_tiered_job,
    read_shards,
    start_nodes,
    tiered,
)
from tests.waiting import wait_until

NUM_STEPS = 30
NODES = ("n0", "n1", "n2", "n3")
TIERS = tiered(every_n_steps=10)
PLACE = "the nodes' memory, namespace "


def make_slow_job(trainer="ddp", *, num_nodes, **settings):
    """Return a job of four ranks that takes long in step 15."""
    wait = {"kind": "slow", "place": "forward", "step": 15, "rank": 3, "seconds": 60.0}
    return make_tiered_job(
        trainer,
        tiers=TIERS,
        max_steps=NUM_STEPS,
        num_nodes=num_nodes,
        num_devices=4 // num_nodes,
        faults=[wait],
        settings={"hang_deadline_s": 60, "stop_deadline_s": 2, "spares_per_node": 0, **settings},
    )


@contextmanager
def start(folder: Path, nodes: Nodes, job: Job, names: Sequence[str] = NODES) -> Iterator[Run]:
    """Start a run whose nodes have a daemon each."""
    by_node = {name: nodes.variables(name) for name in names}
    with start_run(folder / "run", job, nodes=names, by_node=by_node) as run:
        yield run


def test_standby_alone_goes_on_from_the_newest_checkpoint(tmp_path, undisturbed):
    names = ("n0", "n1")
    wait = {"kind": "slow", "place": "data", "step": 15, "rank": 0, "seconds": 100.0}
    patient = {"spares_per_node": 0, "hang_deadline_s": 120, "stop_deadline_s": 15}
    job = make_tiered_job(
        "ddp", tiers=TIERS, max_steps=NUM_STEPS, standby_nodes=1, faults=[wait], settings=patient
    )

    with (
        start_nodes(tmp_path / "nodes", names) as nodes,
        start(tmp_path, nodes, job, names) as run,
    ):
        run.wait_for_step(14)
        member = run.wait_for(lambda event: event.event == "worker_started").node
        wait_until(lambda: (10, "0") in read_shards(nodes[member]))
        run.kill_node(member)
        outcome = finish(run)

    assert sorted(outcome.statuses) == [-9, 0], run.log()
    check_same_bits(outcome, undisturbed("ddp", max_steps=NUM_STEPS))
    assert [each.fields["node"] for each in outcome.named("node_ended")] == [member]
    fallbacks = {(each.fields["source"], each.step) for each in outcome.named("recovery_fallback")}
    assert fallbacks <= {("ram", 10), (f"peer:{member}", 10)}
    assert fallbacks


def stop_but(run, node):
    """Have all other nodes stand still, as seen from a node that is cut off; returns them."""
    others = {*marked_processes(run.mark)} - {*processes_with(f"TEST_NODE={node}")}
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    return others


@pytest.mark.slow
def test_side_that_may_not_go_on_saves_its_state_and_a_start_goes_on_from_it(tmp_path, undisturbed):
    job = make_slow_job(num_nodes=4, partition_patience_s=3)
    with start_nodes(tmp_path / "nodes", NODES) as nodes:
        with start(tmp_path, nodes, job) as run:
            run.wait_for_step(14)
            stop_but(run, "n0")
            alone = run.agents["n0"].wait(LIMIT_S)
            events, log = list(read_events(tmp_path / "run" / "events.jsonl")), run.log()

        with start(tmp_path, nodes, job) as run:
            outcome = finish(run)

    assert alone == 75, log
    (saved,) = [each for each in events if each.event == "state_saved"]
    assert saved.fields["saved_step"] == 15
    assert saved.fields["place"].startswith(PLACE)
    assert "n0 came and n1, n2, n3 did not within 6 s; they may go on elsewhere; the newest" in log
    assert f"state known to be saved is that of step 15 in {PLACE}" in log
    assert outcome.statuses == [0] * 4, run.log()
    assert {each.step for each in outcome.named("recovery_fallback")} == {15}
    check_same_bits(outcome, undisturbed("ddp", max_steps=NUM_STEPS))


@pytest.mark.slow
def test_side_that_holds_a_part_saves_nothing(tmp_path):
    job = make_slow_job("hybrid", num_nodes=4, partition_patience_s=3)
    with start_nodes(tmp_path / "nodes", NODES) as nodes, start(tmp_path, nodes, job) as run:
        run.wait_for_step(14)
        stop_but(run, "n0")
        alone = run.agents["n0"].wait(LIMIT_S)
        saved = {step for node in NODES for step, _ in read_shards(nodes[node])}

    assert alone == 75, run.log()
    assert "what is held here was not saved: of step 15 nobody here holds shard 1" in run.log()
    assert saved == {10}


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["hybrid", "ddp"])
def test_run_that_lacks_a_node_saves_its_state_and_says_where(tmp_path, undisturbed, trainer):
    job = make_slow_job(trainer, num_nodes=2, join_deadline_s=20)
    names = ("n0", "n1")
    with start_nodes(tmp_path / "nodes", names) as nodes:
        with start(tmp_path, nodes, job, names) as run:
            run.wait_for_step(14)
            run.kill_node("n1")
            given_up = finish(run)
        last = run.log()

        with start(tmp_path, nodes, job, names) as run:
            outcome = finish(run)

    assert sorted(given_up.statuses) == [-9, 75], last
    assert f"newest state known to be saved is that of step 15 in {PLACE}" in last
    assert outcome.statuses == [0, 0], run.log()
    assert {each.step for each in outcome.named("recovery_fallback")} == {15}
    check_same_bits(outcome, undisturbed(trainer, max_steps=NUM_STEPS))


@pytest.mark.slow
def test_rank_that_dies_while_the_run_is_stopped_costs_no_step(tmp_path, undisturbed):
    job, names = make_slow_job(num_nodes=2), ("n0", "n1")
    with start_nodes(tmp_path / "nodes", names) as nodes:
        with start(tmp_path, nodes, job, names) as run:
            begun = run.wait_for(lambda each: each.event == "worker_started" and each.rank == 3)
            run.wait_for_step(14)
            for agent in run.agents.values():
                agent.terminate()
            os.kill(begun.fields["pid"], signal.SIGKILL)
            stopped = finish(run)
        last = run.log()

        with start(tmp_path, nodes, job, names) as run:
            outcome = finish(run)

    assert stopped.statuses == [143, 143], last
    assert f"newest state known to be saved is that of step 15 in {PLACE}" in last
    assert outcome.statuses == [0, 0], run.log()
    assert {each.step for each in outcome.named("recovery_fallback")} == {15}
    check_same_bits(outcome, undisturbed("ddp", max_steps=NUM_STEPS))
