"""Workers that fail, die and hang in a run of one node end with the bits of an undisturbed one."""

from __future__ import annotations

import pytest

from tests.resilience.agent.conftest import Undisturbed
from tests.resilience.agent.runs import Run, fault, plan

NUM_RANKS = 3
OPTIONS = ("--nproc-per-node", str(NUM_RANKS), "--hang-deadline-s", "1", "--restarts-max", "30")

EXCEPTIONS = [
    fault("raise", "forward", 1, 0),
    fault("raise", "reduce", 0, 1),
    fault("raise", "gate", 2, 2),
    fault("raise", "before_update", 1, 3),
    fault("raise", "update", 0, 4),
    fault("raise", "after_update", 2, 5),
]
DEATHS = [
    fault("kill", "forward", 0, 0),
    fault("kill", "reduce", 1, 1),
    fault("kill", "forward", 2, 1),
    fault("kill", "before_update", 2, 2),
    fault("kill", "update", 0, 3),
    fault("kill_with_lock", "after_update", 1, 4),
    fault("kill_with_child", "gate", 0, 5),
]
DURING_RECOVERY = [
    fault("kill", "forward", 0, 1),
    fault("kill", "recovery", 1),
    fault("kill", "forward", 2, 3),
    fault("kill", "before_restart", 0),
    fault("raise", "forward", 1, 4),
    fault("raise", "recovery", 2),
    fault("drop_store", "forward", 1, 5),
    fault("raise", "reduce", 1, 5),
]
HANGS = [
    fault("stop", "forward", 0, 1),
    fault("gil", "reduce", 1, 2),
    fault("sleep", "forward", 2, 3),
    fault("pipe", "before_update", 0, 4),
    fault("thread", "forward", 1, 5),
]
HOOKS = [
    fault("raise", "forward", 2, 0),
    fault("raise", "report", 1),
    # What a break ends by itself may end sooner than the break comes, and then nothing is aborted.
    fault("pipe", "forward", 1, 1),
    fault("raise", "abort", 1),
    *(
        part
        for step, hook in enumerate(
            ("on_fault", "finalize", "health_check", "before_restart"), start=2
        )
        for part in (fault("raise", "forward", 0, step), fault("raise", hook, 1))
    ),
]


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(EXCEPTIONS, id="exceptions"),
        pytest.param(DEATHS, id="deaths"),
        pytest.param(DURING_RECOVERY, id="during-recovery"),
        pytest.param(HANGS, id="hangs"),
        pytest.param(HOOKS, id="hooks"),
    ],
)
def test_run_ends_with_the_undisturbed_bits(
    run: Run, undisturbed: Undisturbed, faults: list[dict[str, object]]
) -> None:
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
