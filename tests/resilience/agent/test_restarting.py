"""Runs without recovery: after any fault all workers of all nodes begin afresh."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from resilience.agent.__main__ import _worker_variables
from resilience.inprocess.variables import NCCL_ERRORS
from tests.resilience.agent.conftest import Undisturbed
from tests.resilience.agent.runs import (
    LIMIT_S,
    PLAIN_PROGRAM,
    ROOT,
    Run,
    fault,
    listening_ports,
    plan,
)
from tests.shared import Shared
from tests.waiting import wait_until

HERE = Path(__file__).parent
PLAIN = (str(PLAIN_PROGRAM),)
ONE_NODE = ("--no-recovery", "--nproc-per-node", "2")
RECOVERY = ("--nproc-per-node", "2")
TWO_NODES = ("--no-recovery", "--nnodes", "2", "--nproc-per-node", "1")


def faults(*each: tuple[str, int, int]) -> str:
    """Return (kind, rank, start) as the program reads them."""
    return json.dumps([{"kind": kind, "rank": rank, "count": count} for kind, rank, count in each])


def start(run: Run, options: Sequence[str], *each: tuple[str, int, int], **more: str) -> None:
    """Start as many agents as the options say there are nodes."""
    for node in ("n0", "n1") if "--nnodes" in options else ("n0",):
        start_node(run, node, options, *each, **more)


def start_node(
    run: Run, node: str, options: Sequence[str], *each: tuple[str, int, int], **more: str
) -> None:
    variables = {"FAULTS": faults(*each), "NOTE": str(run.note), **more}
    run.start(node, *options, program=PLAIN, warm="imports", variables=variables)


def statuses(run: Run) -> list[int]:
    return [run.wait(node) for node in run.agents]


def reason(run: Run, node: str) -> str:
    """Return why the run has ended; a worker may say more after it."""
    (line,) = [each for each in run.text(node).splitlines() if "the run ends with" in each]
    return line


def starts(run: Run) -> dict[tuple[int, int], list[str]]:
    """Return by (start, rank) who was found in the store, its port, and the process."""
    files = (run.folder / "out").glob("start-*")
    return {
        (int(each.name.split("-")[1]), int(each.name.split("-")[2])): each.read_text().split()
        for each in files
    }


# ---- restarts


def test_all_workers_begin_afresh_on_every_node(run: Run) -> None:
    start(run, [*TWO_NODES, "--max-restarts", "2"], ("raise", 1, 0), ("raise", 0, 1))

    assert statuses(run) == [0, 0], run.show()
    found = starts(run)
    assert sorted(found) == [(count, rank) for count in range(3) for rank in range(2)]
    assert {each[0] for each in found.values()} == {"nobody"}
    assert len({each[2] for each in found.values()}) == 6
    assert run.digests() == {0: "3.0", 1: "3.0"}
    run.assert_nothing_left()


@pytest.mark.parametrize("options", [ONE_NODE, TWO_NODES], ids=["one node", "two nodes"])
def test_run_ends_as_the_worker_that_was_killed_and_not_as_its_peer(
    run: Run, options: Sequence[str]
) -> None:
    """The peer notices the closed connection, and is buried first."""
    start(run, options, ("cause", 0, 0), ("follows", 1, 0))

    assert set(statuses(run)) == {137}, run.show()
    assert "rank 0 was killed by SIGKILL" in reason(run, "n0")
    run.assert_nothing_left()


def test_run_ends_as_a_worker_whose_peer_closed_a_connection_and_lives(run: Run) -> None:
    start(run, ONE_NODE, ("idle", 0, 0), ("follows", 1, 0))

    assert run.wait() == 1, run.show()
    assert "rank 1 ended with exit status 1: RuntimeError: [x/gloo" in reason(run, "n0")
    run.assert_nothing_left()


def test_worker_that_does_not_end_when_told_is_killed(run: Run) -> None:
    options = [*ONE_NODE, "--max-restarts", "1", "--term-deadline-s", "1"]
    start(run, options, ("stubborn", 0, 0), ("raise", 1, 0))

    assert run.wait() == 0, run.show()
    assert run.digests() == {0: "3.0", 1: "3.0"}
    run.assert_nothing_left()


def test_worker_that_has_ended_well_begins_afresh_with_the_others_only(run: Run) -> None:
    start(run, [*ONE_NODE, "--max-restarts", "1"], ("end", 0, 0), ("wait", 1, 0))
    run.wait_for_note()
    before = starts(run)

    os.kill(int(before[0, 1][2]), signal.SIGKILL)

    assert run.wait() == 0, run.show()
    assert sorted(before) == [(0, 0), (0, 1)]
    assert sorted(starts(run)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    run.assert_nothing_left()


def test_block_is_not_run_again_in_its_process(run: Run, undisturbed: Undisturbed) -> None:
    places = plan(fault("raise", "forward", 1, 2))
    run.start("n0", *ONE_NODE, "--max-restarts", "1", warm="imports", variables=places)

    assert run.wait() == 0, run.show()
    assert [(number, role) for number, _, role, _ in run.resumed()] == [
        (number, "started") for number in (0, 0, 1, 1)
    ]
    assert "ValueError: a planned fault" in run.text()
    run.assert_same(undisturbed(2, 6))


# ---- nodes


def test_lost_node_that_comes_back_takes_part_again(run: Run) -> None:
    options = [*TWO_NODES, "--max-restarts", "1", "--join-deadline-s", "100"]
    start(run, options, ("wait", 0, 0))
    run.wait_for_note()
    lost = next(
        node for node, agent in run.agents.items() if run.port not in listening_ports(agent.pid)
    )
    other = next(node for node in run.agents if node != lost)

    run.kill(lost)
    start_node(run, lost, options)

    assert [run.wait(other), run.wait(lost)] == [0, 0], run.show()
    assert {(1, 0), (1, 1)} < set(starts(run))
    assert run.digests() == {0: "3.0", 1: "3.0"}
    run.assert_nothing_left()


def test_node_whose_workers_had_ended_begins_afresh_with_another_coordinator(run: Run) -> None:
    options = [*TWO_NODES, "--max-restarts", "2", "--join-deadline-s", "100"]
    start_node(run, "n0", options, ("idle", 0, 0))
    wait_until(lambda: run.port in listening_ports(run.agents["n0"].pid))
    start_node(run, "n1", options, ("idle", 0, 0), ("follows", 1, 0))
    # What has ended it is waited for before that is told.
    wait_until(lambda: "rank 1 ended with exit status 1" in run.text("n1"))

    run.kill("n0")
    start_node(run, "n0", options)

    assert [run.wait("n0"), run.wait("n1")] == [0, 0], run.show()
    assert {(1, 0), (1, 1)} < set(starts(run))
    run.assert_nothing_left()


# ---- the end


def test_signal_reaches_the_workers_of_all_nodes(run: Run) -> None:
    start(run, [*TWO_NODES, "--max-restarts", "5"], ("wait", 1, 0))
    run.wait_for_note()

    run.agents["n0"].terminate()

    assert statuses(run) == [143, 143], run.show()
    assert {count for count, _ in starts(run)} == {0}
    run.assert_nothing_left()


def test_workers_that_stop_together_are_not_started_again(run: Run) -> None:
    start(run, [*TWO_NODES, "--max-restarts", "5"], ("asked", 0, 0), ("asked", 1, 0))

    assert statuses(run) == [143, 143], run.show()
    assert {count for count, _ in starts(run)} == {0}
    run.assert_nothing_left()


# ---- what a worker is told


OTHER_VALUES = {"MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"}
"""A free port, and a file in the run's own folder."""
NOT_TOLD = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
"""Which torchrun sets for itself."""


@pytest.mark.parametrize(
    ("recovery", "warm"),
    [
        pytest.param(ONE_NODE, "imports", id="none"),
        pytest.param(RECOVERY, "imports", id="full"),
        pytest.param(RECOVERY, "program", id="in-a-block"),
    ],
)
def test_worker_is_told_what_torchrun_tells_it(
    run: Run, shared: Shared, recovery: Sequence[str], warm: str
) -> None:
    """A program that waits for its rank in a block finds it there."""
    program = str(HERE / "environment_program.py")
    in_block = {"IN_BLOCK": "1"} if warm == "program" else {}
    known = {"OMP_NUM_THREADS": None, "KMP_BLOCKTIME": None, **in_block}
    max_restarts = ("--max-restarts" if recovery == ONE_NODE else "--restarts-max", "3")
    options = (*recovery, *max_restarts, "--rdzv-id", "name")
    run.start("n0", *options, program=(program,), warm=warm, variables=known)
    assert run.wait() == 0, run.show()
    ours = read_environments(run.folder / "out")

    # It takes seconds, and tells both the same.
    theirs = read_environments(
        shared.make_once("torchrun's variables", lambda folder: _run_torchrun(run, folder, program))
    )

    for own, its in zip(ours, theirs, strict=True):
        told = set(its) - set(os.environ) - NOT_TOLD - {"OUT"} | {"OMP_NUM_THREADS"}
        assert told - set(own) == set()
        differing = {name for name in told if own[name] != its[name]}
        assert differing == OTHER_VALUES | ({NCCL_ERRORS} if recovery != ONE_NODE else set())


@pytest.mark.parametrize(
    ("recovers", "given", "told"),
    [(True, None, "0"), (False, None, "1"), (True, "2", "2"), (False, "3", "3")],
)
def test_survivors_of_a_dead_peer_of_nccl_live_unless_a_job_says_else(
    recovers: bool, given: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's watchdog ends the process with 1 and 3, and aborts communicators with 1 and 2."""
    monkeypatch.delenv(NCCL_ERRORS, raising=False)
    if given is not None:
        monkeypatch.setenv(NCCL_ERRORS, given)
    options = argparse.Namespace(
        recovers=recovers,
        process_restarts_max=3,
        max_restarts=0,
        local_addr="127.0.0.1",
        rdzv_id="id",
        script=None,
    )

    assert _worker_variables(options)[NCCL_ERRORS] == told


def _run_torchrun(run: Run, folder: Path, program: str) -> None:
    environment = {
        **{key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"},
        "OUT": str(folder),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
    }
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
        *("--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=name", "--local-addr=127.0.0.1"),
        *(f"--rdzv-endpoint=127.0.0.1:{run.port}", program),
    ]
    subprocess.run(command, env=environment, check=True, timeout=LIMIT_S, capture_output=True)


def read_environments(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"environment-{rank}").read_text()) for rank in range(2)]
