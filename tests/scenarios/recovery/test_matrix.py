"""Every kind of fault in every place on every rank, under each trainer: same bits, no step lost."""

from __future__ import annotations

import sys
from collections import Counter

import pytest

from tests.cases import slow
from tests.scenarios.recovery.matrix import all_faults, one_of_each, pack, spread_faults
from tests.scenarios.recovery.runs import SHARDINGS, check_same, make_fault_job, run_job

NUM_STEPS = 70
FEW_STEPS = 24
"""As many as other tests of this folder have, which compare with the same run."""
SCHEDULES = list(pack(all_faults(), NUM_STEPS))


@pytest.mark.parametrize("trainer", [slow("ddp"), "hybrid"])
def test_run_survives_a_fault_of_each_kind(tmp_path, undisturbed, trainer):
    (faults,) = pack(one_of_each(), FEW_STEPS)

    outcome = run_job(tmp_path, make_fault_job(trainer, max_steps=FEW_STEPS, faults=faults))

    check_same(outcome, undisturbed(trainer, max_steps=FEW_STEPS), faults=faults)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", SHARDINGS)
@pytest.mark.parametrize("number", range(len(SCHEDULES)))
def test_run_survives_every_fault_on_every_rank(tmp_path, undisturbed, trainer, number):
    faults = SCHEDULES[number]

    outcome = run_job(tmp_path, make_fault_job(trainer, max_steps=NUM_STEPS, faults=faults))

    kinds = Counter(each["kind"] for each in faults)
    line = f"{trainer} {number}: {len(faults)} faults {dict(kinds)}, {summary(outcome)}"
    sys.stdout.write(f"{line}\n")
    check_same(outcome, undisturbed(trainer, max_steps=NUM_STEPS), faults=faults)


def summary(outcome) -> str:
    roles = Counter(each.fields["role"] for each in outcome.named("rank_recovered"))
    return f"{len(outcome.named('generation_opened'))} generations, {dict(roles)}"


def test_spread_has_each_kind_in_each_place_and_at_least_sixty_faults():
    both = spread_faults("ddp") + spread_faults("hybrid")
    pairs = {(each["kind"], each["place"], each.get("tensor")) for each in both}
    every = {(each["kind"], each["place"], each.get("tensor")) for each in all_faults()}

    assert len(both) >= 60
    assert {pair for pair in every - pairs if pair[0] != "sigstop"} == set()
    assert sum(len(each) for each in SCHEDULES) > len(all_faults()) == 264
