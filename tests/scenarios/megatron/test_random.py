"""Runs of Megatron with faults that chance draws have the bits of those without."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.job import Job
from tests.recipes_training.megatron.runs import LAYOUTS, NUM_STEPS, list_shards, make_megatron_job
from tests.scenarios.megatron.draws import KINDS, PLACES, Case, draw
from tests.scenarios.recovery.runs import FaultOutcome, check_same, run_job

CASES = draw({name: list_shards(name) for name in LAYOUTS}, 100, num_steps=NUM_STEPS)


def test_every_layout_meets_each_kind_and_each_place() -> None:
    kinds = {(case.layout, fault["kind"]) for case in CASES for fault in case.faults}
    places = {(case.layout, fault["place"]) for case in CASES for fault in case.faults}

    assert kinds >= {(layout, kind) for layout in LAYOUTS for kind in KINDS}
    assert places >= {(layout, place) for layout in LAYOUTS for place in PLACES}
    assert {(case.precision, case.overlaps) for case in CASES} == {
        (precision, overlaps) for precision in ("fp32", "bf16") for overlaps in (False, True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.seed))
def test_a_run_with_a_drawn_fault_has_the_bits_of_one_without(
    tmp_path: Path, undisturbed: Callable[[Job], FaultOutcome], case: Case
) -> None:
    job = make_megatron_job(case.layout, faults=case.faults, **case.values)

    outcome = run_job(tmp_path, job)

    sys.stdout.write(f"{case}\n")
    check_same(
        outcome, undisturbed(make_megatron_job(case.layout, **case.values)), faults=case.faults
    )
    hung = [e.rank for e in outcome.named("fault_detected") if e.fields["reason"] == "hung"]
    stopped = [each["rank"] for each in case.faults if each["kind"] == "sigstop"]
    assert set(hung) <= set(stopped), "a wait has outlived its generation"
