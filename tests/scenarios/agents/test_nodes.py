"""Agents of several nodes on this machine, each of which may die."""

from __future__ import annotations

import re
import shutil
import signal
import socket

import pytest

from resilience.agent.program import describe_program
from tests.resilience.agent.conftest import Undisturbed
from tests.resilience.agent.runs import ROOT, Run, fault, listening_ports, plan

JOB = ("--nnodes", "2", "--nproc-per-node", "1", "--spares", "0")


def start(run: Run, num_nodes: int, rank: int, *options: str, **variables: int) -> None:
    """Start all agents, and return when a rank has come to where it waits for its end."""
    place = fault("wait", "forward", rank, 2)
    for number in range(num_nodes):
        run.start(f"n{number}", *JOB, *options, variables=plan(place, NOTE=run.note, **variables))
    run.wait_for_note()


def roles(run: Run, num_nodes: int) -> dict[str, str]:
    """Return who is what: rank 0, rank 1, coordinator, standby."""
    nodes = [f"n{number}" for number in range(num_nodes)]
    joined = [each for each in run.events() if each.event == "node_joined"]
    members = sorted(str(each.fields["node"]) for each in joined)[:2]
    found = {"rank-0": members[0], "rank-1": members[1], "coordinator": joined[-1].node}
    others = [node for node in nodes if node not in members]
    if others:
        found["standby"] = others[0]
    return found


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        pytest.param("rank-0", signal.SIGKILL, id="rank-0"),
        pytest.param("rank-1", signal.SIGKILL, id="rank-1", marks=pytest.mark.slow),
        pytest.param("rank-0", signal.SIGSTOP, id="silent", marks=pytest.mark.slow),
        pytest.param("rank-1", signal.SIGSTOP, id="silent-1", marks=pytest.mark.slow),
    ],
)
def test_standby_takes_the_place_of_a_lost_node(
    run: Run, undisturbed: Undisturbed, victim: str, number: int
) -> None:
    """Whether it coordinates, hosts the rendezvous, or neither."""
    start(run, 3, int(victim[-1]), "--standby-nodes", "1", "--join-deadline-s", "60")
    lost = roles(run, 3)[victim]

    run.agents[lost].send_signal(number)

    left = [node for node in run.agents if node != lost]
    assert [run.wait(node) for node in left] == [0, 0], run.show()
    said = "".join(run.text(node) for node in left)
    assert re.search(f"node {lost} is (silent|not heard)", said), run.show()
    run.kill(lost)
    run.assert_same(undisturbed(2, 6))


@pytest.mark.parametrize("variables", [{"ORDERLY": 1}, {}], ids=["orderly", "killed-by-it"])
def test_agent_that_is_asked_to_end_as_its_coordinator_dies_ends_with_its_workers(
    run: Run, variables: dict[str, int]
) -> None:
    """Also workers that would end after a step of all: none follows without another node."""
    start(run, 2, 0, "--term-deadline-s", "600", "--join-deadline-s", "60", **variables)
    lost = roles(run, 2)["coordinator"]
    (left,) = (node for node in run.agents if node != lost)

    run.agents[lost].kill()
    run.agents[left].send_signal(signal.SIGTERM)

    assert run.wait(left) == 143, run.show()
    assert "grace period" not in run.text(left)
    run.agents[lost].wait()
    run.assert_nothing_left()


def test_nodes_that_do_not_come_end_the_run(run: Run) -> None:
    """Also where the one that waits for them is not ready itself."""
    place = plan(fault("wait", "import", -1), NOTE=run.note)
    run.start("n0", *JOB, "--join-deadline-s", "5", variables=place)

    assert run.wait() == 75, run.show()
    assert "0 of 2 nodes joined within 5 s (none)" in run.text()
    run.assert_nothing_left()


@pytest.mark.slow
def test_without_a_standby_the_rest_says_so_and_gives_up(run: Run) -> None:
    """Meanwhile strangers call at its port, which does no harm."""
    start(run, 2, 0, "--join-deadline-s", "40")
    found = roles(run, 2)
    port = listening_ports(run.agents[found["rank-1"]].pid)[-1]
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    silent = socket.create_connection(("127.0.0.1", port))

    run.agents[found["rank-0"]].kill()

    assert run.wait(found["rank-1"]) == 75, run.show()
    silent.close()
    text, lost = run.text(found["rank-1"]), found["rank-0"]
    assert f"at most for {lost} or another node" in text
    assert f"took the place of lost {lost} within" in text.splitlines()[-1]
    assert "set resilience.checkpointless.standby_nodes" in text.splitlines()[-1]
    run.agents[found["rank-0"]].wait()
    run.assert_nothing_left()


def test_second_agent_of_a_name_is_refused(run: Run) -> None:
    first = run.start("n0", *JOB, variables=plan(fault("tell", "import", -1), NOTE=run.note))
    run.wait_for_note()
    (run.folder / "other").mkdir()
    other = Run(folder=run.folder / "other", port=run.port, mark=run.mark)
    other.start("n0", *JOB)

    assert other.wait() == 2, other.show()
    first.terminate()
    assert run.wait() == 143, run.show()
    assert "another agent is named 'n0'; set --node-name" in other.text()
    run.assert_nothing_left()


def test_a_node_with_other_code_is_refused_in_both_words(run: Run) -> None:
    code = run.folder / "code"
    shutil.copytree(ROOT / "resilience", code / "resilience")
    with (code / "resilience" / "errors.py").open("a") as file:
        file.write("# Another line.\n")
    first = run.start("n0", *JOB, variables=plan(fault("tell", "import", -1), NOTE=run.note))
    run.wait_for_note()

    run.start("n1", *JOB, variables={"PYTHONPATH": str(code)}, is_real=True)

    assert run.wait("n1") == 2, run.show()
    first.terminate()
    assert run.wait() == 143, run.show()
    words = r"node n1 has (code \w{12}, torch \S+); the run has (code \w{12}, torch \S+)\n"
    found = re.search(words, run.text("n1"))
    assert found, run.show()
    other, own = found.groups()
    assert own == describe_program(None)
    assert other != own
    run.assert_nothing_left()
