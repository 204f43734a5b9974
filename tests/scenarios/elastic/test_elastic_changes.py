"""Requests, losses and newcomers of an elastic run that meet each other: the bits stay."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from launcher.job import Job
from resilience.events import read_events
from tests.scenarios.elastic.test_elastic import VALUES, coordinator_of, read_steps, sizes
from tests.scenarios.recovery.runs import (
    FaultOutcome,
    Run,
    check_no_step_lost,
    finish,
    make_fault_job,
    start_run,
)
from tests.training.jobs import make_job

NUM_STEPS = 200
NODES = ("n0", "n1", "n2")
pytestmark = pytest.mark.slow


def job() -> Job:
    return make_fault_job(
        num_nodes=3, num_devices=1, max_steps=NUM_STEPS, elastic=sizes(1, 4), values=VALUES
    )


@pytest.fixture
def alone(reference: Any) -> Any:
    """Return the run of one worker that nothing befalls."""
    trainer = {**VALUES, "max_steps": NUM_STEPS, "optimizer": {"decay_steps": 400}}
    return reference(make_job(trainer=trainer))


def ask(run: Run, *names: str) -> None:
    """Ask nodes to leave."""
    for name in names:
        os.kill(run.agents[name].pid, signal.SIGTERM)


def members_of(run: Run) -> tuple[str, list[str]]:
    """Return the node that coordinates, and the others."""
    leader = coordinator_of(run)
    return leader, [name for name in NODES if name != leader]


def check(outcome: FaultOutcome, alone: Any, run: Run) -> None:
    """Assert that the run is that of one worker, within its sizes, and has left nothing."""
    assert 0 in outcome.statuses, run.log()
    assert set(outcome.statuses) <= {0, -signal.SIGKILL, 143}, run.log()
    assert outcome.bits() == FaultOutcome(alone.folder, [0]).bits()
    assert outcome.weights() == alone.weights()
    check_no_step_lost(outcome.events)
    assert not outcome.left_behind
    assert not outcome.named("recovery_fallback")
    # In others no step is taken: who comes for one that leaves has the state before that goes.
    trained = {e.generation for e in outcome.named("rank_resumed")}
    opened = {e.generation: e.fields["world_size"] for e in outcome.named("generation_opened")}
    assert {opened[generation] for generation in trained} <= {1, 2, 3, 4}


def test_two_nodes_that_are_asked_at_once_leave(alone: Any, tmp_path: Path) -> None:
    with start_run(tmp_path, job(), nodes=NODES) as run:
        run.wait_for_step(6)
        ask(run, *members_of(run)[1])
        outcome = finish(run)

    check(outcome, alone, run)
    assert sorted(outcome.statuses) == [0, 143, 143], run.log()
    opened = [e.fields["world_size"] for e in outcome.named("generation_opened")]
    assert (opened[0], opened[-1]) == (3, 1)


def test_a_node_that_is_asked_during_a_recovery_leaves(alone: Any, tmp_path: Path) -> None:
    with start_run(tmp_path, job(), nodes=NODES) as run:
        run.wait_for_step(6)
        _leader, others = members_of(run)
        run.kill_ranks(0)
        ask(run, others[0])
        outcome = finish(run)

    check(outcome, alone, run)
    assert sorted(outcome.statuses) == [0, 0, 143], run.log()
    assert outcome.named("generation_opened")[-1].fields["world_size"] == 2


def test_a_node_that_has_no_time_is_lost_like_any_other(alone: Any, tmp_path: Path) -> None:
    """It is gone before the step has ended in which the others would have let it go."""
    with start_run(tmp_path, job(), nodes=NODES, options=("--grace-s=0.1",)) as run:
        run.wait_for_step(6)
        ask(run, members_of(run)[1][0])
        outcome = finish(run)

    check(outcome, alone, run)
    assert outcome.named("generation_opened")[-1].fields["world_size"] == 2


def test_a_node_with_five_seconds_is_gone_by_then_and_nothing_is_done_twice(
    alone: Any, tmp_path: Path
) -> None:
    with start_run(tmp_path, job(), nodes=NODES, options=("--grace-s=5",)) as run:
        run.wait_for_step(6)
        leaving = members_of(run)[1][0]
        asked_s = time.monotonic()
        ask(run, leaving)
        run.agents[leaving].wait(timeout=30)
        took_s = time.monotonic() - asked_s
        outcome = finish(run)

    check(outcome, alone, run)
    assert took_s <= 5.0
    assert not outcome.named("generation_broken"), run.log()


def test_a_node_is_lost_while_the_run_grows(alone: Any, tmp_path: Path) -> None:
    with start_run(tmp_path, job(), nodes=NODES) as run:
        run.wait_for_step(6)
        lost = members_of(run)[1][0]
        run.start_node("n3")
        run.wait_for(lambda event: event.event == "generation_left")
        run.kill_node(lost)
        outcome = finish(run)

    check(outcome, alone, run)
    assert outcome.named("generation_opened")[-1].fields["world_size"] == 3


@pytest.mark.parametrize(
    "stage",
    ["node_joined", "generation_left", "worker_started", "process_group_ready", "rank_recovered",
     "rank_resumed"],
)  # fmt: skip
def test_a_newcomer_that_dies_at_any_stage_leaves_the_run_as_it_was(
    alone: Any, tmp_path: Path, stage: str
) -> None:
    with start_run(tmp_path, job(), nodes=NODES) as run:
        run.wait_for_step(6)
        run.start_node("n3")
        run.wait_for(
            lambda event: (
                event.event == stage
                and ("n3" in (event.node, event.fields.get("node")) or stage == "generation_left")
            )
        )
        run.kill_node("n3")
        outcome = finish(run)

    check(outcome, alone, run)
    assert outcome.statuses == [0, 0, 0, -9], run.log()
    assert outcome.named("generation_opened")[-1].fields["world_size"] == 3


def test_all_of_that_at_the_same_time(alone: Any, tmp_path: Path) -> None:
    with start_run(tmp_path, job(), nodes=NODES) as run:
        run.wait_for_step(6)
        _leader, (first, second) = members_of(run)
        run.start_node("n3")
        run.wait_for(lambda event: event.event == "node_joined" and event.fields["node"] == "n3")
        run.kill_ranks(0)
        ask(run, first)
        run.kill_node(second)
        run.start_node("n4")
        outcome = finish(run)

    check(outcome, alone, run)


@pytest.mark.parametrize("seed", range(4))
def test_nodes_that_are_all_asked_within_two_seconds_stop_once(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    names = chance.sample(NODES, len(NODES))
    waits_s = sorted(chance.uniform(0, 1.8) for _ in names)
    long = make_fault_job(
        num_nodes=3, num_devices=1, max_steps=5000, elastic=sizes(1, 3), values=VALUES
    )

    with start_run(tmp_path, long, nodes=NODES) as run:
        run.wait_for_step(6)
        begun_s = time.monotonic()
        for name, wait_s in zip(names, waits_s, strict=True):
            time.sleep(max(0.0, begun_s + wait_s - time.monotonic()))
            ask(run, name)
        outcome = finish(run)

    assert outcome.statuses == [143, 143, 143], run.log()
    assert len(outcome.named("generation_opened")) == 1
    ends = {e.step for e in outcome.named("worker_stopped") if e.rank is not None}
    assert len(ends) == 1
    (end,) = ends
    assert max(e.step or 0 for e in read_steps(run)) == end
    assert not outcome.left_behind


def training_nodes(run: Run) -> set[str]:
    """Return the nodes whose ranks are in the newest generation, whose steps have begun."""
    events = read_events(run.folder / "events.jsonl")
    newest = max(each.generation for each in events if each.event == "step")
    ready = ("process_group_ready", "step")
    return {each.node for each in events if each.generation == newest and each.event in ready}


@pytest.mark.parametrize("seed", range(20))
def test_a_random_trace_of_joins_losses_and_requests_has_the_bits_of_one_worker(
    alone: Any, tmp_path: Path, seed: int
) -> None:
    """Begins with four nodes; nobody takes the last one that trains."""
    chance = random.Random(seed)
    told = []
    four = make_fault_job(
        num_nodes=4, num_devices=1, max_steps=NUM_STEPS, elastic=sizes(1, 4), values=VALUES
    )

    with start_run(tmp_path, four, nodes=("n0", "n1", "n2", "n3")) as run:
        taken: set[str] = set()
        for step in sorted(chance.sample(range(6, 150), 8)):
            run.wait_for(lambda event, step=step: (event.step or 0) >= step)
            training = sorted(training_nodes(run) - taken)
            there = {each for each in run.agents if run.agents[each].poll() is None}
            kind = chance.choice(["start", "fault", *(["lose", "ask"] * (len(training) > 1))])
            if kind == "start" and len(there - taken) < 4:
                run.start_node(f"n{len(run.agents)}")
            elif kind in ("lose", "ask"):
                name = chance.choice(training)
                taken.add(name)
                run.kill_node(name) if kind == "lose" else ask(run, name)
            elif kind == "fault" and len(training) > 1:
                with suppress(ProcessLookupError):
                    run.kill_ranks(0)
            told.append((step, kind, training))
        outcome = finish(run)

    assert 0 in outcome.statuses, told
    check(outcome, alone, run)
