"""A run of Megatron with faults has the bits of one without, whatever the layout of its ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.job import Job
from tests.cases import slow
from tests.recipes_training.megatron.runs import (
    GPT_OSS,
    LAYOUTS,
    LLAMA,
    check_nobody_had_to_be_stopped,
    make_megatron_job,
)
from tests.scenarios.recovery.runs import FaultOutcome, check_same, make_fault_job, run_job

FAULTS = (
    {"kind": "exception", "place": "backward"},
    {"kind": "sigkill", "place": "forward"},
    {"kind": "exception", "place": "within_update"},
    {"kind": "sigkill", "place": "within_update"},
    {"kind": "exception", "place": "settle"},
    {"kind": "sigkill", "place": "settle"},
)
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
BF16 = {"precision": "bf16", "dropout": 0.1}


@pytest.mark.parametrize(
    ("layout", "values"),
    [
        pytest.param("sharded", {**BF16, **OVERLAP}, id="sharded-bf16-overlap"),
        pytest.param("experts", {}, id="experts"),
        pytest.param("sequence", {**BF16, **OVERLAP}, id="sequence-bf16-overlap"),
        pytest.param("tensor-pipeline", OVERLAP, id="tensor-pipeline-overlap"),
        slow("tensor", {}, id="tensor"),
        slow("pipeline", BF16, id="pipeline-bf16"),
        slow("long-pipeline", {}, id="long-pipeline"),
        slow("sharded", {}, id="sharded"),
        slow("sharded", OVERLAP, id="sharded-overlap"),
        slow("sequence", {}, id="sequence"),
        slow("sequence", BF16, id="sequence-bf16"),
        slow("pipeline", {}, id="pipeline"),
        slow("experts", BF16, id="experts-bf16"),
        slow("experts-tensor", OVERLAP, id="experts-tensor-overlap"),
        slow("long-pipeline", BF16, id="long-pipeline-bf16"),
    ],
)
def test_a_run_with_faults_has_the_bits_of_one_without(
    tmp_path: Path,
    undisturbed: Callable[[Job], FaultOutcome],
    layout: str,
    values: dict[str, Any],
) -> None:
    world_size = LAYOUTS[layout].get("num_devices", 4)
    faults = [
        {**fault, "step": 2 + 2 * number, "rank": (3 * number + 1) % world_size}
        for number, fault in enumerate(FAULTS)
    ]

    # Whoever waits on is found by the deadline for stopping, and by no other.
    job = make_megatron_job(layout, faults=faults, settings={"hang_deadline_s": 60}, **values)

    outcome = run_job(tmp_path, job)

    check_same(outcome, undisturbed(make_megatron_job(layout, **values)), faults=faults)
    check_nobody_had_to_be_stopped(outcome)


@pytest.mark.parametrize("layout", ["sequence", slow("sharded"), slow("tensor"), slow("pipeline")])
def test_losses_are_those_of_the_torch_trainer(
    undisturbed: Callable[[Job], FaultOutcome], layout: str
) -> None:
    """The same seed begins with the same weights, under whatever trainer."""
    check_losses(undisturbed, layout, LLAMA)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["experts", "experts-tensor", "experts-sequence", "sharded"])
def test_losses_of_experts_are_those_of_the_torch_trainer(
    undisturbed: Callable[[Job], FaultOutcome], layout: str
) -> None:
    # Each balances its experts over other tokens: torch over a rank's, Megatron over a layer's.
    check_losses(undisturbed, layout, {**GPT_OSS, "router_aux_loss_coef": 0.0})


def check_losses(
    undisturbed: Callable[[Job], FaultOutcome], layout: str, model: dict[str, Any]
) -> None:
    values = {"overlap_grad_reduce": False, "overlap_param_gather": False, **LAYOUTS[layout]}
    jobs = [
        make_fault_job("megatron", max_steps=20, values=values, model=model),
        make_fault_job("ddp", max_steps=20, model=model),
    ]

    ours, theirs = (undisturbed(job) for job in jobs)
    found, expected = ours.steps, theirs.steps

    assert [each["loss"] for each in found] == pytest.approx(
        [each["loss"] for each in expected], rel=1e-5
    )
    assert [each["grad_norm"] for each in found] == pytest.approx(
        [each["grad_norm"] for each in expected], rel=1e-4
    )
    check_weights(ours.folder / "checkpoint", theirs.folder / "checkpoint")


def check_weights(found: Path, expected: Path) -> None:
    """Assert that both folders hold one model, but for rounding, and that it can be loaded."""
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(each) for each in (found, expected)]
    ours, theirs = (dict(each.named_parameters()) for each in models)

    assert ours.keys() == theirs.keys()
    for name, each in ours.items():
        difference = (each - theirs[name]).abs().max().item()
        assert difference < 1e-4, f"{name} differs by {difference}"


@pytest.mark.slow
def test_dropout_draws_the_same_on_another_number_of_ranks(
    undisturbed: Callable[[Job], FaultOutcome],
) -> None:
    """What is drawn goes by the number of the micro batch in the global batch."""
    runs = [
        undisturbed(make_megatron_job("sharded", dropout=dropout, num_devices=num))
        for dropout, num in ((0.1, 4), (0.1, 2), (0.0, 4))
    ]

    four, two, without = ([step["loss"] for step in run.steps] for run in runs)

    assert four == pytest.approx(two, rel=1e-5)
    assert four != pytest.approx(without, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_a_run_without_recovery_has_the_same_bits(
    tmp_path: Path, undisturbed: Callable[[Job], FaultOutcome], layout: str
) -> None:
    plain = make_megatron_job(layout, recovers=False)

    outcome = run_job(tmp_path, plain)

    assert outcome.statuses == [0], outcome.log()
    expected = undisturbed(make_megatron_job(layout))
    assert outcome.bits() == expected.bits()
    assert outcome.weights() == expected.weights()
    assert not outcome.left_behind
