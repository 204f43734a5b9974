"""A node that cannot end one of its processes leaves the run, and a standby takes its place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.resilience.agent.conftest import Undisturbed
from tests.resilience.agent.runs import Run, fault, plan
from tests.resilience.agent.unkillable import frozen, traced

JOB = ("--nproc-per-node", "1", "--spares", "0", "--hang-deadline-s", "2", "--stop-deadline-s", "1")
Hold = Callable[[int], AbstractContextManager[None]]


def start(run: Run, num_nodes: int, rank: int, *options: str) -> None:
    """Start all agents, n0 as the coordinator; a rank has come to where it waits for its end."""
    faults = (fault("tell", "import", -1), fault("wait", "forward", rank, 2))
    for number in range(num_nodes):
        run.start(f"n{number}", *JOB, *options, variables=plan(*faults, NOTE=run.note))
        if number == 0:
            run.wait_for_note()
    run.wait_for_note()


@pytest.mark.parametrize(
    ("hold", "state"),
    [
        pytest.param(traced, "state t", id="traced"),
        pytest.param(frozen, "state D", id="frozen", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "rank", [pytest.param(0, marks=pytest.mark.slow, id="coordinator"), pytest.param(1, id="other")]
)
def test_node_with_a_process_that_does_not_end_leaves_the_run(
    run: Run, undisturbed: Undisturbed, hold: Hold, state: str, rank: int
) -> None:
    start(run, 3, rank, "--nnodes", "2", "--standby-nodes", "1", "--join-deadline-s", "60")
    lost = f"n{rank}"
    _, pid = run.children(lost)

    with hold(pid):
        others = [node for node in run.agents if node != lost]
        assert [run.wait(node) for node in others] == [0, 0], run.show()
        assert run.wait(lost) == 137, run.show()

    words = f"process {pid} of rank {rank} has not ended 1 s after SIGKILL: {state}"
    last = run.text(lost).splitlines()[-1]
    assert last.startswith(
        f"resilience.agent {lost}: this node leaves the run with exit status 137: {words}"
    )
    warnings = [each for each in run.events() if each.event == "warning"]
    assert any(words in each.fields["text"] for each in warnings)
    run.assert_same(undisturbed(2, 6))
