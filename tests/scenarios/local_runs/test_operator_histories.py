"""Histories of faults and stops of many seeds under a stand-in operator: same bits, no step lost.

`OPERATOR_SEEDS=7,8` chooses the seeds.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import pytest

from tests.scenarios.local_runs.operator import REASONS, Act, Operator, draw
from tests.scenarios.local_runs.pods import memory_of, pods, run_folder
from tests.scenarios.recovery.runs import FaultOutcome, check_no_step_lost

pytestmark = pytest.mark.slow
SEEDS = [int(each) for each in os.environ.get("OPERATOR_SEEDS", "").split(",") if each] or range(3)
NUM_STEPS = 120
CHECKPOINTLESS, ELASTIC = "llama/llama3_tiny_checkpointless", "llama/llama3_tiny_elastic"
NO_FAULTS = "resilience.faults=null"
SMALL = (
    "model.num_layers=1", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.num_heads=1",
    "model.num_kv_heads=1", "data.max_bytes=200000", "data.seq_length=32",
    f"trainer.max_steps={NUM_STEPS}", "trainer.optimizer.decay_steps=400",
)  # fmt: skip
SPARE = "cluster.num_spares=1"


def injected(faults: Sequence[dict[str, Any]]) -> str:
    """Return the override by which the run brings faults upon itself."""
    words = json.dumps(faults).replace('"', "").replace(" ", "")
    return f"resilience.faults={{injected:{words},random:null}}" if faults else NO_FAULTS


def run(
    folder: Path, job: Sequence[str], acts: Sequence[Act] = (), *,
    num_nodes: int = 2, seed: int = 0, is_operated: bool = True,
) -> tuple[FaultOutcome, Operator]:  # fmt: skip
    """Run a job to its end; an operator brings the acts about."""
    with pods(folder, *job, num_nodes=num_nodes, is_operated=is_operated) as nodes:
        begun = nodes if SPARE in job else nodes[:2]
        operator = Operator(pods=nodes, nodes=begun, random=Random(seed))
        if is_operated:
            operator.start()
            operator.drive(acts)
            for node in nodes:
                node.command("/shutdown")
        statuses = [node.run.wait(node.name) for node in nodes]
        assert statuses == [0] * num_nodes, operator.show()
        nodes[0].run.assert_nothing_left()
        left = [str(memory_of(node)) for node in nodes if memory_of(node).exists()]
        return FaultOutcome(run_folder(nodes[0].run), statuses, tuple(left)), operator


def check_history(outcome: FaultOutcome, calm: FaultOutcome, lost: Sequence[int] = ()) -> None:
    """Assert that each step was taken once, with the bits of the run that nothing befell.

    `lost` are the ranks whose agents were killed. Events that only the agent of rank 0 had are lost
    with it, of steps that its ranks have taken: the others go on right behind them.
    """
    found, expected = outcome.bits(), calm.bits()
    steps = outcome.named("step")
    taken = [each.step for each in steps if each.fields["duration_s"] is not None]
    assert len(taken) == len({*taken})
    assert found == {step: expected[step] for step in found}
    goes_on = {each.step for each in outcome.named("rank_resumed") if each.step}
    behind = {step - each for step in goes_on for each in range(1, 20) if 0 in lost}
    assert {*expected} - {*found} <= behind
    assert {*outcome.digests().values()} == {*calm.digests().values()}
    assert outcome.weights() == calm.weights()
    check_no_step_lost(outcome.events)


def gaps(outcome: FaultOutcome) -> list[float]:
    """Return the seconds from each step, by its number, to the next one."""
    ends = {each.step: each.time for each in reversed(outcome.named("step"))}
    return [ends[step + 1] - ends[step] for step in range(NUM_STEPS - 1)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> FaultOutcome:
    job = (CHECKPOINTLESS, SPARE, *SMALL, NO_FAULTS)
    outcome, operator = run(tmp_path_factory.mktemp("undisturbed"), job, num_nodes=3)
    assert operator.num_starts == 1
    assert {*outcome.bits()} == {*range(NUM_STEPS)}
    return outcome


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed{seed}")
def test_a_history_ends_with_the_bits_of_the_undisturbed_run(
    tmp_path: Path, undisturbed: FaultOutcome, seed: int
) -> None:
    acts = draw(seed)
    kinds = [act.kind for act in acts]
    faults = injected([each for act in acts for each in act.faults()])

    job = (CHECKPOINTLESS, SPARE, *SMALL, faults, "resilience.checkpointless.hang_deadline_s=5")
    outcome, operator = run(tmp_path, job, acts, num_nodes=3, seed=seed)

    sys.stdout.write(
        f"seed {seed}: {[f'{act.kind}@{act.step}' for act in acts]}, did {operator.done}, "
        f"{operator.num_starts} starts, faults {operator.faults}\n"
    )
    assert set(operator.faults) <= {REASONS[kind] for kind in kinds if kind in REASONS}
    if not {"stop", *REASONS} & {*kinds}:
        seen = {state for node in operator.nodes for state in node.seen}
        assert seen <= {"ready", "running", "completed"}
        assert operator.num_starts == 1
    assert not outcome.left_behind
    check_history(outcome, undisturbed, [act.rank for act in acts if act.kind == "lost_agent"])


def test_a_run_of_2_3_and_2_nodes_ends_with_the_bits_of_one_that_never_changed(
    tmp_path: Path,
) -> None:
    """No state is read from the store: a node has it in memory, or gets it from another one's."""
    acts = [Act(kind="stop", step=17, size=3), Act(kind="stop", step=66, size=2)]
    (tmp_path / "calm").mkdir()
    calm, _ = run(tmp_path / "calm", (ELASTIC, *SMALL))

    outcome, operator = run(tmp_path, (ELASTIC, *SMALL), acts, num_nodes=3)

    assert operator.num_starts == 3
    # A node that the run has left keeps what it holds for a next start, as long as its pod.
    assert outcome.left_behind == (str(memory_of(operator.pods[2])),)
    check_history(outcome, calm)
    loads = outcome.named("checkpoint_loaded")
    assert len(loads) == 3 + 2
    assert {each.fields["source"].partition(":")[0] for each in loads} <= {"ram", "peer"}
    begun = {each.step - 1 for each in outcome.named("rank_resumed") if each.step}
    costs = [f"{gaps(outcome)[step]:.2f}" for step in sorted(begun)]
    sys.stdout.write(f"from the last step before a /stop to the next one: {costs} s\n")


def test_a_fault_under_the_operator_has_the_bits_of_one_without(tmp_path: Path) -> None:
    """Prints what each costs, for docs/benchmarks.md; `OPERATOR_RUNS=3` has more of them."""
    kinds = {"exception": range(20, 110, 20), "sigkill": range(30, 120, 20)}
    where = [(kind, step) for kind, steps in kinds.items() for step in steps]
    faults = [{"kind": kind, "place": "forward", "step": at, "rank": 1} for kind, at in where]
    costs: dict[tuple[str, bool], list[float]] = defaultdict(list)
    bits = []

    for number in range(2 * int(os.environ.get("OPERATOR_RUNS", "1"))):
        folder, is_operated = tmp_path / f"{number}", number % 2 == 0
        folder.mkdir()
        job = (CHECKPOINTLESS, *SMALL, injected(faults))
        outcome, _ = run(folder, job, is_operated=is_operated)
        assert len(outcome.named("fault_injected")) == len(faults)
        bits.append(outcome.bits())
        found = gaps(outcome)
        costs["all steps", is_operated].append(sum(found))
        for kind, step in where:
            # Beyond a step that no fault has met.
            costs[kind, is_operated].append(found[step - 1] - median(found))

    assert bits == bits[:1] * len(bits)
    for (kind, is_operated), values in sorted(costs.items()):
        spread = (
            f"{median(values):.3f} s ({min(values):.3f} to {max(values):.3f}), n = {len(values)}"
        )
        sys.stdout.write(f"{kind}, {is_operated = }: {spread}\n")
