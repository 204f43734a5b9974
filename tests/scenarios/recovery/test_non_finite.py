"""Steps that are not finite, under the agent: the run ends, skips them, or mends what made them."""

from __future__ import annotations

import pytest

from tests.cases import slow
from tests.recipes_training.spoiled import RANK, STEP
from tests.scenarios.recovery.runs import (
    FaultOutcome,
    check_same_bits,
    make_fault_job,
    run_job,
)

PROGRAMS = "tests.scenarios.recovery.programs"
NUM_STEPS = 6


def run_spoiled(folder, job, spoil) -> FaultOutcome:
    return run_job(
        folder,
        job,
        module=PROGRAMS,
        TEST_PROGRAM="spoil",
        TEST_SPOIL=spoil,
        TEST_MARKERS=str(folder),
    )


def agent_log(outcome: FaultOutcome) -> str:
    return (outcome.folder / "agent-n0.log").read_text()


def test_batch_that_is_not_finite_twice_ends_the_run_with_status_1(tmp_path):
    outcome = run_spoiled(tmp_path, make_fault_job(max_steps=NUM_STEPS), "spoil_batch")

    assert outcome.statuses == [1]
    last = [line for line in agent_log(outcome).splitlines() if "the run ends with" in line][-1]
    assert "exit status 1: " in last
    assert (
        f"step {STEP}: the gradient norm is nan, twice with the same bits, on rank {RANK}, samples "
        "28 to 29; lower trainer.optimizer.lr"
    ) in last
    # It would come again: nobody has tried another generation.
    assert len(outcome.named("generation_opened")) == 1
    assert max(outcome.bits()) == STEP - 1
    assert not outcome.left_behind


@pytest.mark.parametrize("trainer", ["ddp", slow("hybrid")])
def test_skipped_batch_is_skipped_again_after_faults(tmp_path, trainer):
    """Whether the update of nothing was begun, ended alone, or comes from another rank."""
    faults = [
        {"kind": "sigkill", "place": "before_update", "step": STEP, "rank": 1},
        {"kind": "exception", "place": "gate", "step": STEP, "rank": 0},
        {"kind": "sigkill", "place": "after_update", "step": STEP, "rank": RANK},
        {"kind": "sigkill", "place": "forward", "step": STEP + 1, "rank": 0},
    ]
    job = make_fault_job(trainer, max_steps=NUM_STEPS, values={"non_finite": "skip"})
    expected = run_spoiled(tmp_path / "on-purpose", job, "leave_out")
    job = make_fault_job(trainer, max_steps=NUM_STEPS, values={"non_finite": "skip"}, faults=faults)

    outcome = run_spoiled(tmp_path / "skip", job, "spoil_batch")

    assert outcome.statuses == [0], agent_log(outcome)
    # One of them may bring a rank behind the places of the others in that step.
    assert {each.step for each in outcome.named("fault_injected")} == {STEP, STEP + 1}
    skipped = outcome.named("non_finite")
    assert {(each.step, each.fields["outcome"]) for each in skipped} == {(STEP, "skipped")}
    assert bits_but(outcome) == bits_but(expected)
    assert outcome.digests() == expected.digests()
    assert outcome.weights() == expected.weights()
    assert not outcome.left_behind


def bits_but(outcome: FaultOutcome) -> dict[int, tuple[str, str]]:
    """Return the bits of the steps that were taken."""
    steps = [each for each in outcome.steps if each["step"] != STEP]
    return {each["step"]: (each["loss"].hex(), each["grad_norm"].hex()) for each in steps}


@pytest.mark.parametrize(
    ("trainer", "spoil", "words"),
    [
        ("ddp", "spoil_gradient_once", f"rank {RANK} computed other bits"),
        slow("hybrid", "spoil_gradient_once", f"rank {RANK} computed other bits"),
        slow("hybrid", "spoil_loss_once", f"rank {RANK} computed other bits"),
        slow("ddp", "spoil_state", f"rank {RANK} holds a state that other holders do not have"),
    ],
)
def test_silent_corruption_is_named_and_repaired_from_another_holder(
    tmp_path, undisturbed, trainer, spoil, words
):
    """Without self-checks: the step that is not finite is what is noticed."""
    settings = {"self_check_every_n_steps": None}
    job = make_fault_job(trainer, max_steps=NUM_STEPS, settings=settings)

    outcome = run_spoiled(tmp_path, job, spoil)

    assert outcome.statuses == [0], agent_log(outcome)
    check_same_bits(outcome, undisturbed(trainer, max_steps=NUM_STEPS))
    (event,) = outcome.named("non_finite")
    assert (event.fields["outcome"], event.fields["ranks"]) == ("corrupt", [RANK])
    corrupt = [e for e in outcome.named("fault_detected") if e.fields["reason"] == "corrupt"]
    assert [(each.rank, words in each.fields["text"]) for each in corrupt] == [(RANK, True)]
    roles = {e.rank: e.fields["role"] for e in outcome.named("rank_recovered") if e.generation == 1}
    assert roles == {rank: "repaired" if rank == RANK else "kept" for rank in range(4)}
    assert not outcome.named("worker_replaced")


@pytest.mark.slow
def test_state_without_another_holder_goes_back_and_says_so(tmp_path):
    """Two holders that differ, and nobody to tell which is right: the run begins anew."""
    job = make_fault_job("hybrid", max_steps=NUM_STEPS, settings={"self_check_every_n_steps": None})

    outcome = run_spoiled(tmp_path, job, "spoil_state")

    assert outcome.statuses == [0], agent_log(outcome)
    assert {each.step for each in outcome.named("recovery_fallback")} == {0}
    assert max(outcome.bits()) == NUM_STEPS - 1
    assert not outcome.left_behind
