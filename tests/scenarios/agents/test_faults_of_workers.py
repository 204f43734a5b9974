"""Workers that fail, die and hang in a run of one node end with the bits of an undisturbed one."""

from __future__ import annotations

import pytest

from tests.resilience.agent.conftest import Undisturbed
from tests.resilience.agent.runs import Run, fault, plan

NUM_RANKS = 3
OPTIONS = ("--nproc-per-node", str(NUM_RANKS), "--hang-deadline-s", "1", "--restarts-max", "30")

FAULTS = {
    "exceptions": (
        "raise forward 1 0, raise reduce 0 1, raise gate 2 2, raise before_update 1 3,"
        "raise update 0 4, raise after_update 2 5"
    ),
    "deaths": (
        "kill forward 0 0, kill reduce 1 1, kill forward 2 1, kill before_update 2 2,"
        "kill update 0 3, kill_with_lock after_update 1 4, kill_with_child gate 0 5"
    ),
    "during-recovery": (
        "kill forward 0 1, kill recovery 1, kill forward 2 3, kill enter 0,"
        "raise forward 1 4, raise recovery 2, drop_store forward 1 5, raise reduce 1 5"
    ),
    "hangs": (
        "stop forward 0 1, gil reduce 1 2, sleep forward 2 3, pipe before_update 0 4,"
        "thread forward 1 5"
    ),
    "reports": "raise forward 2 0, raise report 1, raise forward 0 2, raise on_fault 1",
}
"""For each of them what happens, where, to which rank, and at which step."""


@pytest.mark.parametrize("name", FAULTS)
def test_run_ends_with_the_undisturbed_bits(run: Run, undisturbed: Undisturbed, name: str) -> None:
    words = [each.split() for each in FAULTS[name].split(",")]
    faults = [fault(kind, place, *map(int, numbers)) for kind, place, *numbers in words]
    run.start("n0", *OPTIONS, variables=plan(*faults))

    assert run.wait() == 0, run.show()
    assert run.happened() == list(range(len(faults))), run.show()
    assert run.digests() == dict.fromkeys(range(NUM_RANKS), undisturbed(NUM_RANKS, 6))
    run.assert_nothing_left()


def test_workers_of_a_node_that_die_together_are_counted_once(
    run: Run, undisturbed: Undisturbed
) -> None:
    # There all have begun that step: nobody has one to take again that the dead had committed.
    deaths = [fault("kill", "gate", rank, 2) for rank in (0, 1)]
    run.start("n0", *OPTIONS, "--restarts-max", "1", variables=plan(*deaths))

    assert run.wait() == 0, run.show()
    assert run.happened() == [0, 1]
    assert run.digests() == dict.fromkeys(range(NUM_RANKS), undisturbed(NUM_RANKS, 6))
    run.assert_nothing_left()
