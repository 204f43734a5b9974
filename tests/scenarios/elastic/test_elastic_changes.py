"""Requests, losses and newcomers of an elastic run that meet each other: the bits stay."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from launcher.job import Job
from resilience.events import read_events
from tests.scenarios.elastic.test_elastic import (
    check_as_alone,
    coordinator_of,
    job_and_alone,
    sizes,
)
from tests.scenarios.recovery.runs import FaultOutcome, Run, finish, start_run

NUM_STEPS = 200
NODES = ("n0", "n1", "n2")
pytestmark = pytest.mark.slow


def job_and_one(reference: Any, num_nodes: int = 3) -> tuple[Job, Any]:
    return job_and_alone(reference, NUM_STEPS, num_nodes=num_nodes, elastic=sizes(1, 4))


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
    check_as_alone(outcome, alone)
    assert not outcome.named("recovery_fallback")
    # In others no step is taken: who comes for one that leaves has the state before that goes.
    trained = {e.generation for e in outcome.named("rank_resumed")}
    opened = {e.generation: e.fields["world_size"] for e in outcome.named("generation_opened")}
    assert {opened[generation] for generation in trained} <= {1, 2, 3, 4}


def test_a_node_that_has_no_time_is_lost_like_any_other(reference: Any, tmp_path: Path) -> None:
    """It is gone before the step has ended in which the others would have let it go."""
    job, alone = job_and_one(reference)

    with start_run(tmp_path, job, nodes=NODES, options=("--grace-s=0.1",)) as run:
        run.wait_for_step(6)
        ask(run, members_of(run)[1][0])
        outcome = finish(run)

    check(outcome, alone, run)
    assert outcome.named("generation_opened")[-1].fields["world_size"] == 2


@pytest.mark.parametrize(
    "stage",
    ["node_joined", "generation_left", "worker_started", "process_group_ready", "rank_recovered",
     "rank_resumed"],
)  # fmt: skip
def test_a_newcomer_that_dies_at_any_stage_leaves_the_run_as_it_was(
    reference: Any, tmp_path: Path, stage: str
) -> None:
    job, alone = job_and_one(reference)

    with start_run(tmp_path, job, nodes=NODES) as run:
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


def test_all_of_that_at_the_same_time(reference: Any, tmp_path: Path) -> None:
    job, alone = job_and_one(reference)

    with start_run(tmp_path, job, nodes=NODES) as run:
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


def training_nodes(run: Run) -> set[str]:
    """Return the nodes whose ranks are in the newest generation, whose steps have begun."""
    events = read_events(run.folder / "events.jsonl")
    newest = max(each.generation for each in events if each.event == "step")
    ready = ("process_group_ready", "step")
    return {each.node for each in events if each.generation == newest and each.event in ready}


@pytest.mark.parametrize("seed", range(20))
def test_a_random_trace_of_joins_losses_and_requests_has_the_bits_of_one_worker(
    reference: Any, tmp_path: Path, seed: int
) -> None:
    """Begins with four nodes; nobody takes the last one that trains."""
    chance = random.Random(seed)
    told = []
    job, alone = job_and_one(reference, num_nodes=4)

    with start_run(tmp_path, job, nodes=("n0", "n1", "n2", "n3")) as run:
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
