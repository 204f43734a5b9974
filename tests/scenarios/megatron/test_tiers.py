"""Runs of Megatron that lose all copies of a part of their state go on from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.job import Job
from resilience.run_record import RUN_VARIABLE
from resilience.tiered.loader import whole_steps
from tests.cases import slow
from tests.recipes_training.megatron.runs import make_megatron_job
from tests.resilience.tiered.s3_server import s3_server
from tests.scenarios.recovery.runs import FaultOutcome, check_same_bits, finish, run_job, start_run
from tests.scenarios.tiered.runs import (
    add_tiers,
    is_saved,
    loads,
    open_only,
    read_shards,
    start_nodes,
    tiered,
)
from tests.waiting import wait_until

Undisturbed = Callable[[Job], FaultOutcome]
PATIENT = {"hang_deadline_s": 120, "stop_deadline_s": 15}
SLOW = {"kind": "slow", "place": "data", "step": 8, "rank": 0, "seconds": 100}
"""Gives time to change the world between two steps."""
HOLDERS = {"sharded": (0, 2), "tensor": (1, 3), "pipeline": (2, 3), "experts": (0, 2)}
"""Ranks that hold the same part of the state, and nobody else does."""


def check_went_on(outcome: FaultOutcome, expected: FaultOutcome, *, sources: set[str]) -> int:
    """Assert that all ranks went on from one step with the right bits; returns the step."""
    assert set(outcome.statuses) == {0}
    check_same_bits(outcome, expected)
    found = loads(outcome)
    assert [rank for rank, _, _ in found] == [0, 1, 2, 3]
    assert {source for _, _, source in found} <= sources
    (step,) = {each.step for each in outcome.named("recovery_fallback")}
    assert {each for _, each, _ in found} == {step}
    assert step is not None
    return step


@pytest.mark.parametrize(
    ("layout", "values"),
    [
        slow("tensor", {}, id="tensor"),
        slow("sharded", {"overlap_grad_reduce": True, "overlap_param_gather": True}, id="sharded"),
        slow("pipeline", {"precision": "bf16"}, id="pipeline"),
        slow("experts", {}, id="experts"),
    ],
)
def test_both_holders_of_a_part_are_killed_and_no_stable_step_is_lost(
    tmp_path: Path, undisturbed: Undisturbed, layout: str, values: dict[str, Any]
) -> None:
    """They die in step 7: the newest state that nothing can change any more is that of step 6."""
    held = HOLDERS[layout]
    slow_one = {**SLOW, "step": 7, "rank": held[0]}
    job = make_megatron_job(layout, faults=[slow_one], settings=PATIENT, **values)

    with (
        start_nodes(tmp_path / "nodes") as nodes,
        start_run(
            tmp_path / "run", add_tiers(job, tiered(every_n_steps=1)), **nodes.variables("n0")
        ) as run,
    ):
        run.wait_for_step(6)
        wait_until(lambda: whole_steps(open_only(nodes["n0"]))[0].step == 6)
        run.kill_ranks(*held)
        outcome = finish(run)

    expected = undisturbed(make_megatron_job(layout, **values))
    assert check_went_on(outcome, expected, sources={"ram"}) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "replicas", "sources"),
    [
        # Each node has a copy of the state, and the other's is not made anew by itself.
        ("sharded", 0, {"ram", "peer:n0"}),
        ("tensor", 0, {"ram", "peer:n0"}),
        # Each has a stage, and what it has lost comes back before its workers ask for it, or then.
        ("pipeline", 1, {"ram"}),
    ],
)
def test_a_node_without_memory_has_its_part_from_the_other(
    tmp_path: Path, undisturbed: Undisturbed, layout: str, replicas: int, sources: set[str]
) -> None:
    names = ("n0", "n1")
    parts: dict[str, Any] = {"num_nodes": 2, "num_devices": 2, "settings": PATIENT}
    job = add_tiers(make_megatron_job(layout, faults=[SLOW], **parts))
    options = ["--replicas", str(replicas), "--domains-min", str(1 + replicas)]

    with start_nodes(tmp_path / "nodes", names, options=options) as nodes:
        variables = {each: nodes.variables(each) for each in names}
        with start_run(tmp_path / "run", job, nodes=names, by_node=variables) as run:
            run.wait_for_step(7)
            wait_until(lambda: [each.step for each in whole_steps(open_only(nodes["n0"]))] == [5])
            nodes.lose_memory("n1")
            run.kill_ranks(0, 1, 2, 3)
            outcome = finish(run)

    expected = undisturbed(make_megatron_job(layout))
    assert check_went_on(outcome, expected, sources={"ram", "peer:n0"}) == 5
    assert sources <= {source for _, _, source in loads(outcome)} | {"ram"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_a_run_without_any_memory_goes_on_from_the_store(
    tmp_path: Path, undisturbed: Undisturbed, kind: str
) -> None:
    job = add_tiers(make_megatron_job("tensor", faults=[SLOW], settings=PATIENT))
    with s3_server(tmp_path) as server:
        server.make_bucket("bucket")
        options = ["--store-every-n-steps", "5", "--store", f"folder:{tmp_path / 'store'}"]
        if kind == "s3":
            options[-1] = "s3://bucket/runs"
            options += ["--store-endpoint", server.endpoint, "--store-path-style"]
        with (
            start_nodes(tmp_path / "nodes", options=options) as nodes,
            start_run(tmp_path / "run", job, **nodes.variables("n0")) as run,
        ):
            run.wait_for_step(7)
            wait_until(lambda: stored(nodes["n0"]) == [(5, [])])
            nodes.lose_memory()
            run.kill_ranks(0, 1, 2, 3)
            outcome = finish(run)

    expected = undisturbed(make_megatron_job("tensor"))
    assert check_went_on(outcome, expected, sources={"ram", kind}) == 5
    assert kind in {source for _, _, source in loads(outcome)}


def stored(daemon: Any) -> list[tuple[int, list[int]]]:
    """Return the newest step that the store has and the ones it waits for, by namespace."""
    namespaces = daemon.client(None).status()["store"]["namespaces"]
    return [(each["newest_step"], each["steps_waiting"]) for each in namespaces.values()]


@pytest.mark.slow
def test_a_run_goes_on_with_fewer_data_ranks(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The state is the same; sums over other numbers of ranks are rounded otherwise."""
    namespace = tiered(namespace="shared")
    smaller = make_megatron_job("sharded", num_devices=2)
    with start_nodes(tmp_path / "nodes") as nodes:
        with start_run(
            tmp_path / "run",
            add_tiers(make_megatron_job("sharded"), namespace),
            **nodes.variables("n0"),
        ) as run:
            run.wait_for(is_saved(5))
            run.kill_node("n0")
        outcome = run_job(tmp_path / "run", add_tiers(smaller, namespace), **nodes.variables("n0"))

    assert outcome.statuses == [0]
    found = loads(outcome)
    assert [(rank, source) for rank, _, source in found] == [(0, "ram"), (1, "ram")]
    expected = undisturbed(make_megatron_job("sharded")).steps
    assert outcome.steps[-1]["step"] == expected[-1]["step"]
    assert outcome.steps[-1]["loss"] == pytest.approx(expected[-1]["loss"], rel=1e-5)


@pytest.mark.slow
def test_a_state_that_is_divided_otherwise_is_refused_before_anything_is_done(
    tmp_path: Path,
) -> None:
    settings = tiered(namespace="shared")
    first, second = (make_megatron_job(each, max_steps=6) for each in ("tensor", "pipeline"))
    with start_nodes(tmp_path / "nodes") as nodes:
        variables = {**nodes.variables("n0"), RUN_VARIABLE: "same"}
        run_job(tmp_path / "run", add_tiers(first, settings), **variables)
        before = read_shards(nodes["n0"])
        with start_run(tmp_path / "run", add_tiers(second, settings), **variables) as run:
            outcome = finish(run)
            log = run.log()
        after = read_shards(nodes["n0"])

    assert outcome.statuses == [1]
    assert (
        "it is divided by trainer.tensor_parallel 2, trainer.pipeline_parallel 1, "
        "trainer.expert_parallel 1, and the job by trainer.tensor_parallel 1, "
        "trainer.pipeline_parallel 2, trainer.expert_parallel 1 "
        "(python -m recipes_training.convert RUN_DIR OUT writes its weights, for model.weights=OUT)"
    ) in log
    assert "Traceback" not in log
    assert len(outcome.named("step")) == 6
    assert after == before
