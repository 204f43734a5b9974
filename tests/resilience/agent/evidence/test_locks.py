"""Locks by which agents on one machine know that others have ended, on a real file system."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from resilience.agent.coordination.events import Judged, NodeEnded
from resilience.agent.evidence.folder import Answer, RunFolder
from resilience.agent.evidence.locks import is_lock_held
from tests.resilience.agent.evidence.test_folder import answer, begin


class Node:
    """An agent, and a worker of its that has inherited the lock."""

    def __init__(self, path: Path, name: str, *, run: str = "a") -> None:
        self.name = name
        self.folder = RunFolder(path, run=run)
        self._lock = self.folder.hold_lock()
        assert self._lock >= 0
        self.folder.announce(f"{name}:1", name)
        answer(self.folder)
        self.worker = subprocess.Popen(
            ["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[self._lock]
        )

    def end_agent(self) -> None:
        """As a killed agent does, which leaves its file."""
        os.close(self._lock)

    def end_worker(self) -> None:
        self.worker.communicate()

    def end(self) -> None:
        self.end_agent()
        self.end_worker()

    def check(self, *others: Node) -> list[Answer]:
        """Return what is found out about others."""
        self.folder.check({each.name: frozenset({each.folder.start}) for each in others})
        return answer(self.folder)


def ended(node: Node) -> NodeEnded:
    return NodeEnded(
        node=node.name,
        starts=frozenset({node.folder.start}),
        reason="all its processes on this machine have ended",
    )


def test_agent_has_ended_once_all_that_hold_its_lock_have(tmp_path: Path) -> None:
    n0, n1 = Node(tmp_path, "n0"), Node(tmp_path, "n1")

    assert n0.check(n1) == []
    n1.end_agent()
    assert n0.check(n1) == []
    n1.end_worker()

    assert n0.check(n1) == [ended(n1)]
    n0.end()


def test_agent_that_was_started_again_is_not_dead(tmp_path: Path) -> None:
    """It may have become a member of what the one that asks does not see."""
    n0, old = Node(tmp_path, "n0"), Node(tmp_path, "n1")
    old.end()
    new = Node(tmp_path, "n1")

    assert n0.check(old) == []
    new.end()

    assert n0.check(old) == [ended(old)]
    n0.end()


@pytest.mark.parametrize("boot", ["", "of another machine"])
def test_lock_of_another_machine_is_no_evidence(tmp_path: Path, boot: str) -> None:
    n0, n1 = Node(tmp_path, "n0"), Node(tmp_path, "n1")
    n1.end()
    path = tmp_path / "agents" / n1.folder.start
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot": boot}))

    assert n0.check(n1) == []
    n0.end()


def test_lock_is_no_evidence_where_the_file_system_may_be_anywhere() -> None:
    assert is_lock_held(Path("/proc/self/stat")) is None


def test_agent_without_a_file_may_live(tmp_path: Path) -> None:
    n0, n1 = Node(tmp_path, "n0"), Node(tmp_path, "n1")
    n1.end()
    (tmp_path / "agents" / n1.folder.start).unlink()

    assert n0.check(n1) == []
    n0.end()


def test_run_whose_agents_have_come_again_or_ended_is_begun_anew_at_once(tmp_path: Path) -> None:
    first = [Node(tmp_path, name) for name in ("n0", "n1", "n2")]
    begin(first[0].folder, "n0", "n1", "n2")
    for node in first[:2]:
        node.end()
    again = Node(tmp_path, "n0")

    refused = begin(again.folder, "n0")
    first[2].end()
    begun = begin(again.folder, "n0").record

    assert refused == Judged(record=None, reason="n2 may go on with the run")
    assert begun
    assert begun.number == 1
    again.end()


def test_another_run_waits_as_long_as_a_process_of_the_one_before_lives(tmp_path: Path) -> None:
    """Its agents have the names of the others, and say nothing of their processes."""
    first = [Node(tmp_path, name) for name in ("n0", "n1")]
    begin(first[0].folder, "n0", "n1")
    first[0].end()
    first[1].end_agent()
    others = [Node(tmp_path, name, run="another") for name in ("n0", "n1")]

    refused = begin(others[0].folder, "n0", "n1")
    first[1].end_worker()
    begun = begin(others[0].folder, "n0", "n1").record

    assert refused.reason == "n0, n1 may go on with run 'a' in the same folder"
    assert begun
    assert (begun.run, begun.number) == ("another", 1)
    for node in others:
        node.end()
