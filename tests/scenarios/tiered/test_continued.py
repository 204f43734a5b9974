"""A run that is continued from its checkpoint has the bits of one that never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.job import Job
from tests.cases import grid
from tests.recipes_training.jobs import MEGATRON, make_job
from tests.recipes_training.workers import Outcome, Workers
from tests.scenarios.recovery.runs import SHARDINGS, make_fault_job, run_job
from tests.scenarios.tiered.runs import add_tiers, loads, saved_steps, start_nodes, tiered

FIRST, LAST = 10, 14
LAYOUTS = {
    **SHARDINGS,
    "full": ("full", None),
    # Sums in one order at any number of workers.
    "fixed": ("none", None),
}
SIZES = {"global_batch_size": 24, "micro_batch_size": 1, "optimizer": {"decay_steps": 400}}
WORLDS = (1, 2, 3, 4, 8)


def make_part(layout: str, num_devices: int, recovers: bool, max_steps: int) -> Job:
    """Return a job whose learning rates do not depend on its number of steps."""
    if layout == "megatron":
        copies = 2 if num_devices % 2 == 0 else 1
        values = {**MEGATRON, **SIZES, "num_replicas": copies}
        values["optimizer"] = {**MEGATRON["optimizer"], "decay_steps": 400}
    else:
        sharding, num_replicas = LAYOUTS[layout]
        order = "fixed" if layout == "fixed" else "size"
        values = {**SIZES, "sharding": sharding, "num_replicas": num_replicas}
        values["order_of_sums"] = order
    values |= {"num_devices": num_devices, "max_steps": max_steps}
    if not recovers:
        return make_job(trainer=values)
    trainer = "megatron" if layout == "megatron" else "ddp"
    return make_fault_job(trainer, max_steps=max_steps, num_devices=num_devices, values=values)


def run(workers: Workers, folder: Path, job: Job, recovers: bool, **variables: str) -> Outcome:
    if recovers:
        outcome = run_job(folder, job, **variables)
        assert outcome.statuses == [0]
        return outcome
    return workers.run(job, folder, variables=variables)


def is_possible(layout: str, num_devices: int, recovers: bool) -> bool:
    """Return whether a layout takes so many workers, and has two copies where it recovers."""
    if layout == "hybrid":
        return num_devices % 2 == 0 and num_devices > 2
    if layout == "full":
        return not recovers and num_devices > 1
    if recovers:
        return num_devices > 1 and (layout != "megatron" or num_devices % 2 == 0)
    return True


CASES = [
    case
    for case in grid(
        [pytest.param(each, id=each) for each in (*LAYOUTS, "megatron")],
        [pytest.param(each, id=str(each)) for each in WORLDS],
        [pytest.param(True, id="recovers"), pytest.param(False, id="restarts")],
        fast=["ddp-3-restarts", "full-2-restarts"],
    )
    if is_possible(*case.values)  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("layout", "num_devices", "recovers"), CASES)
def test_continued_run_has_the_bits_of_one_that_never_stopped(
    tmp_path: Path, workers: Workers, layout: str, num_devices: int, recovers: bool
) -> None:
    first, whole = (make_part(layout, num_devices, recovers, each) for each in (FIRST, LAST))
    undisturbed = run(workers, tmp_path / "calm", whole, recovers)

    tiers = tiered(every_n_steps=4)
    with start_nodes(tmp_path / "nodes") as nodes:
        variables = nodes.variables("n0")
        before = run(workers, tmp_path / "run", add_tiers(first, tiers), recovers, **variables)
        after = run(workers, tmp_path / "run", add_tiers(whole, tiers), recovers, **variables)

    assert saved_steps(before)[:3] == [4, 8, 10]
    assert loads(after) == [(rank, FIRST, "ram") for rank in range(num_devices)]
    assert not after.named("checkpoint_failed")
    assert bits(after) == bits(undisturbed)
    assert len(bits(after)) == LAST
    assert after.weights() == undisturbed.weights()


def bits(outcome: Outcome) -> dict[int, tuple[str, str]]:
    """Return loss and norm of each step; a step that was reported twice was the same."""
    found: dict[int, tuple[str, str]] = {}
    for each in outcome.steps:
        one = (each["loss"].hex(), each["grad_norm"].hex())
        assert found.setdefault(each["step"], one) == one, each
    return found
