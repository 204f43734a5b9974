"""Processes that do not start any more in a run that has begun: late ones, and those that end."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from functools import partial

from resilience.events import Event
from tests.resilience.agent.conftest import Undisturbed
from tests.resilience.agent.runs import Run, fault, listening, plan

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


STARTS_NO_MORE = fault("exit", "import", -1, after=0, always=True)


def test_run_of_one_node_whose_processes_start_no_more_asks_for_another_start(run: Run) -> None:
    run.start("n0", *JOB, variables=plan(KILL, STARTS_NO_MORE))

    assert run.wait() == 75, run.show()
    assert run.text().splitlines()[-1] == (
        "resilience.agent n0: the run ends with exit status 75: a worker of n0 ended with exit "
        "status 3 before it was ready, 2 times in a row"
    )
    run.assert_nothing_left()


def test_node_whose_processes_start_no_more_leaves_the_run_with_their_status(
    run: Run, undisturbed: Undisturbed
) -> None:
    """A standby node takes its place."""
    kill = {**KILL, "rank": 1}
    for node, faults in (("n0", [kill]), ("n1", [kill, STARTS_NO_MORE]), ("n2", [kill])):
        run.start(node, *JOB, "--nnodes", "2", "--standby-nodes", "1", variables=plan(*faults))
        if node != "n2":
            run.wait_for(partial(joins, node))

    assert [run.wait(node) for node in run.agents] == [0, 3, 0], run.show()
    assert run.text("n1").splitlines()[-1] == (
        "resilience.agent n1: this node leaves the run with exit status 3: a worker of n1 ended "
        "with exit status 3 before it was ready, 2 times in a row"
    )
    assert "resilience.agent n0: node n1 has left\n" in run.text("n0")
    run.assert_same(undisturbed(2, 6))


def test_node_all_of_whose_ranks_have_a_process_goes_on_without_spares(
    run: Run, undisturbed: Undisturbed
) -> None:
    go_on = run.folder / "go-on"
    os.mkfifo(go_on)
    waits = fault("wait_to_go_on", "forward", 0, 4)
    faults = plan(waits, STARTS_NO_MORE, NOTE=run.note, GO_ON=go_on)
    run.start("n0", "--nproc-per-node", "1", "--spares", "1", variables=faults)
    run.wait_for_note()
    for pid in run.children("n0"):
        if pid != run.zygote() and not listening(pid):
            with suppress(ProcessLookupError):  # unless it was late, and has ended itself
                os.kill(pid, signal.SIGKILL)
    run.wait_for(lambda event: "without spares" in str(event.fields.get("text")))

    go_on.write_text("")

    assert run.wait() == 0, run.show()
    assert (
        "a worker of n0 ended with exit status 3 before it was ready, 2 times in a row; the run "
        "goes on without spares on this node"
    ) in run.text()
    assert [each.event for each in run.events()].count("generation_opened") == 1
    assert run.digests() == {0: undisturbed(1, 6)}
    run.assert_nothing_left()
