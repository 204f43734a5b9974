"""A process that does not get ready while a rank waits for it is started anew, once."""

from __future__ import annotations

from functools import partial

import pytest

from resilience.events import Event
from tests.resilience.agent.conftest import Undisturbed
from tests.resilience.agent.runs import Run, fault, plan

# A process that a rank waits for has half of the time between the two.
TIMES = ("--join-deadline-s", "60", "--stop-deadline-s", "57")
JOB = ("--nproc-per-node", "1", "--spares", "0", *TIMES)
KILL = fault("kill", "forward", 0, 2)


def joins(node: str, event: Event) -> bool:
    return event.event == "node_joined" and event.fields["node"] == node


def test_process_that_hangs_while_it_starts_is_started_again(
    run: Run, undisturbed: Undisturbed
) -> None:
    hang = fault("sleep", "import", -1, after=0)
    run.start("n0", *JOB, variables=plan(KILL, hang))

    assert run.wait() == 0, run.show()
    assert run.happened() == [0, 1]
    assert run.text().count("was not ready within") == 1
    assert run.digests() == {0: undisturbed(1, 6)}
    run.assert_nothing_left()


@pytest.mark.slow
def test_node_whose_processes_hang_while_they_start_leaves_the_run(
    run: Run, undisturbed: Undisturbed
) -> None:
    """A standby node takes its place before the others give up."""
    hang = fault("sleep", "import", -1, after=0, always=True)
    kill = {**KILL, "rank": 1}
    for node, faults in (("n0", [kill]), ("n1", [kill, hang]), ("n2", [kill])):
        run.start(node, *JOB, "--nnodes", "2", "--standby-nodes", "1", variables=plan(*faults))
        if node != "n2":
            run.wait_for(partial(joins, node))

    assert [run.wait(node) for node in run.agents] == [0, 137, 0], run.show()
    last = run.text("n1").splitlines()[-1]
    assert last == (
        "resilience.agent n1: this node leaves the run with exit status 137: "
        "a worker of n1 was not ready in time, 2 times in a row"
    )
    assert set(run.digests().values()) == {undisturbed(2, 6)}
    run.assert_nothing_left()
